"""A step that is run many times: as it is on a CPU, recorded as a CUDA graph on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

WARMUP_RUNS = 3  # what CUDA asks for before a recording


class Repeated:
    """A function of no arguments that changes `state` in place, without anything the host must wait for.

    Steps of small models are bound by launching kernels; a graph launches them all at once.
    """

    def __init__(self, function: Callable[[], None], state: Sequence[Tensor]) -> None:
        self._function = function
        self._state = state
        self._recordable = state[0].is_cuda
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is None and self._recordable:
            self._graph = self._record()
        if self._graph is None:
            self._function()
        else:
            self._graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph | None:
        """Record one run; the state is afterwards as it was. What cannot be recorded is run as it is."""
        before = [tensor.detach().clone() for tensor in self._state]
        try:
            return self._capture()
        except RuntimeError as error:
            logger.warning("The training step runs without a CUDA graph: %s", str(error).splitlines()[0])
            self._recordable = False
            return None
        finally:
            with torch.no_grad():
                for tensor, value in zip(self._state, before, strict=True):
                    tensor.copy_(value)

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_RUNS):
                self._function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._function()
        return graph
