"""Modules that return probabilities, or draw random numbers: seen by how they compute, put right."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from xmil.core.errors import InputError
from xmil.core.task import TASKS

RETURNS = ("logit", "probability")
LOGITS = 1 << 16  # no model has more outputs
_SQUASH = ("softmax", "sigmoid", "sigmoid_", "special_expit", "expit")
_SAME = (
    "squeeze", "unsqueeze", "view", "reshape", "flatten", "__getitem__", "float", "double", "to", "clone",
    "contiguous", "type_as",
)  # fmt: skip
_SIGNED = ("tanh", "erf", "special_erf")  # with one added, probabilities times two
_OF_CHANCES = (
    "clamp", "clip", "clamp_min", "clamp_max", "cat", "concat", "stack", "where", "lerp",
    "mean", "sum", "prod", "amax", "amin", "max", "min", "maximum", "minimum", "topk", "sort", "kthvalue",
    "median", "quantile", "gather", "index_select", "take_along_dim", "masked_select", "split", "chunk",
    "unbind", "transpose", "permute", "movedim", "rsub", "__rsub__", "sub", "__sub__", "add", "__add__",
    "__radd__", "mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__", "pow", "__pow__", "sqrt",
    "square", "dot", "matmul", "__matmul__", "bmm", "mm", "mv", "einsum",
)  # fmt: skip  # of probabilities alone these give probabilities, where the result is within [0, 1]


class ChanceWatch(TorchFunctionMode):
    """Notes the tensors that are probabilities by how they were made, with the logits they came from."""

    def __init__(self) -> None:
        super().__init__()
        self._made: Any = WeakIdKeyDictionary()
        self._signed: Any = WeakIdKeyDictionary()

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        out = func(*args, **options)
        name = getattr(func, "__name__", "")
        first = args[0] if args else options.get("input")
        parts = out if isinstance(out, list | tuple) else (out,)
        for part in parts:
            if isinstance(part, Tensor):
                self._note(part, name, first, (func, args[1:], options))
        return out

    def _note(self, out: Tensor, name: str, first: Any, operation: tuple[Any, Any, Any]) -> None:
        if name in _SQUASH and isinstance(first, Tensor):
            small = first.numel() <= LOGITS and not name.endswith("_")
            self._made[out] = first if small else None  # large ones are attention: not to be kept alive
        elif name in _SAME and isinstance(first, Tensor) and first in self._made:
            function, others, options = operation
            source = self._made[first]
            self._made[out] = None if source is None else function(source, *others, **options)
        elif name in ("clamp", "clip") and isinstance(first, Tensor) and first in self._made:
            self._made[out] = self._made[first] if _to_unit(*operation[1:]) else None
        elif name in _SIGNED:
            self._signed[out] = None
        elif self._is_chance(name, first, operation):
            self._made[out] = None

    def _is_chance(self, name: str, first: Any, operation: tuple[Any, Any, Any]) -> bool:
        """Whether an operation makes probabilities, if not by a sigmoid or softmax."""
        _, others, options = operation
        if name == "hardsigmoid" or (name in ("clamp", "clip") and _to_unit(others, options)):
            return True
        if name in ("add", "__add__", "__radd__") and isinstance(first, Tensor) and first in self._signed:
            return [*others] == [1]
        return name in _OF_CHANCES and self._all_chances(first, others)

    def _all_chances(self, first: Any, others: Sequence[Any]) -> bool:
        parts = list(first) if isinstance(first, list | tuple) else [first]
        tensors = [t for t in (*parts, *others) if isinstance(t, Tensor)]
        return bool(tensors) and all(t in self._made for t in tensors)

    def made(self, out: Tensor) -> bool:
        """Whether a tensor is made of softmaxes or sigmoids alone."""
        return out in self._made

    def source(self, out: Tensor) -> Tensor | None:
        """The logits whose softmax or sigmoid a tensor is, where that is the last thing done."""
        found: Tensor | None = self._made.get(out)
        return found


def _to_unit(others: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether the bounds of a clamp are 0 and 1, about."""
    bounds = [*others, *(options[name] for name in ("min", "max") if name in options)]
    if len(bounds) != 2 or not all(isinstance(bound, int | float) for bound in bounds):
        return False
    return bool(0 <= bounds[0] < 0.01 and 0.99 < bounds[1] <= 1)


def looks_like_chances(p: Tensor, *, made: bool) -> bool:
    """Whether outputs (1, c) are probabilities: within [0, 1], and made so or adding up to one."""
    if not bool(((p >= 0) & (p <= 1)).all()):
        return False
    return made or (p.shape[1] > 1 and abs(float(p.double().sum()) - 1) < 1e-4)


def check_chances(p: Tensor, task: str, name: str) -> None:
    """Refuse outputs that cannot be probabilities of the task."""
    if not bool(((p >= -1e-6) & (p <= 1 + 1e-6)).all()):
        raise InputError(
            f"{name} gave {float(p.min()):.3g} to {float(p.max()):.3g}, no probabilities; leave out returns=."
        )
    total = float(p.double().sum())
    if TASKS[task].link == "softmax" and p.shape[1] > 1 and abs(total - 1) > 1e-3:
        raise InputError(
            f"The probabilities of {name} add up to {total:.4g}, not to 1: for a sigmoid per class set the "
            "module's attribute task = 'multilabel'."
        )


def as_log_odds(p: Tensor, task: str) -> Tensor:
    """Logits (1, c) whose softmax, or sigmoid for one output or a sigmoid per class, are p.

    >>> as_log_odds(torch.tensor([[0.2, 0.8]]), "classification").softmax(dim=-1)
    tensor([[0.2000, 0.8000]])
    """
    tiny = torch.finfo(p.dtype).eps
    if p.shape[1] == 1 or TASKS[task].link == "sigmoid":
        inner = p.clamp(tiny, 1 - tiny)
        return inner.log() - (1 - inner).log()
    return p.clamp_min(tiny).log()


def chances_of(logits: Tensor, task: str) -> Tensor:
    """The probabilities of logits (1, c)."""
    return (
        logits.sigmoid() if logits.shape[1] == 1 or TASKS[task].link == "sigmoid" else logits.softmax(dim=-1)
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The generators of torch, NumPy and Python started from a seed, and put back afterwards."""
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002  # users' modules draw from it
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)  # noqa: NPY002
