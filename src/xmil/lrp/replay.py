"""Record passes over bags of one shape on a GPU and replay them, without Python between the kernels.

With a small bag, a GPU mostly waits for the next launch. The second bag of each shape is recorded as two CUDA
graphs, forward and backward under the rules; later bags are copied into its memory and replayed. The key
holds all that decides the kernels: the module with its settings and the addresses of its weights (their
values may change), shapes, rules and torch's own flags.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cached_property
from threading import local
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from xmil.lrp.engine import Trace

Run = Callable[[Tensor, Tensor | None], Trace]
SMALL_BYTES = 1 << 27  # larger bags keep a GPU busy
MEMORY_FRACTION = 256  # a bag may take this fraction of the GPU's memory: 1 / 256
MOST_RECORDINGS = 2  # per model and thread: each holds the memory of a pass
MOST_SHAPES = 64  # per model and thread
RAN_ONCE, NOT_RECORDABLE = "ran once", "not recordable"
_PLAIN = (int, float, bool, str, type(None))


class Recording:
    """A forward pass, with or without a reference instance, and its backward pass, as CUDA graphs."""

    def __init__(self, run: Run, x: Tensor, reference: Tensor | None) -> None:
        self._inputs = (x.clone(), None if reference is None else reference.clone())
        warm_up = torch.cuda.Stream(x.device)
        warm_up.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(warm_up):  # libraries initialise in the first pass on a stream
            trace = run(*self._inputs)
            trace.backward(torch.zeros_like(trace.logits), keep=False)
        torch.cuda.current_stream(x.device).wait_stream(warm_up)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, capture_error_mode="thread_local"):
            self._trace = run(*self._inputs)
        self._seed = torch.zeros_like(self._trace.logits)
        with torch.cuda.graph(self._backward, pool=self._forward.pool(), capture_error_mode="thread_local"):
            self._gradients = self._trace.backward(self._seed, keep=True)
        self._trace.forget_module()

    def play(self, x: Tensor, reference: Tensor | None) -> Trace:
        """Replay the pass for another bag; the next call overwrites its results."""
        for recorded, value in zip(self._inputs, (x, reference), strict=True):
            if recorded is not None and value is not None:
                recorded.copy_(value)
        self._forward.replay()
        return _ReplayedTrace(self._trace, self._replay_backward)

    def _replay_backward(self, seed: Tensor) -> list[Tensor | None]:
        self._seed.copy_(seed)
        self._backward.replay()
        return self._gradients


class _ReplayedTrace(Trace):
    """The trace of a recording."""

    def __init__(self, recorded: Trace, replay: Callable[[Tensor], list[Tensor | None]]) -> None:
        self.__dict__.update(vars(recorded))
        self._replay = replay

    @cached_property
    def logits(self) -> Tensor:
        """The model's own outputs (b, c) on the CPU, which is faster for so few numbers."""
        return self._logits.detach().cpu()

    def backward(self, seed: Tensor, *, keep: bool) -> list[Tensor | None]:  # noqa: ARG002  # always kept
        """Replay the backward pass; any number of times."""
        return self._replay(seed)


States = OrderedDict[Hashable, Recording | str]


# `by_module` holds the state of each key of a module in this thread, the most recently used last
_recordings = local()


def traced(run: Run, x: Tensor, reference: Tensor | None, *, module: nn.Module, rules: Any) -> Trace:
    """Call `run(x, reference)`, or replay it if small bags of this shape ran before."""
    is_small = False  # small bags are worth a recording, which holds about eight times their memory
    if x.device.type == "cuda":
        total = torch.cuda.get_device_properties(x.device).total_memory
        is_small = x.numel() * x.element_size() <= min(SMALL_BYTES, total // MEMORY_FRACTION)
    module_key = _module_key(module) if is_small else None
    if module_key is None:
        return run(x, reference)
    by_module = vars(_recordings).setdefault("by_module", WeakKeyDictionary())
    states: States = by_module.setdefault(module, OrderedDict())
    flags = (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cuda"),
    )
    reference_shape = None if reference is None else reference.shape
    key = ((x.shape, x.dtype, x.device, reference_shape), module_key, flags, repr(rules))
    state = states.get(key)
    if state == RAN_ONCE:
        try:
            state = Recording(run, x, reference)
        except RuntimeError:  # an operation in it waits for the device
            state = NOT_RECORDABLE
    states[key] = state or RAN_ONCE
    states.move_to_end(key)
    recorded = [key for key, state in states.items() if isinstance(state, Recording)]
    for oldest in recorded[:-MOST_RECORDINGS]:
        del states[oldest]
    while len(states) > MOST_SHAPES:
        states.popitem(last=False)
    return state.play(x, reference) if isinstance(state, Recording) else run(x, reference)


def _module_key(module: nn.Module) -> Hashable | None:
    """Types, settings and weight addresses of all submodules; None if hooks must run in every pass."""
    facts: list[Any] = []
    for part in module.modules():
        if part._forward_hooks or part._forward_pre_hooks:
            return None
        facts.append(type(part))
        facts += ((name, value) for name, value in vars(part).items() if isinstance(value, _PLAIN))
        for tensors in (part._parameters, part._buffers):
            facts += ((t.data_ptr(), t.shape, t.dtype) for t in tensors.values() if t is not None)
    return tuple(facts)
