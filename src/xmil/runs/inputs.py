"""The bags of a run: feature files, joined with a cohort's rows, and what is true of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.core.background import Background
from xmil.core.errors import InputError, unknown_name
from xmil.core.names import counted, listed
from xmil.data import Case, Cohort, feature_files, group_cases, join_features, read_cohort
from xmil.data.siblings import slide_name
from xmil.data.whereabouts import folder_advice
from xmil.models.base import ModelSpec
from xmil.runs.cautions import Missing

if TYPE_CHECKING:
    from xmil.models import MILModel

Say = Callable[[str], None]


@dataclass(frozen=True)
class Inputs:
    """Where bags come from: a folder of feature files, or one of them; a cohort's rows, of some splits."""

    features: Path
    cohort: Path | None = None
    splits: tuple[str, ...] = ()
    by: str = "slide"
    follow_links: bool = True

    def as_dict(self) -> dict[str, str | None]:
        """The places, for run.json."""
        cohort = None if self.cohort is None else str(self.cohort.resolve())
        return {"features": str(self.features.resolve()), "cohort": cohort}

    def check_apart(self, out: Path) -> None:
        """Refuse to write a run among the features."""
        if self.features.is_dir() and out.resolve() == self.features.resolve():
            raise InputError(f"{out}: --out is the folder of --features; choose another, such as {out}-run.")


@dataclass(frozen=True)
class Unsaid:
    """What a model's file does not say: class names, features to try a network out on, a background."""

    class_names: tuple[str, ...] | None = None
    features: Path | None = None
    reading: Mapping[str, Any] = field(default_factory=dict)
    background: Background | None = None

    def as_dict(self) -> dict[str, Any]:
        """What decides results, for a run's settings; nothing where nothing was given."""
        names = {} if self.class_names is None else {"class_names": list(self.class_names)}
        return names if self.background is None else {**names, "background": self.background.digest}


NOTHING = Unsaid()


def reading_of(mpp: float | None, patch_size: int | None, layout: str = "auto") -> dict[str, Any]:
    """What `read_bag` is told where files do not say it."""
    given = {"mpp": mpp, "patch_size": patch_size, "format": None if layout == "auto" else layout}
    return {key: value for key, value in given.items() if value is not None}


def find_cases(
    inputs: Inputs,
    *,
    label: str | None = "label",
    spec: ModelSpec,
    say: Say = lambda _: None,
) -> tuple[list[Case], Missing]:
    """The bags to go over: the rows of a cohort that have features, or every feature file of a folder.

    With them what the cohort names and the features lack. Labels are class indices; a label column of None
    asks for none, "" for the one the model was trained on.
    """
    if inputs.cohort is None:
        return _every_file(inputs, say), Missing()
    joined, gone = parted_cohort(inputs, say)
    if label is None:
        return _grouped(joined, gone, inputs.by, None)
    column = label or (trained_columns(joined, spec) if len(spec.columns or ()) == 1 else "")
    names, n = spec.class_names, spec.n_targets
    labels = class_labels(joined, column or "label", names, n_classes=n, say=say)
    return _grouped(joined, gone, inputs.by, labels)


def _grouped(
    joined: Cohort, gone: dict[str, str], by: str, labels: Sequence[Any] | None
) -> tuple[list[Case], Missing]:
    cases = group_cases(joined, by, labels=labels)
    return cases, Missing(tuple(gone), _lacking(cases, gone) if by == "case" else {})


def trained_columns(cohort: Cohort, spec: ModelSpec) -> str:
    """The columns that the model was trained on, with commas; empty where the cohort lacks one."""
    columns = spec.columns or ()
    return ",".join(columns) if set(columns) <= set(cohort.columns) else ""


def parted_cohort(inputs: Inputs, say: Say) -> tuple[Cohort, dict[str, str]]:
    """The rows of a cohort that have features, of some splits, and the slides that have none with their case.

    A line says what did not match.
    """
    if inputs.cohort is None:
        raise InputError("Splits and --by case need a --cohort that names them.")
    every = read_cohort(inputs.cohort)
    table = every.subset(*inputs.splits) if inputs.splits else every
    joined, report = join_features(table, inputs.features, among=every, follow_links=inputs.follow_links)
    if report.without_features or report.doubled or report.not_followed:
        say(f"{inputs.cohort}: {report}")
    case_of = dict(zip(table.slides, table.cases, strict=True))
    return joined, {slide: case_of[slide] for slide in report.without_features}


