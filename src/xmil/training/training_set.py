"""The bags of a training run: cohort rows joined with their feature files and targets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.bag import IntArray
from xmil.core.durable import identity
from xmil.core.errors import InputError, XmilError, unknown_name
from xmil.core.registry import Registry
from xmil.core.task import LABEL_COLUMNS, TASKS, Floats
from xmil.core.text import shorten
from xmil.data import Cohort, group_cases, join_features, read_cohort, split_folds, split_fractions
from xmil.data.bags import open_bag
from xmil.data.dataset import BagDataset
from xmil.data.files import differing, feature_facts
from xmil.data.header import slide_name
from xmil.training.config import Config, Data

logger = logging.getLogger(__name__)
SHOWN = 5
FILES = 20  # feature files that a message lists
READERS = 8  # threads that read feature files


@dataclass(frozen=True)
class TrainingSet:
    """Bags by row: the cohort (one row per bag), files, targets, and the features' encoder."""

    cohort: Cohort
    files: tuple[tuple[Path, ...], ...]
    targets: Targets
    bags: BagDataset
    encoder: str | None
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] | None = None  # how the features were made, without the encoder's name

    def __len__(self) -> int:
        return len(self.files)

    @property
    def digest(self) -> str:
        """A digest of names, files and targets, which identifies the set."""
        lines = [
            f"{name}|{'|'.join(path.name for path in files)}|{target.tolist()}"
            for name, files, target in zip(self.cohort.slides, self.files, self.targets.values, strict=True)
        ]
        return sha256("\n".join(lines).encode()).hexdigest()[:16]


def read_training_set(config: Config) -> TrainingSet:
    """Read and check the bags of a config."""
    cohort, notes = _with_features(config.data)
    cohort, unused = _in_splits(cohort, config.data)
    notes += [_list_names("slides are in no split and are left out", unused)] if unused else []
    columns = target_columns(config)
    cells = zip(*[cohort.column(name) for name in columns], strict=True)
    has_target = [None not in row for row in cells]
    if not all(has_target):
        missing = [name for name, has in zip(cohort.slides, has_target, strict=True) if not has]
        sentence = _list_names(f"slides have no {' and '.join(columns)}", missing)
        if config.data.missing == "refuse" or not any(has_target):
            advice = "fill them in, or set data.missing to 'skip'"
            raise InputError(f"{config.data.cohort}: {sentence}; {advice}.")
        cohort, notes = cohort.take(_rows(has_target).tolist()), [*notes, f"{sentence} and are left out"]
    training_set = _readable_set(cohort, config)
    training_set = replace(training_set, notes=(*notes, *training_set.notes))
    return _without_large(training_set, config.data.exclude_above)


def _in_splits(cohort: Cohort, data: Data) -> tuple[Cohort, list[str]]:
    """Separate the slides with a split or fold in the column, if there is one, from those without."""
    column = data.fold_column or (data.split if data.folds is None else None)
    cells = cohort.columns.get(column or "", ("",) * len(cohort))
    unused = [name for name, cell in zip(cohort.slides, cells, strict=True) if cell is None]
    if len(unused) in (0, len(cohort)):  # an empty column is refused later
        return cohort, []
    return cohort.take(i for i, cell in enumerate(cells) if cell is not None), unused


def _readable_set(cohort: Cohort, config: Config) -> TrainingSet:
    """Read the bags of a cohort; refuse unusable feature files together, or skip them."""
    paths = [str(path) for path in cohort.column("path")]
    with ThreadPoolExecutor(READERS) as threads:
        faults = list(threads.map(partial(_fault, _options(config.data)), paths))
    broken = {path: fault for path, fault in zip(paths, faults, strict=True) if fault is not None}
    if not broken:
        return _training_set(cohort, config)
    usable = cohort.take(i for i, path in enumerate(cohort.column("path")) if str(path) not in broken)
    if config.data.missing == "refuse" or not len(usable):
        reasons = shorten([reason.rstrip(".") for reason in broken.values()], FILES, comma=";")
        raise InputError(
            f"{config.data.cohort}: the feature files of {len(broken)} of {len(cohort)} slides cannot be "
            f"used: {reasons}. Repair them, or set data.missing to 'skip'."
        )
    note = _list_names("feature files cannot be used and are left out", [Path(path).name for path in broken])
    training_set = _training_set(usable, config)
    return replace(training_set, notes=(note, *training_set.notes))


