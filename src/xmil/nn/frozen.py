"""A module held still: eval mode, no gradients to its parameters, and everything put back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn


@dataclass
class _Hold:
    """How many are holding a module, and what it was like before the first."""

    holders: int = 0
    training: dict[nn.Module, bool] = field(default_factory=dict)
    trained: list[nn.Parameter] = field(default_factory=list)


_holds: WeakKeyDictionary[nn.Module, _Hold] = WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def frozen(module: nn.Module) -> Iterator[nn.Module]:
    """Hold a module in eval mode without trainable parameters; the last holder restores every flag.

    Threads may hold the same module at once.
    """
    _take(module)
    try:
        yield module
    finally:
        _release(module)


def _take(module: nn.Module) -> None:
    with _lock:
        hold = _holds.setdefault(module, _Hold())
        hold.holders += 1
        if hold.holders > 1:
            return
        hold.training = {m: m.training for m in module.modules()}
        hold.trained = [p for p in module.parameters() if p.requires_grad]
        module.eval()
        for parameter in hold.trained:
            parameter.requires_grad_(False)


def _release(module: nn.Module) -> None:
    with _lock:
        hold = _holds[module]
        hold.holders -= 1
        if hold.holders:
            return
        del _holds[module]
        for m, training in hold.training.items():
            m.training = training
        for parameter in hold.trained:
            parameter.requires_grad_(True)
