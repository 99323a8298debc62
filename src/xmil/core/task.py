"""The target of an explanation (`Target`) and the meaning of a model's outputs (`Task`).

Outputs are classes, values, hazards or a log risk; a task knows their names, numbers, tables and wording.

A task is one object here; its explained outputs are registered in `xmil.methods`, its loss in
`xmil.training.fit`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError, UnsupportedError, bad_parameter, unknown_name
from xmil.core.registry import Registry
from xmil.core.text import small_number

Floats = npt.NDArray[np.float64]
Columns = dict[str, list[Any]]
Truth = Literal["class", "labels", "values", "time"]
RISK = "risk"
LABEL_COLUMNS: dict[str, tuple[str, ...]] = {  # settings that name the columns of labels
    "class": ("label",),
    "labels": ("labels",),
    "values": ("value",),
    "time": ("time", "event"),
}


class Outputs(Protocol):
    """The fields of a model's spec that describe its outputs."""

    @property
    def name(self) -> str: ...
    @property
    def n_classes(self) -> int: ...
    @property
    def class_names(self) -> Sequence[str] | None: ...
    @property
    def time_bins(self) -> Sequence[float] | None: ...
    @property
    def reference(self) -> float | Sequence[float] | None: ...
    @property
    def relative(self) -> bool: ...


