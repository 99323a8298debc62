"""Checkpoint families of the field: from their keys to our models.

A family says which keys it cannot do without, and turns a state dict into a model's name, parameters and
state. Shapes say most; settings files fill in what shapes cannot say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from xmil.core.registry import Registry

State = Mapping[str, Tensor]
PREFIXES = (
    "model.",
    "module.",
    "net.",
    "model.model.",
    "vision_transformer.",
)  # where wrappers keep the model


@dataclass(frozen=True)
class Converted:
    """A model to build and the state to put into it.

    `says` are fields of a `ModelSpec` that the checkpoint or its code settles, such as the task.
    """

    model: str
    in_dim: int
    n_classes: int
    params: dict[str, Any]
    state: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)
    says: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A way of naming weights: the keys it needs (regular expressions), and the conversion."""

    name: str
    needs: tuple[str, ...]
    convert: Callable[[State, Mapping[str, Any]], Converted]

    def missing(self, state: State) -> list[str]:
        """The needed patterns that no key matches."""
        return [need for need in self.needs if not any(re.fullmatch(need, key) for key in state)]


FAMILIES: Registry[Family] = Registry("checkpoint family", group="xmil.checkpoints")


def family(
    name: str, *needs: str
) -> Callable[
    [Callable[[State, Mapping[str, Any]], Converted]], Callable[[State, Mapping[str, Any]], Converted]
]:
    """Decorator that registers a conversion under a family's name."""

    def add(
        convert: Callable[[State, Mapping[str, Any]], Converted],
    ) -> Callable[[State, Mapping[str, Any]], Converted]:
        FAMILIES.add(name, Family(name, needs, convert))
        return convert

    return add


def strip_prefixes(state: State) -> dict[str, Tensor]:
    """Keys without what wrappers put in front: `model.` (Lightning, MIL-Lab), `module.` (DataParallel)."""
    keys = dict(state)
    for prefix in ("module.", "model.", "module."):
        if keys and all(key.startswith(prefix) for key in keys):
            keys = {key.removeprefix(prefix): value for key, value in keys.items()}
    return keys


def under_prefix(state: State, prefix: str) -> tuple[dict[str, Tensor], list[str]]:
    """The keys under a prefix, without it and further wrappers' prefixes, and the keys that are elsewhere."""
    inner = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    return strip_prefixes(inner), [key for key in state if not key.startswith(prefix)]


def rename(state: State, *rules: tuple[str, str]) -> dict[str, Tensor]:
    """Keys rewritten by the first rule (regular expression, replacement) that matches their whole prefix."""
    renamed = {}
    for key, value in state.items():
        for pattern, replacement in rules:
            new, hits = re.subn(f"^{pattern}", replacement, key)
            if hits:
                key = new
                break
        renamed[key] = value
    return renamed


def drop(state: State, *patterns: str) -> tuple[dict[str, Tensor], list[str]]:
    """The state without the keys that match a pattern, and the keys left out."""
    gone = [key for key in state if any(re.match(pattern, key) for pattern in patterns)]
    return {key: value for key, value in state.items() if key not in gone}, gone


def count(state: State, pattern: str) -> int:
    """How many different numbers stand in the first group of a key pattern."""
    return len({match[1] for key in state if (match := re.match(pattern, key))})


def ordered(state: State, pattern: str) -> list[str]:
    """The numbers in the first group of a key pattern, ascending, as they stand in the keys."""
    found = {match[1] for key in state if (match := re.match(pattern, key))}
    return sorted(found, key=int)


def shape(state: State, key: str) -> tuple[int, ...]:
    """Shape of a tensor of the state."""
    return tuple(state[key].shape)