def _fault(options: Mapping[str, Any], path: str) -> str | None:
    """Why a feature file cannot be used; None if it can."""
    try:
        header = open_bag(path, **options)
        if not len(header) or not header.dim:
            return f"{path}: holds no patches"
        features = header.read().features
    except XmilError as error:
        return str(error)
    if np.isfinite(features.sum(dtype=np.float64)):
        return None
    rows = int((~np.isfinite(features)).any(axis=1).sum())
    return f"{path}: features are not finite (NaN or inf) in {rows} of {len(features)} rows"


def _training_set(cohort: Cohort, config: Config) -> TrainingSet:
    cohort, files = _bags(cohort, config)
    targets = read_targets(cohort, config)
    bags = BagDataset(
        [paths if len(paths) > 1 else paths[0] for paths in files],
        [0] * len(files),
        max_instances=config.data.max_instances,
        seed=config.train.seed,
        options=_options(config.data),
    )
    facts, notes = _facts(bags)
    encoder = facts.pop("encoder", None)
    return TrainingSet(cohort, files, targets, bags, encoder, tuple(notes), facts or None)


def _parts(bags: BagDataset) -> list[Any]:
    """The header of every feature file."""
    return [part for header in bags.headers for part in getattr(header, "parts", (header,))]


def _options(data: Data) -> dict[str, Any]:
    """The options of `open_bag`: slide embeddings only if the config says so."""
    return {"format": "embedding"} if data.source == "embeddings" else {}


def _with_features(data: Data) -> tuple[Cohort, list[str]]:
    """Find the slides with features in one of the folders."""
    cohort = read_cohort(data.cohort, metadata=data.metadata or None, slide_column=data.slide_column)
    folders = [data.features] if isinstance(data.features, str) else data.features
    missing, paths, links = cohort, dict[str, object](), list[str]()
    for folder in folders:
        part, report = join_features(missing, folder, follow_links=data.follow_links)
        links += report.not_followed
        paths.update(zip(part.slides, part.column("path"), strict=True))
        missing = missing.take(i for i, name in enumerate(missing.slides) if name not in paths)
        if not len(missing):
            break
    featured = cohort.take(i for i, name in enumerate(cohort.slides) if name in paths)
    notes = [cohort.taken] if cohort.taken else []
    missing_note = "slides have no features and are left out"
    notes += [_list_names(missing_note, missing.slides)] if len(missing) else []
    notes += [_list_names("links were not followed", links)] if links else []
    return featured.with_column("path", [paths[name] for name in featured.slides]), notes


def check_columns(config: Config) -> None:
    """Refuse a cohort without the columns that a config names, if the file exists."""
    data = config.data
    if not Path(data.cohort).exists():
        return
    cohort = read_cohort(data.cohort, metadata=data.metadata or None, slide_column=data.slide_column)
    split = [data.fold_column] if data.fold_column else [data.split] if data.folds is None else []
    for name in [*target_columns(config), *split]:
        cohort.column(name)


def _bags(cohort: Cohort, config: Config) -> tuple[Cohort, tuple[tuple[Path, ...], ...]]:
    """Make one row per bag, with its files; a case takes the row of its first slide."""
    cases = group_cases(cohort, config.data.by)
    files = tuple(case.paths for case in cases)
    if config.data.by == "slide":
        return cohort, files
    for name in [*target_columns(config), config.data.split, config.data.fold_column]:
        cells = cohort.columns.get(str(name), (None,) * len(cohort))
        for case in cases:
            if len({cells[i] for i in case.rows}) > 1:
                raise InputError(
                    f"The slides of case {case.name!r} differ in {str(name)!r}; correct the table, or set "
                    "data.by to 'slide'."
                )
    names = [case.name for case in cases]
    firsts = cohort.take(case.rows[0] for case in cases)
    return firsts.with_column("case_id", names).with_column("slide_id", names), files


