"""Passes over bags of one shape, recorded on a GPU and played back: no Python between the kernels.

A small bag keeps a GPU waiting for the next launch most of the time. The second bag of a shape that a model
is given is recorded as two CUDA graphs, the pass under the rules and the way back; those after it are copied
to where the first one lay and played. Whatever decides the kernels is part of the key: the module with its
settings and the places of its weights (their values may change), shapes, rules and torch's own flags.
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
SMALL_BYTES = 1 << 27  # bags above this keep a GPU busy as they are
SHARE_OF_MEMORY = 256  # of the GPU's memory a bag may be the 256th part
MOST_RECORDINGS = 2  # per model and thread: each has the memory of a pass
MOST_SHAPES = 64  # per model and thread that came once
ONCE, NEVER = "once", "never"
_PLAIN = (int, float, bool, str, type(None))


class Recording:
    """One pass with a reference instance or without, and its way back, as CUDA graphs."""

    def __init__(self, run: Run, x: Tensor, reference: Tensor | None) -> None:
        self._inputs = (x.clone(), None if reference is None else reference.clone())
        beside = torch.cuda.Stream(x.device)
        beside.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(beside):  # libraries set themselves up in the first pass on a stream
            warm = run(*self._inputs)
            warm.pull(torch.zeros_like(warm.logits), keep=False)
        torch.cuda.current_stream(x.device).wait_stream(beside)
        self._forward, self._back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, capture_error_mode="thread_local"):
            self._trace = run(*self._inputs)
        self._seed = torch.zeros_like(self._trace.logits)
        with torch.cuda.graph(self._back, pool=self._forward.pool(), capture_error_mode="thread_local"):
            self._gradients = self._trace.pull(self._seed, keep=True)
        self._trace.forget_module()

    def play(self, x: Tensor, reference: Tensor | None) -> Trace:
        """The pass for another bag; its results are overwritten by the next one."""
        for place, value in zip(self._inputs, (x, reference), strict=True):
            if place is not None and value is not None:
                place.copy_(value)
        self._forward.replay()
        return _Played(self._trace, self._go_back)

    def _go_back(self, seed: Tensor) -> list[Tensor | None]:
        self._seed.copy_(seed)
        self._back.replay()
        return self._gradients


class _Played(Trace):
    """The trace of a recording."""

    def __init__(self, recorded: Trace, back: Callable[[Tensor], list[Tensor | None]]) -> None:
        self.__dict__.update(vars(recorded))
        self._back = back

    @cached_property
    def logits(self) -> Tensor:
        """The model's own outputs (b, c), off the device: what is made of so few is sooner made there."""
        return self._logits.detach().cpu()

    def pull(self, seed: Tensor, *, keep: bool) -> list[Tensor | None]:  # noqa: ARG002  # always kept
        """The way back, played: it can be gone as often as one likes."""
        return self._back(seed)


States = OrderedDict[Hashable, Recording | str]


# `of` are the keys of each module in this thread, the last used last: came once, never recorded, or recorded.
_recordings = local()


def traced(run: Run, x: Tensor, reference: Tensor | None, *, module: nn.Module, rules: Any) -> Trace:
    """`run(x, reference)`, played back if a small bag of this shape came before."""
    small = False  # worth a recording, which holds about eight times the bag's memory
    if x.device.type == "cuda":
        total = torch.cuda.get_device_properties(x.device).total_memory
        small = x.numel() * x.element_size() <= min(SMALL_BYTES, total // SHARE_OF_MEMORY)
    inside = _inside(module) if small else None
    if inside is None:
        return run(x, reference)
    of: WeakKeyDictionary[nn.Module, States] = vars(_recordings).setdefault("of", WeakKeyDictionary())
    states = of.setdefault(module, OrderedDict())
    flags = (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cuda"),
    )
    beside = None if reference is None else reference.shape
    key = ((x.shape, x.dtype, x.device, beside), inside, flags, repr(rules))
    state = states.get(key)
    if state == ONCE:
        try:
            state = Recording(run, x, reference)
        except RuntimeError:  # something in it waits for the device
            state = NEVER
    states[key] = state or ONCE
    states.move_to_end(key)
    recorded = [one for one, other in states.items() if isinstance(other, Recording)]
    for one in recorded[:-MOST_RECORDINGS]:
        del states[one]
    while len(states) > MOST_SHAPES:
        states.popitem(last=False)
    return state.play(x, reference) if isinstance(state, Recording) else run(x, reference)


def _inside(module: nn.Module) -> Hashable | None:
    """Types, settings and the places of the weights of all parts; None if hooks expect every pass."""
    facts: list[Any] = []
    for part in module.modules():
        if part._forward_hooks or part._forward_pre_hooks:
            return None
        facts.append(type(part))
        facts += ((name, value) for name, value in vars(part).items() if isinstance(value, _PLAIN))
        for tensors in (part._parameters, part._buffers):
            facts += ((t.data_ptr(), t.shape, t.dtype) for t in tensors.values() if t is not None)
    return tuple(facts)
