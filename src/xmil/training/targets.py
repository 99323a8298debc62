"""Targets by task: class indices, several labels, a value, or a time with its event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError
from xmil.core.registry import Registry
from xmil.core.task import TASKS
from xmil.data import Cohort
from xmil.training.config import Config

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Targets:
    """One row of numbers for each bag: a class index, 0 or 1 for each label, a value, or (time, event)."""

    task: str
    values: Floats
    class_names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows: Sequence[int]) -> Targets:
        """The targets of some bags."""
        return replace(self, values=self.values[list(rows)])

    @property
    def strata(self) -> list[str]:
        """What folds spread evenly: the class, the labels together, or whether the event was seen."""
        truth = TASKS[self.task].truth
        if truth == "values":
            return [""] * len(self)
        columns = self.values[:, 1:] if truth == "time" else self.values
        return ["/".join(f"{value:g}" for value in row) for row in columns]


@dataclass(frozen=True)
class Goal:
    """What a model of one fold learns: how many outputs, and what the training bags alone decide.

    `truth` are the targets as they are, `values` what the loss takes: time bins for discrete hazards.
    """

    task: str
    outputs: int
    class_names: tuple[str, ...] | None
    truth: Floats
    values: Floats
    reference: float | None = None
    time_bins: tuple[float, ...] | None = None
    columns: tuple[str, ...] = ()

    @property
    def spec(self) -> dict[str, Any]:
        """The part of a model's spec that the targets decide."""
        known = {"task": self.task, "class_names": self.class_names}
        own = {"reference": self.reference, "time_bins": self.time_bins, "columns": self.columns or None}
        return {**known, **{key: value for key, value in own.items() if value is not None}}


def read_targets(cohort: Cohort, config: Config) -> Targets:
    """The targets of a cohort's bags for a task."""
    data, truth = config.data, TASKS[config.task].truth
    if truth == "class":
        return replace(_classes(cohort, data.label, tuple(data.class_names)), task=config.task)
    if truth == "labels":
        columns = [_binary(cohort, name) for name in data.labels]
        names = tuple(data.class_names or data.labels)
        _check_names(names, len(columns))
        return Targets(config.task, np.stack(columns, axis=1), names)
    if truth == "values":
        values = _finite(cohort.numbers(data.value), data.value)
        return Targets(config.task, values[:, None], (data.value,))
    times, events = cohort.survival(data.time, data.event)
    return Targets(config.task, np.stack([_finite(times, data.time), events.astype(float)], axis=1))


def target_columns(config: Config) -> list[str]:
    """The columns that hold the targets of a task."""
    named = [getattr(config.data, setting) for setting in TASKS[config.task].label_columns]
    return named[0] if isinstance(named[0], list) else named


def make_goal(targets: Targets, train: Rows, config: Config, *, run: Rows | None = None) -> Goal:
    """What the training bags of a fold ask of a model; refused where they cannot teach it.

    `run` are the bags that train in any fold: time bins are cut by them unless each fold cuts its own.
    """
    shared = train if run is None or config.loss.bins_from == "fold" else run
    asked = Learnable(targets, targets.values[train], targets.values[shared], config)
    return replace(GOALS[targets.task](asked), columns=tuple(target_columns(config)))


@dataclass(frozen=True)
class Learnable:
    """What a fold can learn from: all targets, those of its training bags, those that cut time bins."""

    targets: Targets
    known: Floats
    shared: Floats
    config: Config

    def goal(self, outputs: int, *, values: Floats | None = None, **more: Any) -> Goal:
        """The goal of a model with so many outputs; `values` where the loss takes others than the truth."""
        targets = self.targets
        taken = targets.values if values is None else values
        return Goal(targets.task, outputs, targets.class_names, targets.values, taken, **more)

    def check_classes(self) -> int:
        """How many classes or labels there are; refused where the training bags lack one."""
        names, truth = self.targets.class_names or (), TASKS[self.targets.task].truth
        for c, name in enumerate(names):
            hits = self.known[:, 0] == c if truth == "class" else self.known[:, c] == 1
            if not hits.any():
                raise InputError(f"The class {name!r} has no bag in the training set; it cannot be learnt.")
            if truth == "labels" and hits.all():
                raise InputError(f"Every training bag has the label {name!r}; it cannot be learnt.")
        return len(names)

    def check_events(self) -> None:
        """Refuse training bags that are all censored."""
        if not self.known[:, 1].any():
            raise InputError(
                "No training bag has an event; survival cannot be learnt from censored bags alone."
            )