def _without_large(training_set: TrainingSet, limit: int | None) -> TrainingSet:
    """Leave out bags with more than `limit` instances."""
    sizes = [len(header) for header in training_set.bags.headers]
    if limit is None or max(sizes) <= limit:
        return training_set
    keep = [i for i, n in enumerate(sizes) if n <= limit]
    if not keep:
        raise InputError(f"Every bag has more than {limit} patches (data.exclude_above); raise the limit.")
    large = [name for name, n in zip(training_set.cohort.slides, sizes, strict=True) if n > limit]
    note = _list_names(f"bags have more than {limit} patches and are left out", large)
    bags, targets = training_set.bags, training_set.targets
    return replace(
        training_set,
        cohort=training_set.cohort.take(keep),
        files=tuple(training_set.files[i] for i in keep),
        targets=replace(targets, values=targets.values[keep]),
        bags=replace(bags, paths=[bags.paths[i] for i in keep], targets=[0] * len(keep)),
        notes=(*training_set.notes, note),
    )


def _facts(bags: BagDataset) -> tuple[dict[str, Any], list[str]]:
    """Collect how all features were made, and note differences; refuse several encoders or weights."""
    shared: dict[str, Any] = {}
    first: dict[str, Path] = {}
    mixed: dict[str, set[str]] = {}
    for part in _parts(bags):
        facts = feature_facts(part)
        for name in differing(shared, facts):
            if name in ("encoder", "weights"):
                what = "" if name == "encoder" else f"{name} "
                raise InputError(
                    f"{part.path}: its features come from {what}{facts[name]!r} but those of {first[name]} "
                    f"from {shared[name]!r}; use one encoder."
                )
            mixed.setdefault(name, {str(shared[name])}).add(str(facts[name]))
        for name, value in facts.items():
            shared.setdefault(name, value)
            first.setdefault(name, part.path)
    notes = [f"the features differ in {name}: {', '.join(sorted(values))}" for name, values in mixed.items()]
    return {name: value for name, value in shared.items() if name not in mixed}, notes


def bag_slides(training_set: TrainingSet) -> list[tuple[str, ...]]:
    """The slides of each bag."""
    cohort = training_set.cohort
    return [
        tuple(name if len(files) == 1 and name != case else slide_name(path) for path in files)
        for name, case, files in zip(cohort.slides, cohort.cases, training_set.files, strict=True)
    ]


def slide_rows(
    training_set: TrainingSet, parts: Sequence[str], *, full: bool = False
) -> list[dict[str, str]]:
    """The slides of a training set as a cohort table, with the split and the file's digest of each."""
    cases, targets = training_set.cohort.cases, training_set.targets
    truth, names = TASKS[targets.task].truth, targets.class_names or ()
    columns = ("time", "event") if truth == "time" else names or ("value",)
    rows = []
    for i, slides in enumerate(bag_slides(training_set)):
        values = targets.values[i].tolist()
        if truth == "class":
            cells = {"label": names[int(values[0])]}
        else:
            cells = {name: f"{value:g}" for name, value in zip(columns, values, strict=True)}
        for slide, path in zip(slides, training_set.files[i], strict=True):
            row = {"slide_id": slide, "case_id": cases[i], **cells, "split": parts[i]}
            rows.append({**row, "path": str(path.resolve()), "digest": identity(path, full=full)})
    return rows


def _list_names(what: str, names: Sequence[str]) -> str:
    return f"{len(names)} {what} ({shorten(names, SHOWN)})"


Rows = IntArray  # of the training set


