"""The bags of a run: feature files, joined with a cohort's rows and labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.core.bag import Patches
from xmil.core.errors import InputError, StrPath, XmilError, absent, unknown_name
from xmil.core.task import TASKS, Target
from xmil.core.text import bare_name, counted, shorten
from xmil.data.bags import Case, group_cases, open_bag
from xmil.data.cohort import SPLIT, Cohort, read_cohort
from xmil.data.files import (
    UNTRAINED,
    check_feature_files,
    feature_facts,
    feature_files,
    features_warning,
    is_untrained,
    join_features,
)
from xmil.data.header import slide_name
from xmil.models.base import ModelSpec
from xmil.runs.requests import CohortRequest
from xmil.slides.open import SlideListing, slide_files, sort_slides
from xmil.storage import Item, read_run

if TYPE_CHECKING:
    from xmil.models import MILModel

NAMED = 5  # slides, labels or links in a sentence
Say = Callable[[str], None]
LabelRows = Callable[..., Sequence[Any] | None]


def trained_columns(cohort: Cohort, spec: ModelSpec) -> tuple[str, ...]:
    """The columns that the model was trained on; none if the cohort lacks one."""
    columns = spec.columns or ()
    return tuple(columns) if set(columns) <= set(cohort.columns) else ()


def parted_cohort(path: Path, request: CohortRequest, say: Say) -> tuple[Cohort, dict[str, str]]:
    """Select the rows of a cohort with features; also return slides without features, with their case.

    Only the request's splits count. A line reports what did not match.
    """
    cohort = read_cohort(path, slide_column=request.slide_column)
    if note := cohort.taken:
        say(f"{path}: {note}.")
    table = cohort.subset(*request.split) if request.split else cohort
    joined, report = join_features(table, request.features, among=cohort, follow_links=request.follow_links)
    if report.without_features or report.doubled or report.not_followed:
        say(f"{path}: {report}")
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
    """Convert labels to class indices: the model's class names, or numbers from 0.

    Other names are refused, and so are names if the model has none, because their order would be a guess.
    If only some labels are the model's names, the others count as unknown, and a line lists them.
    """
    if not _has_labels(cohort, column, say):
        return [None] * len(cohort)
    cells = cohort.column(column)
    labels = [cell for cell in cells if cell is not None]
    strange = [cell for cell in labels if not _is_whole(cell)]
    if names and (set(labels) <= set(names) or (strange and set(labels) & set(names))):
        pairs = zip(cohort.slides, cells, strict=True)
        foreign = {slide: cell for slide, cell in pairs if cell is not None and cell not in names}
        if foreign:
            unknown = shorten([repr(cell) for cell in dict.fromkeys(foreign.values())], NAMED)
            say(
                f"The column {column!r} has labels the model does not know ({', '.join(names)}): {unknown} "
                f"of {shorten(list(foreign), NAMED)}. They count as unlabelled."
            )
        return [names.index(cell) if cell is not None and cell in names else None for cell in cells]
    most = max(2, n_classes or len(names or ()))
    if strange:
        advice = (
            f"knows {', '.join(names)}; rename the labels, or use class numbers."
            if names
            else (
                f"has no class names; pass its {most} names as `class_names=`, in the order of its "
                f"outputs, or use class numbers (0 to {most - 1}) as labels."
            )
        )
        raise InputError(
            f"The label {strange[0]!r} in column {column!r} is not a class of the model, which {advice}"
        )
    numbers = [None if cell is None else int(float(cell)) for cell in cells]
    known = [number for number in numbers if number is not None]
    for label in (max(known, default=0), min(known, default=0)):
        if not 0 <= label < most:
            raise InputError(
                f"The column {column!r} has a class {label}, but the model has classes 0 to {most - 1}; "
                "if the numbers are names, pass `class_names=` in the order of the model's outputs."
            )
    return numbers


def task_cases(
    request: CohortRequest, spec: ModelSpec, *, labels: LabelRows | None = None, say: Say = lambda _: None
) -> tuple[list[Case], Missing]:
    """List the bags of a run: the rows of a cohort with features, or every feature file of a folder.

    Also return what the cohort names but the features lack. `labels` reads the labels of the rows; the
    default suits the model's task.
    """
    if request.cohort is None:
        return _every_file(request, say), Missing()
    joined, featureless = parted_cohort(request.cohort, request, say)
    row_labels = (labels or task_labels)(joined, spec, request.label, say=say)
    cases = group_cases(joined, request.by, labels=row_labels)
    lacking: dict[str, list[str]] = {case.name: [] for case in cases if request.by == "case"}
    for slide, owner in featureless.items():
        lacking.get(owner, []).append(slide)
    incomplete = {name: tuple(slides) for name, slides in lacking.items() if slides}
    alone = joined.without_case
    return cases, Missing(tuple(featureless), incomplete, tuple(alone) if len(alone) < len(joined) else ())


def decided_labels(
    cohort: Cohort, spec: ModelSpec, columns: Sequence[str] = (), *, say: Say = lambda _: None
) -> list[int | None] | None:
    """Read the class of each row for a model that predicts classes; None for others."""
    if not TASKS[spec.task].decides:
        return None
    trained = trained_columns(cohort, spec)
    column = columns[0] if columns else trained[0] if len(trained) == 1 else "label"
    return class_labels(cohort, column, spec.class_names, n_classes=spec.n_targets, say=say)


def task_labels(
    cohort: Cohort, spec: ModelSpec, columns: Sequence[str] = (), *, say: Say = lambda _: None
) -> list[Any]:
    """Read the label of each row, None if it is unknown.

    A class index; 0 or 1 for each label; a number, or one per value; a time with its event. The default for
    `columns` are those the model was trained on, if the cohort has them. Otherwise labels and values are
    the columns with the model's class names, a single value is the column `label` if that holds numbers, and
    survival is `time` and `event`.
    """
    trained = trained_columns(cohort, spec)
    truth = TASKS[spec.task].truth
    if truth == "time":
        default = ("time", "event")
        if columns and len(columns) != 2:
            raise InputError(
                f"A survival model needs two columns in `label=`, time and event. Got {columns}."
            )
        if not columns and trained and not set(default) <= set(cohort.columns):
            columns = trained
        return _survival_labels(cohort, *(columns or default), say=say)
    columns = tuple(columns) or trained
    if truth == "class":
        if len(columns) > 1:
            raise InputError(f"A classification model needs one column in `label=`. Got {columns}.")
        names, n = spec.class_names, spec.n_targets
        return list(class_labels(cohort, (columns or ("label",))[0], names, n_classes=n, say=say))
    columns = columns or tuple(name for name in spec.class_names or () if name in cohort.columns)
    if not columns and spec.n_classes == 1 and _holds_numbers(cohort, "label"):
        columns = ("label",)
    if not columns:
        return [None] * len(cohort)
    if len(columns) != spec.n_classes:
        raise InputError(
            f"The model has {spec.n_classes} outputs; name as many columns in `label=`. Got {list(columns)}."
        )
    numbers: list[list[float | None]] = [
        [None if value != value else float(value) for value in cohort.numbers(column)]
        if _has_labels(cohort, column, say)
        else [None] * len(cohort)
        for column in columns
    ]
    if truth == "labels":
        for column, values in zip(columns, numbers, strict=True):
            if not all(value in (None, 0.0, 1.0) for value in values):
                raise InputError(f"The column {column!r} of a multi-label model must hold only 0 and 1.")
    rows = list(zip(*numbers, strict=True))
    if truth == "values" and len(columns) == 1:
        return [row[0] for row in rows]
    return [None if None in row else row for row in rows]


def _survival_labels(cohort: Cohort, time: str, event: str, *, say: Say) -> list[tuple[float, bool] | None]:
    if (time, event) == ("time", "event") and not {time, event} & set(cohort.columns):
        return [None] * len(cohort)
    times, events = cohort.survival(time, event)
    missing = [cell is None for cell in cohort.column(event)]
    labels = [
        None if gone or t != t else (float(t), bool(e))
        for t, e, gone in zip(times, events, missing, strict=True)
    ]
    known = {(case, label) for case, label in zip(cohort.cases, labels, strict=True) if label is not None}
    if several := sorted(case for case, n in Counter(case for case, _ in known).items() if n > 1):
        say(
            f"The slides of {counted(len(several), 'case')} differ in {time!r} or {event!r} "
            f"({shorten(several, 5)}): each slide counts with its own, survival curves take a case's first."
        )
    return labels


def class_index(text: str, model: MILModel) -> int:
    """Find a class of the model by name or number; 0 for models without classes."""
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
    say("The cohort has no column 'label', so no slide counts as right or wrong.")
    return False


def _every_file(request: CohortRequest, say: Say) -> list[Case]:
    if request.by != "slide" or request.split:
        what = "`split=`" if request.split else "`by='case'`"
        raise InputError(f"{what} needs a `cohort=` that names it.")
    files, links = feature_files(request.features, follow_links=request.follow_links)
    if links:
        names = shorten([path.name for path in links], NAMED)
        say(f"{request.features}: {counted(len(links), 'link')} not followed: {names}.")
    check_feature_files(files, request.features)
    by_name: dict[str, Path] = {}
    for path in files:
        by_name.setdefault(slide_name(path), path)
    if repeated := dict.fromkeys(name for path in files if by_name[name := slide_name(path)] != path):
        used = [f"{name} ({by_name[name].relative_to(request.features)} is used)" for name in repeated]
        several = counted(len(repeated), "slide")
        say(f"{request.features}: {several} with several files: {shorten(used, NAMED)}.")
    return [Case(name, (name,), (path,)) for name, path in by_name.items()]


def item_of_case(case: Case, *more: Path | None, parts: Sequence[str] = (), **decides: Any) -> Item[Case]:
    """Make the item of a case, which reads its feature files and `more`; `decides` is what else matters."""
    about = {**decides, "slides": list(case.slides)}
    if any(case.files):
        about["files"] = [dict(file) for file in case.files]
    return Item(case.name, case, (*case.paths, *more), about, tuple(parts), case.slides)


LOOKING = 16  # threads that read headers: they wait for the disk


@dataclass(frozen=True)
class Missing:
    """Gaps of a cohort.

    Slides without features; the missing slides of incomplete cases; slides without a case.
    """

    slides: tuple[str, ...] = ()
    incomplete: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without_case: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Convert to entries of run.json."""
        return {"without_features": list(self.slides), "incomplete_cases": dict(self.incomplete)}

    def incomplete_warning(self) -> str | None:
        """Write a sentence on the incomplete cases.

        >>> Missing(("a2",), {"a": ("a2",)}).incomplete_warning()
        '1 case has slides without features; only its other slides are used: a (without a2). See run.json.'
        """
        if not self.incomplete:
            return None
        each = [f"{case} (without {', '.join(gone)})" for case, gone in self.incomplete.items()]
        n, named = len(each), shorten(each, NAMED)
        who, whose = ("1 case has", "its") if n == 1 else (f"{n} cases have", "their")
        return f"{who} slides without features; only {whose} other slides are used: {named}. See run.json."


