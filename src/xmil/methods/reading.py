"""Which part of what a module returned are the logits of the bag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xmil.core.errors import InputError

LOGITS = ("logits", "logit", "bag_logits", "bag_logit", "slide_logits", "wsi_logits")
Path = tuple[Any, ...]


class UnreadableError(InputError):
    """What a module returned is no logits, or not for sure."""


class AmbiguousError(UnreadableError):
    """Several of the things a module returned may be the logits."""


@dataclass(frozen=True)
class Reading:
    """The place of the logits in what a module returns.

    >>> str(Reading((0, "logits"))), Reading((1,))((0, torch.zeros(3))).shape
    ("[0]['logits']", torch.Size([1, 3]))
    """

    path: Path = ()

    def __str__(self) -> str:
        return "".join(f".{key[1:]}" if _is_attribute(key) else f"[{key!r}]" for key in self.path)

    def __call__(self, raw: Any) -> Tensor:
        for key in self.path:
            raw = getattr(raw, key[1:]) if _is_attribute(key) else raw[key]
        logits = as_logits(raw)
        if logits is None:
            raise _no_logits(raw)
        return logits


def as_logits(value: Any) -> Tensor | None:
    """A tensor (c,), (1, ..., 1, c) or () as logits (1, c); None for anything else."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() == 0:
        return None
    if value.ndim == 2 and value.shape[0] == 1:
        return value
    if value.ndim <= 1 or value.shape[:-1].numel() == 1:
        return value.reshape(1, -1)
    return None


def find_logits(raw: Any, n: int, *, name: str) -> Reading:
    """The place of the one tensor that can be the logits of a bag of n instances; several are refused."""
    if isinstance(raw, Tensor):
        if as_logits(raw) is None:
            raise _no_logits(raw, name)
        return Reading()
    leaves = [(path, found) for path, value in _leaves(raw) if (found := as_logits(value)) is not None]
    named = [path for path, _ in leaves if path and str(path[-1]).lstrip(".").lower() in LOGITS]
    if len(named) == 1:
        return Reading(named[0])
    left = _dropped_copies(_dropped_instances(leaves, n))
    if len(left) == 1:
        return Reading(left[0][0])
    if left:
        raise AmbiguousError(_several(raw, left, name))
    raise UnreadableError(_none(raw, name))


def _leaves(raw: Any, path: Path = (), depth: int = 0) -> Iterator[tuple[Path, Any]]:
    """Tensors in tuples, lists, dicts and plain objects, with their places."""
    if isinstance(raw, Tensor):
        yield path, raw
    elif depth < 4:
        for key, value in _items(raw):
            yield from _leaves(value, (*path, key), depth + 1)


def _items(raw: Any) -> list[tuple[Any, Any]]:
    if isinstance(raw, Mapping):
        return list(raw.items())
    if isinstance(raw, tuple) and hasattr(raw, "_fields"):
        return [(f".{field}", getattr(raw, field)) for field in raw._fields]
    if isinstance(raw, list | tuple):
        return list(enumerate(raw))
    fields = vars(raw) if hasattr(raw, "__dict__") and not isinstance(raw, type) else {}
    return [(f".{key}", value) for key, value in fields.items()]


def _is_attribute(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(".")


def _dropped_instances(leaves: list[tuple[Path, Tensor]], n: int) -> list[tuple[Path, Tensor]]:
    """Without those with a number per instance, and without lone numbers beside longer ones."""
    wide = [(path, value) for path, value in leaves if value.shape[1] != n]
    kept = wide or leaves
    longer = [(path, value) for path, value in kept if value.shape[1] > 1]
    named = [(path, value) for path, value in kept if value.shape[1] == 1]
    return longer if longer and all("loss" in str(path[-1]).lower() for path, _ in named) else kept


def _dropped_copies(leaves: list[tuple[Path, Tensor]]) -> list[tuple[Path, Tensor]]:
    """Without the probabilities and decisions that follow from another of them."""
    return [
        (path, value)
        for i, (path, value) in enumerate(leaves)
        if not any(_follows(value, other, later=j < i) for j, (_, other) in enumerate(leaves) if j != i)
    ]


def _follows(value: Tensor, source: Tensor, *, later: bool) -> bool:
    if value.shape != source.shape:
        return False
    if later and torch.equal(value, source):
        return True
    made = [source.softmax(dim=-1), source.sigmoid(), source.log_softmax(dim=-1), (source >= 0.5).to(source)]
    if torch.equal(value, source) or _is_binary(source):
        return False
    return any(torch.allclose(value, other, atol=1e-6) for other in made)


def _is_binary(value: Tensor) -> bool:
    return bool(((value == 0) | (value == 1)).all())


def _no_logits(raw: Any, name: str = "The model") -> UnreadableError:
    if not isinstance(raw, Tensor):
        return UnreadableError(_none(raw, name))
    return UnreadableError(f"{name} must return logits (1, c) or (c,) for one bag. Got {tuple(raw.shape)}.")


def _none(raw: Any, name: str) -> str:
    return (
        f"{name} returned a {type(raw).__name__} without a tensor of logits (1, c) or (c,); pass forward= to "
        "pick them, such as forward=lambda net, x: net(x)['logits']."
    )


def _several(raw: Any, left: list[tuple[Path, Tensor]], name: str) -> str:
    places = ", ".join(f"{Reading(path)} of shape {tuple(value.shape)}" for path, value in left)
    return (
        f"{name} returned a {type(raw).__name__} in which several tensors may be the logits: {places}; pass "
        f"forward= to pick them, such as forward=lambda net, x: net(x){Reading(left[0][0])}."
    )