@dataclass(frozen=True)
class Targets:
    """One row of numbers per bag: a class index, 0 or 1 for each label, a value, or (time, event)."""

    task: str
    values: Floats
    class_names: tuple[str, ...] | None = None

    @property
    def strata(self) -> list[str]:
        """The strata of folds: the class, all labels together, or whether there is an event."""
        truth = TASKS[self.task].truth
        if truth == "values":
            return [""] * len(self.values)
        columns = self.values[:, 1:] if truth == "time" else self.values
        return ["/".join(f"{value:g}" for value in row) for row in columns]

    @property
    def classes(self) -> list[tuple[str, ...]]:
        """The names of each bag's classes: its class, its labels, or whether there is an event."""
        names, truth = self.class_names or (), TASKS[self.task].truth
        if truth == "class":
            return [(names[int(value)],) for value in self.values[:, 0]]
        if truth == "time":
            return [("event",) if event else ("censored",) for event in self.values[:, 1]]
        return [
            tuple(name for name, value in zip(names, row, strict=True) if value > 0.5) for row in self.values
        ]


@dataclass(frozen=True)
class Goal:
    """The goal of a model of one fold: its outputs, and settings derived from the training bags.

    `truth` are the targets, `values` the loss's targets: time bins for discrete hazards.
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
        """The fields of a model's spec that the targets determine."""
        shared = {"task": self.task, "class_names": self.class_names}
        own = {"reference": self.reference, "time_bins": self.time_bins, "columns": self.columns or None}
        return {**shared, **{key: value for key, value in own.items() if value is not None}}


def read_targets(cohort: Cohort, config: Config) -> Targets:
    """Read the targets of a cohort for a task."""
    data, truth = config.data, TASKS[config.task].truth
    if truth == "class":
        indices, names = _classes(cohort, data.label, tuple(data.class_names))
        return Targets(config.task, indices.astype(float)[:, None], names)
    if truth == "labels":
        columns = [cohort.numbers(name) for name in data.labels]
        for name, values in zip(data.labels, columns, strict=True):
            if not np.isin(values, (0, 1)).all():
                raise InputError(f"The column {name!r} must hold 0 or 1 for every slide; see data.labels.")
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
    named = [getattr(config.data, setting) for setting in LABEL_COLUMNS[TASKS[config.task].truth]]
    return named[0] if isinstance(named[0], list) else named


def make_goal(targets: Targets, train: Rows, config: Config, *, run: Rows | None = None) -> Goal:
    """Make the goal of a fold from its training bags; refuse bags that no model can learn from.

    `run` are the bags that train in any fold, which define time bins unless each fold has its own.
    """
    shared = train if run is None or config.loss.bins_from == "fold" else run
    learnable = Learnable(targets, targets.values[train], targets.values[shared], config)
    return replace(GOALS[targets.task](learnable), columns=tuple(target_columns(config)))


@dataclass(frozen=True)
class Learnable:
    """All targets, those of a fold's training bags, and those that define time bins."""

    targets: Targets
    known: Floats
    shared: Floats
    config: Config

    def goal(self, outputs: int, *, values: Floats | None = None, **more: Any) -> Goal:
        """Make a goal with so many outputs; `values` replaces the targets of the loss."""
        targets = self.targets
        values = targets.values if values is None else values
        return Goal(targets.task, outputs, targets.class_names, targets.values, values, **more)

    def check_classes(self) -> int:
        """Count classes or labels; refuse training bags that lack one."""
        names, truth = self.targets.class_names or (), TASKS[self.targets.task].truth
        for c, name in enumerate(names):
            hits = self.known[:, 0] == c if truth == "class" else self.known[:, c] == 1
            if not hits.any():
                raise InputError(
                    f"The class {name!r} has no bag in the training set; split again or drop it."
                )
            if truth == "labels" and hits.all():
                raise InputError(f"Every training bag has the label {name!r}; split again or drop it.")
        return len(names)

    def check_events(self) -> None:
        """Refuse training bags that are all censored."""
        if not self.known[:, 1].any():
            raise InputError("No training bag has an event; survival needs events to learn from.")


GOALS: Registry[Callable[[Learnable], Goal]] = Registry("task to train", group="xmil.task_losses")


@GOALS.register("classification")
@GOALS.register("multilabel")
def _class_goal(learnable: Learnable) -> Goal:
    return learnable.goal(learnable.check_classes())


@GOALS.register("regression")
def _value_goal(learnable: Learnable) -> Goal:
    reference = learnable.config.loss.reference
    return learnable.goal(1, reference=float(learnable.known.mean()) if reference is None else reference)


