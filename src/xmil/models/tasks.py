"""What a model's outputs mean: classes, values, hazards or a log risk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from xmil.core.errors import bad_parameter

if TYPE_CHECKING:
    from xmil.models.base import ModelSpec

CLASS_TASKS = ("classification", "multilabel")  # those that decide for a class
TASKS = (*CLASS_TASKS, "regression", "survival", "cox")
RISK = "risk"


def target_names(
    task: str,
    n_outputs: int,
    class_names: Sequence[str] | None = None,
    time_bins: Sequence[float] | None = None,
) -> tuple[str, ...] | None:
    """Names of what can be explained, where they are known; a survival model has its risk after its bins.

    >>> target_names("survival", 3, time_bins=(12, 24)), target_names("cox", 1)
    (('0-12', '12-24', '24+', 'risk'), ('risk',))
    """
    names = None if class_names is None else tuple(class_names)
    if task in CLASS_TASKS or (task == "regression" and n_outputs > 1):
        return names
    if task == "survival":
        return (*(names or _bin_names(n_outputs, time_bins)), RISK)
    return names or (("value",) if task == "regression" else (RISK,))


def count_targets(task: str, n_outputs: int) -> int:
    """How many targets can be asked for: a single class logit stands for two classes."""
    if task == "survival":
        return n_outputs + 1
    return 2 if n_outputs == 1 and task == "classification" else n_outputs


def references(reference: float | Sequence[float] | None, n_outputs: int) -> list[float]:
    """The reference value of each output of a regression; zero where there is none."""
    if isinstance(reference, Sequence):
        return [float(value) for value in reference]
    return [float(reference or 0.0)] * n_outputs


def check_task(spec: ModelSpec) -> None:
    """Refuse a spec whose task does not fit its outputs, names, reference or time bins."""
    if spec.task not in TASKS:
        raise bad_parameter("task", spec.name, f"one of {list(TASKS)}", spec.task)
    if spec.task == "cox" and spec.n_classes != 1:
        raise bad_parameter(
            "n_classes",
            f"a cox {spec.name}",
            "1: the log risk (head= of load_model keeps one output)",
            spec.n_classes,
        )
    _check_names(spec)
    _check_reference(spec)
    _check_bins(spec)


def _check_names(spec: ModelSpec) -> None:
    names, n = spec.class_names, spec.n_classes
    allowed = {1, 2} if n == 1 and spec.task == "classification" else {n}
    if names is not None and (len(names) not in allowed or len(set(names)) < len(names)):
        raise bad_parameter("class_names", spec.name, f"{n} names, all different", list(names))
    if names is not None and spec.task == "survival" and RISK in names:
        raise bad_parameter("class_names", spec.name, "names of time bins, none of them 'risk'", list(names))


def _check_reference(spec: ModelSpec) -> None:
    if spec.relative and spec.task != "regression":
        raise bad_parameter("relative", f"a {spec.task} {spec.name}", "left out", spec.relative)
    if spec.reference is None:
        return
    if spec.task != "regression":
        raise bad_parameter("reference", f"a {spec.task} {spec.name}", "left out", spec.reference)
    values = references(spec.reference, spec.n_classes)
    if len(values) != spec.n_classes or not all(map(math.isfinite, values)):
        must = "a finite number" + (f", or {spec.n_classes} of them" if spec.n_classes > 1 else "")
        raise bad_parameter("reference", spec.name, must, spec.reference)


def _check_bins(spec: ModelSpec) -> None:
    bins = spec.time_bins
    if bins is None:
        return
    if spec.task != "survival":
        raise bad_parameter("time_bins", f"a {spec.task} {spec.name}", "left out", bins)
    rising = all(a < b for a, b in pairwise((0.0, *bins)))
    if len(bins) != spec.n_classes - 1 or not rising or not all(map(math.isfinite, bins)):
        must = f"{spec.n_classes - 1} rising times above 0 that part the {spec.n_classes} bins"
        raise bad_parameter("time_bins", spec.name, must, list(bins))


def _bin_names(n: int, time_bins: Sequence[float] | None) -> tuple[str, ...]:
    if time_bins is None or len(time_bins) != n - 1:
        return tuple(f"bin{i}" for i in range(n))
    edges = [f"{edge:g}" for edge in (0.0, *time_bins)]
    return (*(f"{a}-{b}" for a, b in pairwise(edges)), f"{edges[-1]}+")
