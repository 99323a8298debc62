"""What commands over a cohort share: lists, devices, the slides with their labels, the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from xmil.core.errors import InputError, unknown_name

if TYPE_CHECKING:
    from xmil.data import Cohort
    from xmil.data.cases import Case
    from xmil.models import MILModel


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
    numbers: bool = False,
) -> list[Case]:
    """The bags to go over: the rows of a cohort that have features, or every feature file of a folder.

    Labels are class indices; with `numbers` they are the numbers of the column, and None asks for none.
    """
    from xmil.data import group_cases

    if cohort is None:
        if by != "slide" or splits:
            raise InputError("Splits and --by case need a --cohort that names them.")
        return _every_file(features)
    joined = joined_cohort(features, cohort, splits=splits)
    if label is None:
        return group_cases(joined, by)
    labels = number_labels(joined, label) if numbers else class_labels(joined, label, names)
    return group_cases(joined, by, labels=labels)


def joined_cohort(features: Path, cohort: Path, *, splits: list[str] | None = None) -> Cohort:
    """The rows of a cohort that have features, of some splits; a line says what did not match."""
    from xmil.data import join_features, read_cohort

    table = read_cohort(cohort)
    table = table.subset(*splits) if splits else table
    joined, report = join_features(table, features)
    if report.without_features or report.doubled:
        print(f"{cohort}: {report}")
    return joined


def class_labels(cohort: Cohort, column: str, names: tuple[str, ...] | None) -> list[int | None]:
    """Class indices: by the model's class names where the labels are among them."""
    if not _has_labels(cohort, column):
        return [None] * len(cohort)
    cells = cohort.column(column)
    if names and all(cell is None or cell in names for cell in cells):
        return [None if cell is None else names.index(cell) for cell in cells]
    return [None if value < 0 else int(value) for value in cohort.labels(column)]


def number_labels(cohort: Cohort, column: str) -> list[float | None]:
    """The numbers of a column, for regression."""
    if not _has_labels(cohort, column):
        return [None] * len(cohort)
    return [None if value != value else float(value) for value in cohort.numbers(column)]


def class_index(text: str, model: MILModel) -> int:
    """A class of the model by its name or number; models without classes have one thing to ask for, 0."""
    from xmil.core.target import Target
    from xmil.models.tasks import CLASS_TASKS, count_targets

    if model.task not in CLASS_TASKS:
        return 0
    n = count_targets(model.task, model.n_classes)
    return int(Target(text).resolve(n_classes=n, predicted=0, class_names=model.class_names))


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