@GOALS.register("cox")
def _risk_goal(learnable: Learnable) -> Goal:
    learnable.check_events()
    return learnable.goal(1)


@GOALS.register("survival")
def _hazard_goal(learnable: Learnable) -> Goal:
    learnable.check_events()
    edges, values = time_bins(learnable.shared, learnable.config.loss.bins), learnable.targets.values
    bins = np.searchsorted(edges, values[:, 0], side="right")
    binned = np.stack([bins, values[:, 1]], axis=1).astype(float)
    return learnable.goal(len(edges) + 1, values=binned, time_bins=tuple(edges))


def time_bins(targets: Floats, bins: int) -> list[float]:
    """Inner edges of time bins: quantiles of the event times.

    >>> time_bins(np.array([[1.0, 1], [2, 1], [3, 1], [4, 1], [9, 0]]), 4)
    [1.75, 2.5, 3.25]
    """
    times = targets[targets[:, 1] > 0, 0]
    edges = np.unique(np.quantile(times, np.arange(1, bins) / bins))
    if len(edges) < bins - 1:
        raise InputError(
            f"The training bags have too few different event times for {bins} bins; set loss.bins lower."
        )
    return [float(edge) for edge in edges]


def _classes(cohort: Cohort, column: str, names: tuple[str, ...]) -> tuple[Rows, tuple[str, ...]]:
    """Class indices and names: in the order of `names` if they contain the labels, else sorted."""
    classes, cells = cohort.classes(column), cohort.column(column)
    values = set(map(str, cells))
    if len(values) < 2:
        raise InputError(f"Column {column!r} has only one class ({cells[0]!r}); a classifier needs two.")
    if names and values <= set(names):
        return np.array([names.index(str(cell)) for cell in cells]), names
    numbered = classes == [str(i) for i in range(len(classes))]
    if names:
        if not numbered:
            unknown = sorted(values - set(names))
            raise InputError(f"data.class_names lacks the label {unknown[0]!r} of column {column!r}.")
        _check_names(names, len(classes))
    elif numbered and (absent := sorted(set(range(len(classes))) - {int(float(value)) for value in values})):
        listing = ", ".join(f'"{value}"' for value in sorted(values, key=float))
        raise InputError(
            f"Column {column!r} has numbers but no {absent[0]}; number classes from 0 without gaps. If the "
            f"numbers are names, set data.class_names = [{listing}]."
        )
    return cohort.labels(column), names or tuple(classes)


def _check_names(names: tuple[str, ...], classes: int) -> None:
    if len(names) != classes:
        raise InputError(f"data.class_names must have {classes} names. Got {len(names)} instead.")


def _finite(values: Floats, column: str) -> Floats:
    if not np.isfinite(values).all():
        raise InputError(f"The column {column!r} must hold finite numbers.")
    return values


STRATUM = "_stratum"


@dataclass(frozen=True)
class Fold:
    """Rows of the training set by split."""

    name: str
    train: Rows
    validation: Rows
    test: Rows


def make_folds(training_set: TrainingSet, config: Config) -> list[Fold]:
    """Make and check the folds of a run: no case in two splits, two classes if the monitor needs them."""
    data = config.data
    by_split = data.folds is None and data.fold_column is None
    folds = [_by_split(training_set, data)] if by_split else _by_fold(training_set, data, config.train.seed)
    targets = training_set.targets
    for fold in folds:
        prefix = f"{fold.name}: " if fold.name else ""
        if not len(fold.train) or not len(fold.validation):
            raise InputError(f"{prefix}the training or the validation set is empty; use fewer folds.")
        classes = np.unique(targets.values[fold.validation, 0])
        if TASKS[targets.task].truth == "class" and config.monitor == "auc" and len(classes) < 2:
            name = (targets.class_names or ())[int(classes[0])]
            raise InputError(
                f"{prefix}the validation set has only the class {name!r}, so it has no AUC; "
                "split again with both classes, or set train.monitor to 'loss'."
            )
        if config.monitor == "c_index" and not targets.values[fold.validation, 1].any():
            raise InputError(
                f"{prefix}the validation set has no event, so it has no C-index; split again or monitor the "
                "loss."
            )
    return folds


