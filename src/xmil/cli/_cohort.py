"""What commands over a cohort share: lists, devices, the slides with their labels, the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.core.errors import InputError, unknown_name

if TYPE_CHECKING:
    from xmil.data import Cohort
    from xmil.data.cases import Case
    from xmil.models import MILModel
    from xmil.models.base import ModelSpec
    from xmil.runs.cautions import Missing


def listed(text: str) -> list[str]:
    """The parts of a text between commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def checked_device(name: str) -> str:
    """The name of a device that is there."""
    import torch

    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise InputError(f"Unknown device {name!r}; use cpu, cuda or cuda:N.") from None
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"The device {name!r} is not there; use cpu.")
    return name


def checked_folder(path: Path) -> Path:
    """A folder that is there."""
    if not path.is_dir():
        raise InputError(f"{path}: no such folder.")
    return path


def find_cases(
    features: Path,
    cohort: Path | None,
    *,
    label: str | None = "label",
    splits: list[str] | None = None,
    names: tuple[str, ...] | None = None,
    by: str = "slide",
    spec: ModelSpec | None = None,
) -> tuple[list[Case], Missing]:
    """The bags to go over: the rows of a cohort that have features, or every feature file of a folder.

    With them what the cohort names and the features lack.

    Labels are class indices; a label column of None asks for none, "" for the one the model was trained on.
    """
    from xmil.runs.cautions import Missing

    if cohort is None:
        if by != "slide" or splits:
            raise InputError("Splits and --by case need a --cohort that names them.")
        return _every_file(features), Missing()
    joined, gone = parted_cohort(features, cohort, splits=splits)
    if label is None:
        return _grouped(joined, gone, by, None)
    column = label or (trained_columns(joined, spec) if spec and len(spec.columns or ()) == 1 else "")
    return _grouped(joined, gone, by, class_labels(joined, column or "label", names))


def _grouped(
    joined: Cohort, gone: dict[str, str], by: str, labels: Sequence[Any] | None
) -> tuple[list[Case], Missing]:
    from xmil.data import group_cases
    from xmil.runs.cautions import Missing

    cases = group_cases(joined, by, labels=labels)
    return cases, Missing(tuple(gone), _lacking(cases, gone) if by == "case" else {})


def trained_columns(cohort: Cohort, spec: ModelSpec) -> str:
    """The columns that the model was trained on, with commas; empty where the cohort lacks one."""
    columns = spec.columns or ()
    return ",".join(columns) if set(columns) <= set(cohort.columns) else ""


def parted_cohort(
    features: Path, cohort: Path, *, splits: list[str] | None = None
) -> tuple[Cohort, dict[str, str]]:
    """The rows of a cohort that have features, of some splits, and the slides that have none with their case.

    A line says what did not match.
    """
    from xmil.data import join_features, read_cohort

    table = read_cohort(cohort)
    table = table.subset(*splits) if splits else table
    joined, report = join_features(table, features)
    if report.without_features or report.doubled:
        print(f"{cohort}: {report}")
    case_of = dict(zip(table.slides, table.cases, strict=True))
    return joined, {slide: case_of[slide] for slide in report.without_features}


def class_labels(
    cohort: Cohort, column: str, names: tuple[str, ...] | None, *, n_classes: int | None = None
) -> list[int | None]:
    """Class indices: by the model's class names where labels are among them, else as numbers.

    Labels by other names than the model's are refused: their order would be a guess. Where some are the
    model's, the others count as unknown, and a line names them.
    """
    if not _has_labels(cohort, column):
        return [None] * len(cohort)
    cells = cohort.column(column)
    given = [cell for cell in cells if cell is not None]
    strange = [cell for cell in given if not _is_whole(cell)]
    if names and (set(given) <= set(names) or (strange and set(given) & set(names))):
        _tell_foreign(cohort, column, names)
        return [names.index(cell) if cell is not None and cell in names else None for cell in cells]
    if names and strange:
        raise InputError(
            f"The label {strange[0]!r} in column {column!r} is no class of the model, which knows "
            f"{', '.join(names)}; rename the labels, or give class numbers."
        )
    labels = [None if value < 0 else int(value) for value in cohort.labels(column)]
    top, most = (
        max((label for label in labels if label is not None), default=0),
        n_classes or len(names or ()),
    )
    if most and top >= max(2, most):
        raise InputError(f"The column {column!r} has a class {top}, but the model knows {max(2, most)}.")
    return labels


def _tell_foreign(cohort: Cohort, column: str, names: tuple[str, ...]) -> None:
    """A line on the slides whose label is no class of the model."""
    cells = zip(cohort.slides, cohort.column(column), strict=True)
    foreign = {slide: cell for slide, cell in cells if cell is not None and cell not in names}
    if foreign:
        labels = named([repr(cell) for cell in dict.fromkeys(foreign.values())])
        print(
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


def number_labels(cohort: Cohort, column: str) -> list[float | None]:
    """The numbers of a column, for regression."""
    if not _has_labels(cohort, column):
        return [None] * len(cohort)
    return [None if value != value else float(value) for value in cohort.numbers(column)]


def task_cases(
    features: Path,
    cohort: Path | None,
    spec: ModelSpec,
    *,
    label: str = "",
    time: str = "time",
    event: str = "event",
    splits: list[str] | None = None,
    by: str = "slide",
) -> tuple[list[Case], Missing]:
    """The bags to go over, each with what is true of it as the model's task has it, where it is known.

    With them what the cohort names and the features lack.
    """
    if cohort is None:
        return find_cases(features, None, splits=splits, by=by)
    joined, gone = parted_cohort(features, cohort, splits=splits)
    labels = task_labels(joined, spec, label=label, time=time, event=event)
    return _grouped(joined, gone, by, labels)


def _lacking(cases: list[Case], gone: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """The cases that are there without some of their slides, and which these are."""
    lacking: dict[str, list[str]] = {case.name: [] for case in cases}
    for slide, owner in gone.items():
        lacking.get(owner, []).append(slide)
    return {name: tuple(slides) for name, slides in lacking.items() if slides}


def task_labels(cohort: Cohort, spec: ModelSpec, *, label: str, time: str, event: str) -> list[Any]:
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
        return list(class_labels(cohort, label or "label", spec.class_names, n_classes=spec.n_targets))
    columns = listed(label) or [name for name in spec.class_names or () if name in cohort.columns]
    if not columns and spec.n_classes == 1 and _holds_numbers(cohort, "label"):
        columns = ["label"]
    if not columns:
        return [None] * len(cohort)
    if len(columns) != spec.n_classes:
        raise InputError(
            f"The model has {spec.n_classes} outputs; name as many columns with --label. Got {columns}."
        )
    numbers = [number_labels(cohort, column) for column in columns]
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


def _has_labels(cohort: Cohort, column: str) -> bool:
    if column in cohort.columns:
        return True
    if column != "label":
        raise unknown_name("column", column, cohort.columns)
    print("The cohort has no column 'label': no slide counts as right or wrong.")
    return False


def _every_file(features: Path) -> list[Case]:
    from xmil.data import Case, feature_files
    from xmil.data.siblings import slide_name

    files, _ = feature_files(features)
    if not files:
        raise InputError(f"{features}: no feature files in this folder.")
    by_name: dict[str, Path] = {}
    for path in files:
        by_name.setdefault(slide_name(path), path)
    if len(by_name) < len(files):
        print(f"{features}: {len(files) - len(by_name)} slides have several files; the first was taken.")
    return [Case(name, (name,), (path,), case_id=name) for name, path in by_name.items()]


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on the screen; call what it gives for each item done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda: progress.advance(bar)