@dataclass(frozen=True)
class Task:
    """The meaning of outputs (..., c); subclasses override the differences.

    `truth` is the kind of labels, which decides how predictions are measured: "class" (an index), "labels"
    (0 or 1 for each), "values" (numbers) or "time" (a time, and whether the event was observed). `noun` names
    the number of a task without classes. An ensemble averages `mean_of`: the "outputs" or the "numbers" of
    its models.

    >>> TASKS["classification"].answer([[0.0, 0.0]]), TASKS["survival"].answer([[0.0, 0.0]])  # S = 1/2, 1/4
    (array([0.5, 0.5]), array([-0.75]))
    >>> TASKS["survival"].target_names(3, time_bins=(12, 24)), TASKS["cox"].target_names(1)
    (('0-12', '12-24', '24+', 'risk'), ('risk',))
    """

    name: str
    truth: Truth
    noun: str = "value"
    mean_of: Literal["outputs", "numbers"] = "outputs"
    link: Literal["softmax", "sigmoid"] | None = None  # from outputs to probabilities or hazards
    takes_reference: bool = False
    takes_bins: bool = False
    only_output: str | None = None  # the meaning of the output, if there is exactly one
    compares: bool = False  # outputs only mean something in comparison with other bags

    @property
    def decides(self) -> bool:
        """Whether there are classes to decide between; a value or a risk is neither right nor wrong."""
        return self.truth in ("class", "labels")

    def count_targets(self, n_outputs: int) -> int:
        """Count the possible targets."""
        return n_outputs

    def target_names(
        self,
        n_outputs: int,
        class_names: Sequence[str] | None = None,
        time_bins: Sequence[float] | None = None,  # noqa: ARG002  # for those that have them
    ) -> tuple[str, ...] | None:
        """Names of the targets, if they are known."""
        names = None if class_names is None else tuple(class_names)
        return names if self.decides or n_outputs > 1 else names or (self.noun,)

    def names(
        self,
        n_outputs: int,
        class_names: Sequence[str] | None = None,
        time_bins: Sequence[float] | None = None,
    ) -> list[str]:
        """Names of the classes, values or time bins in a table, or their numbers."""
        n = self.count_targets(n_outputs) if self.decides else n_outputs
        names = self.target_names(n_outputs, class_names, time_bins) or ()
        fits = len(names) == self.count_targets(n_outputs)
        return [str(name) for name in names[:n]] if fits else [str(i) for i in range(n)]

    def numbers(self, outputs: npt.ArrayLike) -> Floats:
        """Convert outputs (..., c) to numbers (..., k): a probability per class, the values, or the risk."""
        return np.asarray(outputs, dtype=np.float64)

    def number_names(self, names: Sequence[str]) -> list[str]:
        """Name each of the numbers for a table."""
        return [self.noun] if self.truth == "time" else list(names)

    def answer(self, outputs: npt.ArrayLike) -> Floats:
        """Compute the numbers (..., k) of an ensemble from the outputs (..., m, c) of its m models."""
        if self.mean_of == "numbers":
            return np.asarray(self.numbers(outputs).mean(axis=-2))
        return self.numbers(np.asarray(outputs, dtype=np.float64).mean(axis=-2))

    def log_odds(self, outputs: npt.ArrayLike) -> Floats:  # noqa: ARG002  # nothing to rank
        """Log odds (..., k) of classes, which rank like the probabilities without their rounding."""
        raise UnsupportedError(f"A {self.name} model has no classes, so there are no odds between them.")

    def predicted(self, outputs: npt.ArrayLike) -> int:
        """Find the target that outputs (c,) predict: the likeliest class, or the only value or risk."""
        return int(self.log_odds(outputs).argmax()) if self.decides else 0

    def decisions(self, outputs: npt.ArrayLike, target: int) -> npt.NDArray[np.int64]:
        """Convert outputs (b, c) to decisions: the class, whether label `target` is predicted, or 0."""
        if not self.decides:
            return np.zeros(len(np.asarray(outputs)), dtype=np.int64)
        odds = self.log_odds(outputs)
        decided = odds.argmax(axis=-1) if self.truth == "class" else odds[:, target] > 0
        return np.asarray(decided, dtype=np.int64)

    def spread(self, outputs: npt.ArrayLike) -> Floats:
        """The standard deviation (n,) of the main number over the models of outputs (n, m, c)."""
        each = self.numbers(outputs)  # (n, m, k)
        if self.truth == "class":
            chosen = self.answer(outputs).argmax(axis=-1)
            each = np.take_along_axis(each, chosen[:, None, None], axis=2)
        return np.asarray(each.std(axis=1, ddof=1).mean(axis=-1))

    def describe(self, outputs: npt.ArrayLike, names: Sequence[str]) -> Columns:
        """Make the columns of predictions from outputs (n, m, c): class and probabilities, or numbers."""
        answers = self.answer(outputs)
        if not self.decides:
            return _one_or_more(self.noun, self.number_names(names), answers)
        words = ["+".join(str(names[c]) for c in self._chosen(row)) for row in answers]
        return {"predicted": words, **_numbered("p", names, answers)}

    def describe_outputs(self, outputs: npt.ArrayLike, names: Sequence[str]) -> Columns:
        """Make the columns of the outputs of a model with classes."""
        mean = np.asarray(outputs, dtype=np.float64).mean(axis=1)
        short = mean.shape[1] == len(names) - 1  # the first class has no output of its own
        return _numbered("logit", names[1:] if short else names, mean) if self.decides else {}

    def describe_truth(self, labels: Sequence[Any], names: Sequence[str]) -> Columns:
        """Make the columns of labels, None where they are unknown."""
        if self.truth == "time":
            pairs = [label if isinstance(label, tuple) else (None, None) for label in labels]
            event = [None if e is None else bool(e) for _, e in pairs]
            return {"time": [None if t is None else float(t) for t, _ in pairs], "event": event}
        if self.truth == "values":
            rows = np.array([as_row(label, len(names)) for label in labels]).reshape(len(labels), len(names))
            return _one_or_more("label", names, rows)
        return {"label": [self.label_text(label, names) for label in labels]}

    def correct(self, outputs: npt.ArrayLike, labels: Sequence[Any]) -> list[bool | None]:
        """Whether predictions from outputs (n, m, c) are correct; None without classes or a label."""
        if not self.decides:
            return [None] * len(labels)
        predicted = [self._chosen(row) for row in self.answer(outputs)]
        return [
            None if label is None else list(self._label_classes(label)) == classes
            for label, classes in zip(labels, predicted, strict=True)
        ]

    def label_text(self, label: Any, names: Sequence[str]) -> Any:
        """Write a label in one cell: names, a number, or a time with `+` if it is censored."""
        if label is None:
            return None
        if self.decides:
            return "+".join(str(names[c]) for c in self._label_classes(label))
        if not isinstance(label, tuple):
            return label
        if self.truth == "time":
            return f"{label[0]:g}" + ("" if label[1] else "+")
        return ";".join(f"{value:g}" for value in label)

    def _label_classes(self, label: Any) -> list[int]:
        return [c for c, on in enumerate(label) if on] if isinstance(label, tuple) else [int(label)]

    def _chosen(self, chances: Floats) -> list[int]:
        if self.truth == "labels":
            return [c for c, p in enumerate(chances) if p > 0.5]
        return [int(chances.argmax())]

    def subject(self, target: str) -> str:
        """Name what is explained: the class, the value or the risk."""
        return target if self.decides else f"the {self.noun}"

    def ends(self, target: str) -> tuple[str, str]:
        """Describe the lowest and the highest score of a signed explanation."""
        low, high = ("speaks against", "supports") if self.decides else ("lowers", "raises")
        return f"{low} {self.subject(target)}", f"{high} {self.subject(target)}"

    def short_ends(self, target: str) -> tuple[str, str]:
        """Describe both ends where there is little space."""
        low, high = ("against", "for") if self.decides else ("lowers", "raises")
        return f"{low} {target}", f"{high} {target}"

    @property
    def sides(self) -> tuple[str, str]:
        """Labels of the buttons that only show scores of one sign."""
        return ("Against only", "For only") if self.decides else ("Lowering", "Raising")

    def check(self, spec: Outputs) -> None:
        """Refuse a spec whose outputs, names, reference or time bins do not fit the task."""
        owner, n, names = f"a {self.name} {spec.name}", spec.n_classes, spec.class_names
        if self.only_output is not None and n != 1:
            must = f"1: {self.only_output} (head= of load_model keeps one output)"
            raise bad_parameter("n_classes", owner, must, n)
        allowed = {n, self.count_targets(n)} if self.decides else {n}
        if names is not None and (len(names) not in allowed or len(set(names)) < len(names)):
            raise bad_parameter("class_names", spec.name, f"{n} names, all different", list(names))
        if names is not None and self.takes_bins and RISK in names:
            must = "names of time bins, none of them 'risk'"
            raise bad_parameter("class_names", spec.name, must, list(names))
        if spec.relative and not self.takes_reference:
            raise bad_parameter("relative", owner, "left out", spec.relative)
        if spec.reference is not None and not self.takes_reference:
            raise bad_parameter("reference", owner, "left out", spec.reference)
        values = references(spec.reference, 1)  # not n times: n may come from a damaged file
        is_listed = isinstance(spec.reference, Sequence)
        if (is_listed and len(values) != n) or not all(map(math.isfinite, values)):
            must = "a finite number" + (f", or {n} of them" if n > 1 else "")
            raise bad_parameter("reference", spec.name, must, spec.reference)
        bins = spec.time_bins
        if bins is None:
            return
        if not self.takes_bins:
            raise bad_parameter("time_bins", owner, "left out", bins)
        rising = all(a < b for a, b in pairwise((0.0, *bins)))
        if len(bins) != n - 1 or not rising or not all(map(math.isfinite, bins)):
            must = f"{n - 1} rising times above 0, between the {n} bins"
            raise bad_parameter("time_bins", spec.name, must, list(bins))


