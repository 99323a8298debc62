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

from xmil.lrp.tracing import Trace

Run = Callable[[Tensor, Tensor | None], Trace]
SMALL_BYTES = 1 << 27  # bags above this keep a GPU busy as they are
SHARE_OF_MEMORY = 256  # of the GPU's memory a bag may be the 256th part
KEPT = 2  # recordings per model and thread: each holds the memory of a pass
REMEMBERED = 64  # shapes per model and thread that were seen once
SEEN, NEVER = "seen", "never"
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
        for held, given in zip(self._inputs, (x, reference), strict=True):
            if held is not None and given is not None:
                held.copy_(given)
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


Known = OrderedDict[Hashable, Recording | str]


class _Kept(local):
    """What one thread knows of each module's keys, the last used last: seen once, never to be recorded, or a
    recording."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[nn.Module, Known] = WeakKeyDictionary()


_kept = _Kept()


def traced(run: Run, x: Tensor, reference: Tensor | None, *, module: nn.Module, rules: Any) -> Trace:
    """`run(x, reference)`, played back where a small bag of this shape came before."""
    inside = _inside(module) if _is_small(x) else None
    if inside is None:
        return run(x, reference)
    known = _kept.of.setdefault(module, OrderedDict())
    key = (_shapes(x, reference), inside, _flags(), repr(rules))
    state = known.get(key)
    if state == SEEN:
        try:
            state = Recording(run, x, reference)
        except RuntimeError:  # something in it waits for the device
            state = NEVER
    _keep(known, key, state or SEEN)
    return state.play(x, reference) if isinstance(state, Recording) else run(x, reference)


def _keep(known: Known, key: Hashable, state: Recording | str) -> None:
    known[key] = state
    known.move_to_end(key)
    recorded = [one for one, found in known.items() if isinstance(found, Recording)]
    for one in recorded[:-KEPT]:
        del known[one]
    while len(known) > REMEMBERED:
        known.popitem(last=False)


def _is_small(x: Tensor) -> bool:
    """Whether a bag on a GPU is worth a recording, which holds about eight times its memory."""
    if x.device.type != "cuda":
        return False
    total = torch.cuda.get_device_properties(x.device).total_memory
    return x.numel() * x.element_size() <= min(SMALL_BYTES, total // SHARE_OF_MEMORY)


def _shapes(x: Tensor, reference: Tensor | None) -> Hashable:
    return x.shape, x.dtype, x.device, None if reference is None else reference.shape


def _flags() -> Hashable:
    precision, deterministic = (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
    return precision, deterministic, torch.is_autocast_enabled("cuda")


def _inside(module: nn.Module) -> Hashable | None:
    """Types, settings and the places of the weights of all parts; None where hooks expect every pass."""
    found: list[Any] = []
    for part in module.modules():
        if part._forward_hooks or part._forward_pre_hooks:
            return None
        found.append(type(part))
        found += ((name, value) for name, value in vars(part).items() if isinstance(value, _PLAIN))
        for tensors in (part._parameters, part._buffers):
            found += ((t.data_ptr(), t.shape, t.dtype) for t in tensors.values() if t is not None)
    return tuple(found)
