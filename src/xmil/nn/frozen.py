"""A module held still: eval mode, no gradients to its parameters, and everything put back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_lock = threading.Lock()
# Every module and parameter that is held: itself, its flag before, and how many hold it. Counted one by one,
# so that two models may share a part.
_held: dict[int, tuple[Any, bool, int]] = {}


@contextmanager
def frozen(module: nn.Module) -> Iterator[nn.Module]:
    """Hold a module in eval mode without trainable parameters; the last holder restores every flag.

    Threads may hold the same module, or modules that share a part, at once.
    """
    parts: list[nn.Module | nn.Parameter] = [*module.modules(), *module.parameters()]
    with _lock:
        for part in parts:
            _take(part)
    try:
        yield module
    finally:
        with _lock:
            for part in parts:
                _release(part)


def _take(part: nn.Module | nn.Parameter) -> None:
    _, before, holders = _held.get(id(part), (part, _flag(part), 0))
    _held[id(part)] = (part, before, holders + 1)
    if before:
        _set_flag(part, False)


def _release(part: nn.Module | nn.Parameter) -> None:
    _, before, holders = _held.pop(id(part))
    if holders > 1:
        _held[id(part)] = (part, before, holders - 1)
    elif before:
        _set_flag(part, True)


def _flag(part: nn.Module | nn.Parameter) -> bool:
    return part.training if isinstance(part, nn.Module) else part.requires_grad


def _set_flag(part: nn.Module | nn.Parameter, value: bool) -> None:
    if isinstance(part, nn.Module):
        part.training = value
    else:
        part.requires_grad_(value)