@dataclass(frozen=True)
class Classification(Task):
    """One class per bag: the softmax of the outputs; a single output z stands for two classes, (0, z)."""

    def count_targets(self, n_outputs: int) -> int:
        """Count the classes: two for a single output."""
        return 2 if n_outputs == 1 else n_outputs

    def numbers(self, outputs: npt.ArrayLike) -> Floats:
        z = _two_columns(outputs)
        weights = np.exp(z - z.max(axis=-1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=-1, keepdims=True))

    def log_odds(self, outputs: npt.ArrayLike) -> Floats:
        """log p / (1 - p): each output against all others."""
        z = _two_columns(outputs)
        others = [np.logaddexp.reduce(np.delete(z, c, axis=-1), axis=-1) for c in range(z.shape[-1])]
        return np.asarray(z - np.stack(others, axis=-1))


@dataclass(frozen=True)
class Multilabel(Task):
    """Several labels per bag: a sigmoid for each output."""

    def numbers(self, outputs: npt.ArrayLike) -> Floats:
        return sigmoid(outputs)

    def log_odds(self, outputs: npt.ArrayLike) -> Floats:
        """The outputs themselves."""
        return np.asarray(outputs, dtype=np.float64)


@dataclass(frozen=True)
class Survival(Task):
    """Outputs are logits of the hazards of time bins; the risk is minus the sum of the survival function."""

    def count_targets(self, n_outputs: int) -> int:
        """Count the bins, and the risk after them."""
        return n_outputs + 1

    def target_names(
        self,
        n_outputs: int,
        class_names: Sequence[str] | None = None,
        time_bins: Sequence[float] | None = None,
    ) -> tuple[str, ...]:
        """Name the bins by their times, then the risk."""
        if class_names:
            return (*class_names, RISK)
        if time_bins is None or len(time_bins) != n_outputs - 1:
            return (*(f"bin{i}" for i in range(n_outputs)), RISK)
        edges = [f"{edge:g}" for edge in (0.0, *time_bins)]
        return (*(f"{a}-{b}" for a, b in pairwise(edges)), f"{edges[-1]}+", RISK)

    def alive(self, outputs: npt.ArrayLike) -> Floats:
        """S(t) (..., c), the chance to survive the bins 0..t: the cumulative product of 1 - hazard."""
        return np.asarray(np.cumprod(sigmoid(-np.asarray(outputs, dtype=np.float64)), axis=-1))

    def numbers(self, outputs: npt.ArrayLike) -> Floats:
        """The risk (..., 1), from -c (nobody dies) to 0 (all die in the first bin)."""
        return np.asarray(-self.alive(outputs).sum(axis=-1, keepdims=True))

    def predicted(self, outputs: npt.ArrayLike) -> int:
        """The risk, which is the target after the bins."""
        return int(np.asarray(outputs).shape[-1])

    def describe_outputs(self, outputs: npt.ArrayLike, names: Sequence[str]) -> Columns:
        """Make the columns of the survival function, for an ensemble the mean, and of the mean outputs."""
        z = np.asarray(outputs, dtype=np.float64)
        alive = self.alive(z).mean(axis=1)
        return {**_numbered("S", names, alive), **_numbered("logit", names, z.mean(axis=1))}


