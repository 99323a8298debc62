"""The bags of a training run: cohort rows joined with their feature files, with one target each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from xmil.core.errors import InputError, XmilError
from xmil.core.identity import identity
from xmil.core.task import TASKS
from xmil.data import Case, Cohort, group_cases, join_features, read_cohort
from xmil.data.bags import open_bag
from xmil.data.dataset import BagDataset
from xmil.data.feature_facts import differing, feature_facts
from xmil.data.siblings import slide_name
from xmil.training.config import Config, Data
from xmil.training.targets import Targets, read_targets, target_columns

logger = logging.getLogger(__name__)
SHOWN = 5
FILES = 20  # feature files that one line names


@dataclass(frozen=True)
class TrainingSet:
    """Bags by row: the cohort (one row per bag), the files of each, targets, and the features' encoder."""

    cohort: Cohort
    files: tuple[tuple[Path, ...], ...]
    targets: Targets
    bags: BagDataset
    encoder: str | None
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] | None = None  # how the features were made, beside their encoder's name

    def __len__(self) -> int:
        return len(self.files)

    @property
    def names(self) -> list[str]:
        """Names of the bags: slides, or cases."""
        return self.cohort.slides

    @property
    def digest(self) -> str:
        """What tells two sets apart: names, files, targets."""
        lines = [
            f"{name}|{'|'.join(path.name for path in files)}|{target.tolist()}"
            for name, files, target in zip(self.names, self.files, self.targets.values, strict=True)
        ]
        return sha256("\n".join(lines).encode()).hexdigest()[:16]


def read_training_set(config: Config, *, preload: int = 0) -> TrainingSet:
    """The bags of a config, checked before anything is trained."""
    data = config.data
    cohort, notes = _joined(data)
    cohort, more = _labelled(cohort, config)
    found = _readable_set(cohort, config)
    found = replace(found, notes=(*notes, *more, *found.notes))
    found = _without_large(found, data.exclude_above)
    if preload:
        found = replace(found, bags=found.bags.preloading(preload))
    return found


def _readable_set(cohort: Cohort, config: Config) -> TrainingSet:
    """The bags of a cohort; feature files that cannot be used are refused together, or skipped."""
    found, fault = None, None
    try:
        found = _training_set(cohort, config)
    except XmilError as error:
        fault = error
    if found is not None and not _has_empty(found.bags):
        return found
    broken = _broken(cohort, _options(config.data))
    if not broken and fault is not None:
        raise fault
    kept = cohort.take(i for i, path in enumerate(cohort.column("path")) if str(path) not in broken)
    if config.data.missing == "refuse" or not len(kept):
        told = "; ".join([reason.rstrip(".") for reason in broken.values()][:FILES])
        told += f"; and {len(broken) - FILES} more" if len(broken) > FILES else ""
        raise InputError(
            f"{config.data.cohort}: the feature files of {len(broken)} of {len(cohort)} slides cannot be "
            f"used: {told}. Repair them, or set data.missing to 'skip'."
        )
    note = _said("feature files cannot be used and are left out", [Path(path).name for path in broken])
    found = _training_set(kept, config)
    return replace(found, notes=(note, *found.notes))


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


def _has_empty(bags: BagDataset) -> bool:
    parts = [part for header in bags.headers for part in getattr(header, "parts", (header,))]
    return not all(len(part) and part.dim for part in parts)


def _options(data: Data) -> dict[str, Any]:
    """How feature files are read: slide embeddings only where they are asked for."""
    return {"format": "embedding"} if data.source == "embeddings" else {}


def _broken(cohort: Cohort, options: dict[str, Any]) -> dict[str, str]:
    """The feature files that cannot be opened or hold no instances, with the reason."""
    broken = {}
    for path in cohort.column("path"):
        try:
            header = open_bag(str(path), **options)
        except XmilError as error:
            broken[str(path)] = str(error)
        else:
            if not len(header) or not header.dim:
                broken[str(path)] = f"{path}: holds no instances"
    return broken


def _joined(data: Data) -> tuple[Cohort, list[str]]:
    """The slides that have features in one of the folders."""
    cohort = read_cohort(data.cohort, metadata=data.metadata or None)
    folders = [data.features] if isinstance(data.features, str) else data.features
    paths: dict[str, object] = {}
    left = cohort
    links: list[str] = []
    for folder in folders:
        part, report = join_features(left, folder, follow_links=data.follow_links)
        links += report.not_followed
        paths.update(zip(part.slides, part.column("path"), strict=True))
        missing = set(report.without_features)
        left = left.take(i for i, name in enumerate(left.slides) if name in missing)
        if not missing:
            break
    kept = cohort.take(i for i, name in enumerate(cohort.slides) if name in paths)
    notes = [_said("slides have no features and are left out", left.slides)] if len(left) else []
    notes += [_said("links were not followed", links)] if links else []
    return kept.with_column("path", [paths[name] for name in kept.slides]), notes


def check_columns(config: Config) -> None:
    """Refuse a cohort without the columns that a config names; one that is not here is not checked."""
    data = config.data
    if not Path(data.cohort).exists():
        return
    cohort = read_cohort(data.cohort, metadata=data.metadata or None)
    side = [data.fold_column] if data.fold_column else [data.split] if data.folds is None else []
    for name in [*target_columns(config), *side]:
        cohort.column(name)