def caseless_warning(slides: Sequence[str]) -> str | None:
    """Write a sentence on slides without a case among others with one; None without such slides.

    >>> caseless_warning(["s3"])
    '1 slide without a case_id (s3): each is its own case, so slides of one patient may count as independent.'
    """
    if not slides:
        return None
    return (
        f"{counted(len(slides), 'slide')} without a case_id ({shorten(list(slides), 5)}): each is its own "
        "case, so slides of one patient may count as independent."
    )


def stored_edge(header: Mapping[str, Any]) -> Patches:
    """The patch edge in the header of a slide's explanations, and what it was guessed from."""
    size, guess = header.get("patch_size"), header.get("edge_guess")
    if not isinstance(size, int) or not isinstance(guess, str):
        return Patches()
    return Patches(patch_size=size, edge_guess=guess)


def guessed_edges(patches: Iterable[tuple[str, Patches]]) -> dict[str, Patches]:
    """Select the slides whose patch edge is a guess."""
    edges = {slide: each.guessed_edge for slide, each in patches}
    return {slide: edge for slide, edge in edges.items() if edge is not None}


def guessed_edges_warning(edges: Mapping[str, Patches]) -> str | None:
    """Write a sentence on slides whose patch edge is a guess; None without such slides.

    >>> edge = Patches(patch_size=768, edge_guess="the smallest gap between patches")
    >>> guessed_edges_warning({"s1": edge, "s2": edge})
    '2 slides (s1, s2) store no level-0 patch edge: 768 px is a guess from the smallest gap between ...'
    """
    if not edges:
        return None
    distinct = sorted({int(edge.patch_size or 0) for edge in edges.values()})
    sizes = shorten([str(size) for size in distinct], NAMED)
    sources = " or ".join(dict.fromkeys(str(one.edge_guess) for one in edges.values()))
    store = "stores" if len(edges) == 1 else "store"
    return (
        f"{counted(len(edges), 'slide')} ({shorten(list(edges), NAMED)}) {store} no level-0 patch edge: "
        f"{sizes} px is a guess from {sources}. If patches overlap or lie apart, pass `patch_size=`."
    )