GOALS: Registry[Callable[[Learnable], Goal]] = Registry("task to train", group="xmil.task_losses")


@GOALS.register("classification")
@GOALS.register("multilabel")
def _class_goal(asked: Learnable) -> Goal:
    return asked.goal(asked.check_classes())


@GOALS.register("regression")
def _value_goal(asked: Learnable) -> Goal:
    given = asked.config.loss.reference
    return asked.goal(1, reference=float(asked.known.mean()) if given is None else given)


@GOALS.register("cox")
def _risk_goal(asked: Learnable) -> Goal:
    asked.check_events()
    return asked.goal(1)


@GOALS.register("survival")
def _hazard_goal(asked: Learnable) -> Goal:
    asked.check_events()
    edges, values = time_bins(asked.shared, asked.config.loss.bins), asked.targets.values
    place = np.searchsorted(edges, values[:, 0], side="right")
    binned = np.stack([place, values[:, 1]], axis=1).astype(float)
    return asked.goal(len(edges) + 1, values=binned, time_bins=tuple(edges))


def time_bins(known: Floats, bins: int) -> list[float]:
    """Inner edges of time bins: quantiles of the times at which events were seen.

    >>> time_bins(np.array([[1.0, 1], [2, 1], [3, 1], [4, 1], [9, 0]]), 4)
    [1.75, 2.5, 3.25]
    """
    seen = known[known[:, 1] > 0, 0]
    edges = np.unique(np.quantile(seen, np.arange(1, bins) / bins))
    if len(edges) < bins - 1:
        raise InputError(
            f"The training bags have too few different event times for {bins} bins; set loss.bins lower."
        )
    return [float(edge) for edge in edges]


def _classes(cohort: Cohort, column: str, names: tuple[str, ...]) -> Targets:
    """Class indices: by the given names where the labels are among them, else as numbers or by alphabet."""
    found, cells = cohort.classes(column), cohort.column(column)
    if len(set(cells)) < 2:
        raise InputError(f"Column {column!r} holds one class only ({cells[0]!r}); a classifier needs two.")
    if names and set(map(str, cells)) <= set(names):
        index = np.array([names.index(str(cell)) for cell in cells], dtype=float)
        return Targets("classification", index[:, None], names)
    if names:
        if found != [str(i) for i in range(len(found))]:
            unknown = sorted(set(map(str, cells)) - set(names))
            raise InputError(f"data.class_names does not hold the label {unknown[0]!r} of column {column!r}.")
        _check_names(names, len(found))
    else:
        _check_numbers(found, cells, column)
    labels = cohort.labels(column).astype(float)
    return Targets("classification", labels[:, None], names or tuple(found))


def _check_numbers(found: Sequence[str], cells: Sequence[str | None], column: str) -> None:
    """Class numbers begin at 0 and leave none out; other numbers are names, which must be given."""
    used = (
        {int(float(str(cell))) for cell in cells} if found == [str(i) for i in range(len(found))] else set()
    )
    if not used or len(used) == len(found):
        return
    absent = next(i for i in range(len(found)) if i not in used)
    names = ", ".join(f'"{name}"' for name in sorted(set(map(str, cells)), key=float))
    raise InputError(
        f"Column {column!r} holds numbers but no {absent}; class numbers go from 0 up and leave none out. "
        f"Where they are names, set data.class_names = [{names}]."
    )


def _check_names(names: tuple[str, ...], classes: int) -> None:
    if len(names) != classes:
        raise InputError(f"data.class_names has {len(names)} names for {classes} classes; give one for each.")


def _binary(cohort: Cohort, column: str) -> Floats:
    values = cohort.numbers(column)
    if not np.isin(values, (0, 1)).all():
        raise InputError(f"The column {column!r} must hold 0 or 1 for every slide; see data.labels.")
    return values


def _finite(values: Floats, column: str) -> Floats:
    if not np.isfinite(values).all():
        raise InputError(f"The column {column!r} must hold finite numbers.")
    return values