def _labelled(cohort: Cohort, config: Config) -> tuple[Cohort, list[str]]:
    """The slides that have a target; missing ones are refused unless they are to be skipped."""
    columns = target_columns(config)
    cells = [cohort.column(name) for name in columns]
    known = [i for i in range(len(cohort)) if all(column[i] is not None for column in cells)]
    missing = [name for i, name in enumerate(cohort.slides) if i not in set(known)]
    if not missing:
        return cohort, []
    told = _said(f"slides have no {' and '.join(columns)}", missing)
    if config.data.missing == "refuse" or not known:
        raise InputError(f"{config.data.cohort}: {told}; fill them in, or set data.missing to 'skip'.")
    return cohort.take(known), [f"{told} and are left out"]


def _bags(cohort: Cohort, config: Config) -> tuple[Cohort, tuple[tuple[Path, ...], ...]]:
    """One row for each bag with the files it is made of; a case's first slide stands for its row."""
    cases = group_cases(cohort, config.data.by)
    files = tuple(case.paths for case in cases)
    if config.data.by == "slide":
        return cohort, files
    for name in [*target_columns(config), config.data.split, config.data.fold_column]:
        _check_agreement(cohort, cases, str(name))
    names = [case.name for case in cases]
    firsts = cohort.take(case.rows[0] for case in cases)
    return firsts.with_column("case_id", names).with_column("slide_id", names), files


def _check_agreement(cohort: Cohort, cases: Sequence[Case], column: str) -> None:
    """A case is one bag, so its slides must agree in what is asked of the bag."""
    cells = cohort.columns.get(column, (None,) * len(cohort))
    for case in cases:
        if len({cells[i] for i in case.rows}) > 1:
            raise InputError(
                f"The slides of case {case.name!r} differ in {column!r}; by case they must agree."
            )


def _without_large(found: TrainingSet, limit: int | None) -> TrainingSet:
    """The bags of at most `limit` instances."""
    sizes = [len(header) for header in found.bags.headers]
    if limit is None or max(sizes) <= limit:
        return found
    keep = [i for i, n in enumerate(sizes) if n <= limit]
    if not keep:
        raise InputError(f"Every bag has more than {limit} instances (data.exclude_above); raise the limit.")
    gone = [name for name, n in zip(found.names, sizes, strict=True) if n > limit]
    files = tuple(found.files[i] for i in keep)
    places = [paths if len(paths) > 1 else paths[0] for paths in files]
    return replace(
        found,
        cohort=found.cohort.take(keep),
        files=files,
        targets=found.targets.take(keep),
        bags=replace(found.bags, paths=places, targets=[0] * len(keep)),
        notes=(*found.notes, _said(f"bags have more than {limit} instances and are left out", gone)),
    )


def _facts(bags: BagDataset) -> tuple[dict[str, Any], list[str]]:
    """How all features were made, and what differs among them; other encoders or weights are refused."""
    parts: list[Any] = [part for header in bags.headers for part in getattr(header, "parts", (header,))]
    shared: dict[str, Any] = {}
    first: dict[str, Path] = {}
    mixed: dict[str, set[str]] = {}
    for part in parts:
        facts = feature_facts(part)
        for name in differing(shared, facts):
            if name in ("encoder", "weights"):
                one, two, what = shared[name], facts[name], name.replace("encoder", "")
                raise InputError(
                    f"{part.path}: its features come from {what + ' ' if what else ''}{two!r} but those of "
                    f"{first[name]} from {one!r}; use one encoder."
                )
            mixed.setdefault(name, {str(shared[name])}).add(str(facts[name]))
        for name, value in facts.items():
            shared.setdefault(name, value)
            first.setdefault(name, part.path)
    notes = [f"the features differ in {name}: {', '.join(sorted(values))}" for name, values in mixed.items()]
    return {name: value for name, value in shared.items() if name not in mixed}, notes


def bag_slides(found: TrainingSet) -> list[tuple[str, ...]]:
    """The slides that each bag is made of."""
    return [
        tuple(name if len(files) == 1 and name != case else slide_name(path) for path in files)
        for name, case, files in zip(found.names, found.cohort.cases, found.files, strict=True)
    ]


def slide_rows(found: TrainingSet, parts: Sequence[str], *, full: bool = False) -> list[dict[str, str]]:
    """The slides of a training set as a cohort table: the part that each plays, and what its file holds."""
    rows = []
    for slides, case, files, part, *cells in zip(
        bag_slides(found), found.cohort.cases, found.files, parts, *_target_cells(found), strict=True
    ):
        for slide, path in zip(slides, files, strict=True):
            rows.append(
                {
                    "slide_id": slide,
                    "case_id": case,
                    **dict(cells),
                    "split": part,
                    "path": str(path.resolve()),
                    "digest": identity(path, full=full),
                }
            )
    return rows


def _target_cells(found: TrainingSet) -> list[list[tuple[str, str]]]:
    """The target columns as they stand in the table; classes by their names."""
    targets = found.targets
    truth = TASKS[targets.task].truth
    if truth == "class":
        names = targets.class_names or ()
        return [[("label", names[int(value)]) for value in targets.values[:, 0]]]
    columns = ("time", "event") if truth == "time" else tuple(targets.class_names or ("value",))
    return [[(name, f"{value:g}") for value in targets.values[:, i]] for i, name in enumerate(columns)]


def _said(what: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return f"{len(names)} {what} ({shown})"