HELD_OUT = "test"


def training_overlap_warning(models: Sequence[object], cases: Sequence[Case]) -> str | None:
    """Write a sentence if these slides, or others of their cases, were in the training of a model."""
    trained = [training_slides(path) for path in models if isinstance(path, Path)]
    slides = {bare_name(slide) for slides_of_model in trained for slide in slides_of_model}
    owners = {owner for slides_of_model in trained for owner in slides_of_model.values()}
    trained_on = [case for case in cases if any(bare_name(slide) in slides for slide in case.slides)]
    alike = [case for case in cases if case.case_id not in case.slides and case.case_id in owners]
    if trained_on:
        return (
            f"{_of(trained_on, cases, 'was', 'were')} in the training of a model: the results look better "
            "than they are. predictions.csv of the training run has those of held-out cases."
        )
    if alike:
        return (
            f"{_of(alike, cases, 'is', 'are')} of cases with the case_id of a case in the training of a "
            "model, but other slides: if they are the same patients, the results look better than "
            "they are."
        )
    return None


def _of(some: Sequence[Case], cases: Sequence[Case], singular: str, plural: str) -> str:
    """Write how many of the bags, with the matching verb."""
    verb = singular if len(some) == 1 else plural
    return f"{len(some)} of the {counted(len(cases), 'bag')} here {verb}"


