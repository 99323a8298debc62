"""What a module of the user's declares of its outputs by its attributes, checked before it is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xmil.core.errors import InputError, bad_parameter
from xmil.core.names import counted
from xmil.core.task import TASKS, references


def declared_names(value: Any, n_outputs: int, *, task: str, owner: str) -> tuple[str, ...] | None:
    """The `class_names` of a module: a list, tuple or array of different names, one for each output.

    >>> declared_names(["benign", "tumour"], 1, task="classification", owner="Net")  # one logit, two classes
    ('benign', 'tumour')
    """
    if value is None:
        return None
    kind = TASKS[task]
    n = kind.count_targets(n_outputs) if kind.decides else n_outputs
    listed = _listed(value)
    names = tuple(map(str, listed or ()))
    if listed is not None and len(names) != n:
        has = f"{owner[0].upper()}{owner[1:]} has {counted(n_outputs, 'output')}"
        there = f"there {'is' if len(names) == 1 else 'are'} {counted(len(names), 'class name')}"
        raise InputError(f"{has}, but {there}; set class_names to {n} different names, or to None.")
    if listed is None or len(set(names)) < n:
        raise bad_parameter("class_names", owner, f"a list of {n} different names, or None", value)
    return names


def declared_references(value: Any, n_outputs: int, *, task: str, owner: str) -> list[float]:
    """The `reference` of a regression: a finite number, or one for each output; zeros for other tasks."""
    if value is None or not TASKS[task].takes_reference:
        return [0.0] * n_outputs
    listed = _listed(value)
    must = f"a finite number, or a list of {n_outputs}"
    try:
        found = references(value if listed is None else listed, n_outputs)
    except (TypeError, ValueError):
        raise bad_parameter("reference", owner, must, value) from None
    if len(found) != n_outputs or not all(map(math.isfinite, found)):
        raise bad_parameter("reference", owner, must, value)
    return found


def _listed(value: Any) -> list[Any] | None:
    """The entries of a sequence or an array (NumPy, torch, pandas); None for what has no order, or is one."""
    held = value.tolist() if callable(getattr(value, "tolist", None)) else value
    return list(held) if isinstance(held, Sequence) and not isinstance(held, str | bytes) else None