TASKS: Registry[Task] = Registry("task", group="xmil.output_tasks")
for _task in (
    Classification("classification", "class", link="softmax"),
    Multilabel("multilabel", "labels", link="sigmoid"),
    Task("regression", "values", takes_reference=True),
    Survival("survival", "time", noun=RISK, mean_of="numbers", link="sigmoid", takes_bins=True),
    Task("cox", "time", noun=RISK, only_output="the log risk", compares=True),
):
    TASKS.add(_task.name, _task)


def references(reference: float | Sequence[float] | None, n_outputs: int) -> list[float]:
    """List the reference value of each output of a regression, by default zero."""
    if isinstance(reference, Sequence):
        return [float(value) for value in reference]
    return [float(reference or 0.0)] * n_outputs


def with_reference(outputs: Floats, spec: Mapping[str, Any]) -> Floats:
    """Convert outputs (..., c) to values, if a regression's outputs are deviations from its reference.

    >>> with_reference(np.array([0.5]), {"relative": True, "reference": 2.0})
    array([2.5])
    """
    if not spec.get("relative"):
        return outputs
    return np.asarray(outputs + np.asarray(references(spec.get("reference"), outputs.shape[-1])))


def sigmoid(z: npt.ArrayLike) -> Floats:
    """1 / (1 + exp(-z)) without overflow."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -np.asarray(z, dtype=np.float64))))


def as_row(label: Any, width: int) -> list[float]:
    """Convert a label to `width` numbers, nan where there is none."""
    parts = label if isinstance(label, tuple) else (label,)
    if len(parts) != width:
        return [math.nan] * width
    return [math.nan if part is None else float(part) for part in parts]


def _two_columns(outputs: npt.ArrayLike) -> Floats:
    z = np.asarray(outputs, dtype=np.float64)
    return np.concatenate([np.zeros_like(z), z], axis=-1) if z.shape[-1] == 1 else z


def _numbered(kind: str, names: Iterable[str], values: Floats) -> Columns:
    return {f"{kind}:{name}": values[:, c].tolist() for c, name in enumerate(names)}


def _one_or_more(kind: str, names: Sequence[str], values: Floats) -> Columns:
    """Make one column named by the kind, or one for each name; None where there is no number."""
    cells = [[None if math.isnan(v) else v for v in column] for column in values.T.tolist()]
    if len(cells) == 1:
        return {kind: cells[0]}
    return {f"{kind}:{name}": column for name, column in zip(names, cells, strict=True)}


@dataclass(frozen=True, eq=False)
class Target:
    """The explained class, optionally against another one; a bare target equals its class.

    `cls=None` is the class that the model predicts; models with a single value (regression, risk) only have
    class 0. `name` and `against_name` are filled in if the model knows its class names.

    >>> Target(1) == 1, str(Target(1, against=0)), str(Target(1, name="HPV+"))
    (True, '1-vs-0', 'HPV+')
    """

    cls: int | str | None = None
    against: int | str | None = None
    name: str | None = None
    against_name: str | None = None

    def __str__(self) -> str:
        first = "predicted" if self.cls is None else self.name or str(self.cls)
        second = None if self.against is None else self.against_name or str(self.against)
        return first if second is None else f"{first}-vs-{second}"

    def __index__(self) -> int:
        if not isinstance(self.cls, int):
            raise InputError(f"The target {self} has no class index yet; explain resolves it.")
        return self.cls

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Target):
            return (self.cls, self.against) == (other.cls, other.against)
        return self.against is None and self.cls == other

    def __hash__(self) -> int:
        return hash(self.cls) if self.against is None else hash((self.cls, self.against))

    @classmethod
    def of(cls, value: Any) -> Target:
        """Make a target from a class index, a class name, a Target, or None."""
        if isinstance(value, Target):
            return value
        if value is None or isinstance(value, str):
            return cls(value)
        return cls(_as_index(value))

    def resolve(self, *, n_classes: int, predicted: int, class_names: Sequence[str] | None = None) -> Target:
        """Fill in the target's class indices, and names if the model knows them."""
        if class_names is not None and len(class_names) != n_classes:
            class_names = None
        first = predicted if self.cls is None else _find(self.cls, n_classes, class_names)
        second = None if self.against is None else _find(self.against, n_classes, class_names)
        if first == second:
            raise InputError(f"The target contrasts class {first} with itself; name two classes.")
        if not class_names:
            return Target(first, second)
        return Target(first, second, class_names[first], None if second is None else class_names[second])


def _as_index(value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InputError(
            f"A target must be a class index, a class name, a Target or None. Got {value!r} instead."
        ) from None


def _find(value: Any, n_classes: int, class_names: Sequence[str] | None) -> int:
    if isinstance(value, str):
        if class_names is not None and value in class_names:
            return list(class_names).index(value)
        if small_number(value) is None:
            raise unknown_name("class", value[:80], class_names or [str(i) for i in range(n_classes)])
        value = small_number(value)
    index = _as_index(value)
    if not 0 <= index < n_classes:
        names = class_names or ()
        known = ", ".join(f"{i} ({name})" for i, name in enumerate(names)) or f"0 to {n_classes - 1}"
        raise InputError(f"The target class must be one of {known}. Got {index} instead.")
    return index