def training_slides(model: Path) -> dict[str, str]:
    """List the slides that a training run used to fit or select a model, with their cases.

    The run's cohort.csv has the split of each slide: a fold's model did not use that fold, and rows without
    a split were not used. Empty if nothing is recorded.
    """
    job = model if model.is_dir() else model.parent
    run = job.parent
    try:
        if (read_run(run) or {}).get("kind") != "train":
            return {}
        table = read_cohort(run / "cohort.csv")
        held_out = {HELD_OUT, *job.name.split("-")}
        splits = table.column(SPLIT)
    except XmilError:
        return {}
    rows = zip(table.slides, table.cases, splits, strict=True)
    return {slide: case for slide, case, split in rows if split is not None and split not in held_out}


def features_mismatch_warning(spec: ModelSpec, cases: Sequence[Case]) -> str | None:
    """Write a sentence if the features were made differently from those the model was trained on."""
    trained = {"encoder": spec.encoder, **(spec.features or {})}
    paths = [path for case in cases for path in case.paths]
    if not any(trained.values()):
        paths = paths[:LOOKING]  # nothing to compare: a few show whether the encoder was untrained
    with ThreadPoolExecutor(LOOKING) as threads:
        features = list(threads.map(_facts, paths))
    if any(is_untrained(trained, facts) for facts in features):
        return UNTRAINED
    return features_warning(trained, features)


def _facts(path: Path) -> dict[str, Any]:
    try:
        return feature_facts(open_bag(path))
    except (XmilError, OSError):  # reported as a failure elsewhere
        return {}


def named_slides(
    slides: StrPath | Sequence[StrPath],
    *,
    follow_links: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> SlideListing:
    """List slides by id from files and folders; report skipped pictures and links."""
    paths = [Path(slides)] if isinstance(slides, str | PathLike) else [Path(path) for path in slides]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise InputError(absent(missing[0], "file or folder"))
    files, links = [path for path in paths if not path.is_dir()], []
    for folder in (path for path in paths if path.is_dir()):
        inside, skipped = slide_files(folder, follow_links=follow_links)
        files += inside
        links += skipped
    listing = sort_slides(dict.fromkeys(files))
    for path in links:
        say(f"{path}: a link that was not followed (broken, circular, or with `follow_links=False`).")
    if not listing.slides and not listing.twice:
        names = ", ".join(map(str, paths))
        raise InputError(f"{names}: contains no slides; name slide files, or a folder with slides.")
    for path in listing.beside:
        say(f"{path}: left out, because another slide has this name.")
    return listing
