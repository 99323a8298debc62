"""What a mode cannot see, found all the same: transforms, recomputation, operations that pass it by."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from xmil.core.errors import UnsupportedError

_transforms = torch._C._functorch.peek_interpreter_stack
_sequence = torch._C._autograd._get_sequence_nr
_saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_NO_HOOKS = nullcontext()


class Sight:
    """Tells the nodes of autograd's graph that were made in an operation the engine saw from all others.

    Autograd numbers its nodes in the order they are made, thread by thread: what was made between two
    operations of the engine passed it by, as the operations of a `torch.jit` function do.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._after: list[str] = []
        self._name = ""
        self.start()

    def start(self) -> None:
        """All before this does not count."""
        self._last = _sequence()
        self._previous = "the start"

    def __call__(self, name: str) -> Sight:
        self._name = name
        return self

    def __enter__(self) -> None:
        if self._depth == 0:
            self.look()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._last, self._previous = _sequence(), self._name

    def look(self) -> None:
        """Note what was made since the last operation ended."""
        now = _sequence()
        if now != self._last:
            self._starts.append(self._last)
            self._ends.append(now)
            self._after.append(self._previous)

    def missed(self, node: Any) -> str | None:
        """The operation after which a node was made unseen, if it was."""
        number = node._sequence_nr()
        at = bisect_right(self._starts, number) - 1
        return self._after[at] if at >= 0 and number < self._ends[at] else None


def check_transforms(args: Sequence[Any]) -> None:
    """Refuse `torch.func` transforms of tensors that depend on the input: their parts look like constants."""
    if _transforms() is None:
        return
    for value in args:
        while isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
            if value.requires_grad:
                raise UnsupportedError(
                    "LRP cannot see into torch.func transforms such as vmap; call the function on the whole "
                    "batch, or use a method that needs no rules: ig, gxi, grad2, single, one_removed."
                )


def kept_by_autograd() -> AbstractContextManager[Any]:
    """Inside `torch.utils.checkpoint`, keep what it would compute again: that would be without the rules."""
    hooks = _saving_hooks(True)
    if hooks is None or not getattr(hooks[0], "__module__", "").startswith("torch.utils.checkpoint"):
        return _NO_HOOKS
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
