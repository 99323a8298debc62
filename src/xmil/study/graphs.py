"""A step that is run many times: as it is on a CPU, recorded as a CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARMUP_RUNS = 3  # what CUDA asks for before a recording


class Repeated:
    """A function of no arguments that changes `state` in place, without anything the host must wait for.

    Steps of small models are bound by launching kernels; a graph launches them all at once.
    """

    def __init__(self, function: Callable[[], None], state: Sequence[Tensor]) -> None:
        self._function = function
        self._state = state
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self._state[0].is_cuda:
            self._function()
            return
        if self._graph is None:
            self._graph = self._record()
        self._graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph:
        """Record one run; the runs that warm up leave the state as it was."""
        before = [tensor.detach().clone() for tensor in self._state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_RUNS):
                self._function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._function()
        with torch.no_grad():
            for tensor, value in zip(self._state, before, strict=True):
                tensor.copy_(value)
        return graph