def class_labels(
    cohort: Cohort,
    column: str,
    names: tuple[str, ...] | None,
    *,
    n_classes: int | None = None,
    say: Say = lambda _: None,
) -> list[int | None]:
    """Class indices: by the model's class names where labels are among them, else as numbers from 0.

    Labels by other names than the model's are refused, and so are names where the model has none: their
    order would be a guess. Where some are the model's, the others count as unknown, and a line names them.
    """
    if not _has_labels(cohort, column, say):
        return [None] * len(cohort)
    cells = cohort.column(column)
    given = [cell for cell in cells if cell is not None]
    strange = [cell for cell in given if not _is_whole(cell)]
    if names and (set(given) <= set(names) or (strange and set(given) & set(names))):
        _tell_foreign(cohort, column, names, say)
        return [names.index(cell) if cell is not None and cell in names else None for cell in cells]
    if strange:
        raise _no_class(strange[0], column, names, n_classes)
    return _numbered(cells, column, max(2, n_classes or len(names or ())))


def _numbered(cells: Sequence[str | None], column: str, most: int) -> list[int | None]:
    """Whole numbers as class indices, refused where the model has no such class."""
    labels = [None if cell is None else int(float(cell)) for cell in cells]
    known = [label for label in labels if label is not None]
    for label in (max(known, default=0), min(known, default=0)):
        if not 0 <= label < most:
            raise InputError(
                f"The column {column!r} has a class {label}, but the model knows {most}: they count from 0; "
                "where the numbers are names, give --class-names in the order of the model's outputs."
            )
    return labels


def _no_class(label: str, column: str, names: tuple[str, ...] | None, n_classes: int | None) -> InputError:
    told = f"The label {label!r} in column {column!r} is no class of the model, which"
    if names:
        return InputError(f"{told} knows {', '.join(names)}; rename the labels, or give class numbers.")
    most = max(2, n_classes or 0)
    return InputError(
        f"{told} has no class names; give its {most} names as --class-names, in the order of its outputs, or "
        f"class numbers (0 to {most - 1}) as labels."
    )


def _tell_foreign(cohort: Cohort, column: str, names: tuple[str, ...], say: Say) -> None:
    """A line on the slides whose label is no class of the model."""
    cells = zip(cohort.slides, cohort.column(column), strict=True)
    foreign = {slide: cell for slide, cell in cells if cell is not None and cell not in names}
    if foreign:
        labels = named([repr(cell) for cell in dict.fromkeys(foreign.values())])
        say(
            f"The column {column!r} has labels that are no class of the model ({', '.join(names)}): {labels} "
            f"of {named(list(foreign))}. They count as unlabelled."
        )