def parts_of(folds: list[Fold], n: int) -> list[str]:
    """The split of each bag: train, val or test; with several folds, the fold that tests it."""
    parts = [""] * n
    named = (("train", "train"), ("validation", "val"), ("test", "test"))
    for part, word in named if len(folds) == 1 else (("test", ""),):
        for fold in folds:
            for row in getattr(fold, part).tolist():
                parts[row] = word or fold.name
    return parts


def _by_split(training_set: TrainingSet, data: Data) -> Fold:
    cells = training_set.cohort.column(data.split)
    training_set.cohort.check_split(data.split)
    splits = {cell for cell in cells if cell is not None}
    parts = {}
    for part, names in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        parts[part] = _rows(cell in names for cell in cells)
        if not len(parts[part]) and part != "test":
            error = unknown_name("split", names[0] if names else part, splits)
            raise InputError(f"Column {data.split!r} has no bag for data.{part}. {error}")
    return Fold("", **parts)


def _by_fold(training_set: TrainingSet, data: Data, seed: int) -> list[Fold]:
    cohort = training_set.cohort.with_column(STRATUM, training_set.targets.strata)
    if data.folds is not None:
        sites = data.site if data.site_splits == "preserved" else None
        cohort = split_folds(
            cohort, data.folds, stratify=STRATUM, seed=data.fold_seed, column="fold", sites=sites
        )
        cells = cohort.column("fold")
    else:
        cells = cohort.column(str(data.fold_column))
        cohort.check_split(str(data.fold_column))
    names = sorted({cell for cell in cells if cell is not None}, key=lambda cell: (len(cell), cell))
    if len(names) < 2:
        raise InputError(
            f"Column {data.fold_column!r} has {len(names)} folds; cross-validation needs two or more."
        )
    return [_fold(training_set, cells, names, k, data, seed) for k in range(len(names))]


def _fold(
    training_set: TrainingSet, cells: tuple[str | None, ...], names: list[str], k: int, data: Data, seed: int
) -> Fold:
    test = _rows(cell == names[k] for cell in cells)
    others = _rows(cell is not None and cell != names[k] for cell in cells)
    if data.scheme == "shared":
        return Fold(f"fold{k}", others, test, test)
    if data.scheme == "next":
        if len(names) < 3:
            raise InputError("data.scheme 'next' needs three folds or more; use 'inner'.")
        validation = _rows(cell == names[(k + 1) % len(names)] for cell in cells)
    elif data.site_splits == "preserved":
        cohort = training_set.cohort.with_column(STRATUM, training_set.targets.strata).take(others.tolist())
        shares = {"train": 1 - data.validation_share, "val": data.validation_share}
        split = split_fractions(cohort, shares, stratify=STRATUM, seed=seed, column="part", sites=data.site)
        validation = others[np.array([cell == "val" for cell in split.column("part")])]
    else:
        validation = _hold_out(training_set, others, data.validation_share, seed=(seed, k))
    return Fold(f"fold{k}", np.setdiff1d(others, validation), validation, test)


def _hold_out(training_set: TrainingSet, rows: Rows, share: float, *, seed: tuple[int, int]) -> Rows:
    """Select a share of the cases of each stratum, at least one."""
    rng = np.random.default_rng(seed)
    strata: dict[str, set[str]] = {}
    cases, kinds = training_set.cohort.cases, training_set.targets.strata
    for i in rows.tolist():
        strata.setdefault(kinds[i], set()).add(cases[i])
    selected: set[str] = set()
    for _, members in sorted(strata.items()):
        free = sorted(members - selected)
        n = max(1, round(share * len(free))) if len(free) > 1 else 0
        selected.update(str(case) for case in rng.permutation(free)[:n])
    return np.array([i for i in rows.tolist() if cases[i] in selected], dtype=np.int64)


def _rows(mask: Iterable[bool]) -> Rows:
    return np.flatnonzero(np.fromiter(mask, dtype=bool)).astype(np.int64)