def named(slides: list[str], most: int = 5) -> str:
    """The first names of a list, and how many more there are.

    >>> named(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(slides) - most} more" if len(slides) > most else ""
    return ", ".join(slides[:most]) + more


def number_labels(cohort: Cohort, column: str, say: Say) -> list[float | None]:
    """The numbers of a column, for regression."""
    if not _has_labels(cohort, column, say):
        return [None] * len(cohort)
    return [None if value != value else float(value) for value in cohort.numbers(column)]


def task_cases(
    inputs: Inputs,
    spec: ModelSpec,
    *,
    label: str = "",
    time: str = "time",
    event: str = "event",
    say: Say = lambda _: None,
) -> tuple[list[Case], Missing]:
    """The bags to go over, each with what is true of it as the model's task has it, where it is known.

    With them what the cohort names and the features lack.
    """
    if inputs.cohort is None:
        return _every_file(inputs, say), Missing()
    joined, gone = parted_cohort(inputs, say)
    labels = task_labels(joined, spec, label=label, time=time, event=event, say=say)
    return _grouped(joined, gone, inputs.by, labels)


def _lacking(cases: list[Case], gone: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """The cases that are there without some of their slides, and which these are."""
    lacking: dict[str, list[str]] = {case.name: [] for case in cases}
    for slide, owner in gone.items():
        lacking.get(owner, []).append(slide)
    return {name: tuple(slides) for name, slides in lacking.items() if slides}


def task_labels(
    cohort: Cohort, spec: ModelSpec, *, label: str, time: str, event: str, say: Say = lambda _: None
) -> list[Any]:
    """What is true of each row, None where it is not known.

    A class index; 0 or 1 for each label; a number, or one for each value; a time with its event. `label` may
    name several columns; without it they are those the model was trained on, where the cohort has them. Else
    labels and values are the columns with the model's class names, a single value the column `label` where
    that holds numbers. Times and events are those of the training where the cohort lacks the default ones.
    """
    from xmil.core.task import TASKS

    trained = trained_columns(cohort, spec)
    label = label or trained
    truth = TASKS[spec.task].truth
    if truth == "time":
        if trained and (time, event) == ("time", "event") and not {time, event} <= set(cohort.columns):
            time, event = trained.split(",")
        return _survival_labels(cohort, time, event)
    if truth == "class":
        names, n = spec.class_names, spec.n_targets
        return list(class_labels(cohort, label or "label", names, n_classes=n, say=say))
    columns = listed(label) or [name for name in spec.class_names or () if name in cohort.columns]
    if not columns and spec.n_classes == 1 and _holds_numbers(cohort, "label"):
        columns = ["label"]
    if not columns:
        return [None] * len(cohort)
    if len(columns) != spec.n_classes:
        raise InputError(
            f"The model has {spec.n_classes} outputs; name as many columns with --label. Got {columns}."
        )
    numbers = [number_labels(cohort, column, say) for column in columns]
    if truth == "labels":
        _check_binary(numbers, columns)
    rows = list(zip(*numbers, strict=True))
    return [row[0] for row in rows] if truth == "values" and len(columns) == 1 else _complete(rows)


def _survival_labels(cohort: Cohort, time: str, event: str) -> list[tuple[float, bool] | None]:
    if (time, event) == ("time", "event") and not {time, event} & set(cohort.columns):
        return [None] * len(cohort)
    times, events = cohort.survival(time, event)
    missing = [cell is None for cell in cohort.column(event)]
    return [
        None if gone or t != t else (float(t), bool(e))
        for t, e, gone in zip(times, events, missing, strict=True)
    ]


def _check_binary(numbers: list[list[float | None]], columns: list[str]) -> None:
    for column, values in zip(columns, numbers, strict=True):
        if not all(value in (None, 0.0, 1.0) for value in values):
            raise InputError(f"The column {column!r} must hold 0 or 1; it is a label of its own.")


def _complete(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...] | None]:
    return [None if None in row else row for row in rows]


def class_index(text: str, model: MILModel) -> int:
    """A class of the model by its name or number; models without classes have one thing to ask for, 0."""
    from xmil.core.target import Target
    from xmil.core.task import TASKS

    if not TASKS[model.task].decides:
        return 0
    n = model.spec.n_targets
    return int(Target(text).resolve(n_classes=n, predicted=0, class_names=model.class_names))


def _holds_numbers(cohort: Cohort, column: str) -> bool:
    try:
        return column in cohort.columns and len(cohort.numbers(column)) > 0
    except InputError:
        return False


def _is_whole(cell: str) -> bool:
    try:
        return float(cell).is_integer()
    except ValueError:
        return False


def _has_labels(cohort: Cohort, column: str, say: Say) -> bool:
    if column in cohort.columns:
        return True
    if column != "label":
        raise unknown_name("column", column, cohort.columns)
    say("The cohort has no column 'label': no slide counts as right or wrong.")
    return False


def _every_file(inputs: Inputs, say: Say) -> list[Case]:
    if inputs.by != "slide" or inputs.splits:
        raise InputError("Splits and --by case need a --cohort that names them.")
    files, links = feature_files(inputs.features, follow_links=inputs.follow_links)
    if links:
        say(f"{inputs.features}: {len(links)} links not followed: {named([path.name for path in links])}.")
    if not files:
        advice = folder_advice(inputs.features)
        raise InputError(f"{inputs.features}: no feature files in this folder; {advice}.")
    by_name: dict[str, Path] = {}
    for path in files:
        by_name.setdefault(slide_name(path), path)
    _say_several(inputs, files, by_name, say)
    return [Case(name, (name,), (path,), case_id=name) for name, path in by_name.items()]


def _say_several(inputs: Inputs, files: list[Path], used: dict[str, Path], say: Say) -> None:
    """Name the slides with several files, and the file of each that is used."""
    again = dict.fromkeys(name for path in files if used[name := slide_name(path)] != path)
    if again:
        told = named([f"{name} ({used[name].relative_to(inputs.features)} is used)" for name in again])
        say(f"{inputs.features}: {counted(len(again), 'slide')} with several files: {told}.")
