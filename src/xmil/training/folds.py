"""Who trains, who chooses the best epoch and who is held out: one fold, or one for each test fold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError, unknown_name
from xmil.core.task import TASKS
from xmil.data import split_folds, split_fractions
from xmil.training.config import Config, Data
from xmil.training.targets import Targets
from xmil.training.training_set import TrainingSet

Rows = npt.NDArray[np.int64]
STRATUM = "_stratum"


@dataclass(frozen=True)
class Fold:
    """Rows of the training set by their part."""

    name: str
    train: Rows
    validation: Rows
    test: Rows


def make_folds(found: TrainingSet, config: Config) -> list[Fold]:
    """The folds of a run, each checked: no case on two sides, two classes where the monitor needs them."""
    data = config.data
    if data.folds is None and data.fold_column is None:
        folds = [_by_split(found, data)]
    else:
        folds = _by_fold(found, data, config.train.seed)
    for fold in folds:
        _check(fold, found.targets, config)
    return folds


def parts_of(folds: list[Fold], n: int) -> list[str]:
    """What each bag is: train, val or test; with several folds the one that tests it."""
    parts = [""] * n
    named = (("train", "train"), ("validation", "val"), ("test", "test"))
    for part, word in named if len(folds) == 1 else (("test", ""),):
        for fold in folds:
            for row in getattr(fold, part).tolist():
                parts[row] = word or fold.name
    return parts


def _by_split(found: TrainingSet, data: Data) -> Fold:
    cells = found.cohort.column(data.split)
    found.cohort.check_split(data.split)
    known = {cell for cell in cells if cell is not None}
    parts = {}
    for part, names in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        parts[part] = _rows([cell in names for cell in cells])
        if not len(parts[part]) and part != "test":
            error = unknown_name("split", names[0] if names else part, known)
            raise InputError(f"Column {data.split!r} has no bag for data.{part}. {error}")
    return Fold("", **parts)


def _by_fold(found: TrainingSet, data: Data, seed: int) -> list[Fold]:
    cohort = found.cohort.with_column(STRATUM, found.targets.strata)
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
    return [_fold(found, cells, names, k, data, seed) for k in range(len(names))]


def _fold(
    found: TrainingSet, cells: tuple[str | None, ...], names: list[str], k: int, data: Data, seed: int
) -> Fold:
    test = _rows([cell == names[k] for cell in cells])
    rest = _rows([cell is not None and cell != names[k] for cell in cells])
    if data.scheme == "shared":
        return Fold(f"fold{k}", rest, test, test)
    if data.scheme == "next":
        if len(names) < 3:
            raise InputError("data.scheme 'next' needs three folds or more; use 'inner'.")
        after = names[(k + 1) % len(names)]
        validation = np.array([i for i in rest if cells[i] == after], dtype=np.int64)
    elif data.site_splits == "preserved":
        validation = _held_sites(found, rest, data, seed=seed)
    else:
        validation = _held_out(found, rest, data.validation_share, seed=(seed, k))
    return Fold(f"fold{k}", np.setdiff1d(rest, validation), validation, test)


def _held_sites(found: TrainingSet, rows: Rows, data: Data, *, seed: int) -> Rows:
    """Whole sites, about a share of the cases."""
    cohort = found.cohort.with_column(STRATUM, found.targets.strata).take(rows.tolist())
    shares = {"train": 1 - data.validation_share, "val": data.validation_share}
    split = split_fractions(cohort, shares, stratify=STRATUM, seed=seed, column="part", sites=data.site)
    held: Rows = rows[np.array([cell == "val" for cell in split.column("part")])]
    return held


def _held_out(found: TrainingSet, rows: Rows, share: float, *, seed: tuple[int, int]) -> Rows:
    """A share of the cases of each stratum, one at least."""
    rng = np.random.default_rng(seed)
    strata: dict[str, dict[str, list[int]]] = {}
    kinds = found.targets.strata
    for i in rows.tolist():
        strata.setdefault(kinds[i], {}).setdefault(found.cohort.cases[i], []).append(i)
    taken: set[str] = set()
    for _, cases in sorted(strata.items()):
        free = [case for case in sorted(cases) if case not in taken]
        n = max(1, round(share * len(free))) if len(free) > 1 else 0
        taken.update(str(case) for case in rng.permutation(free)[:n])
    return np.array([i for i in rows.tolist() if found.cohort.cases[i] in taken], dtype=np.int64)


def _check(fold: Fold, targets: Targets, config: Config) -> None:
    where = f"{fold.name}: " if fold.name else ""
    if not len(fold.train) or not len(fold.validation):
        raise InputError(f"{where}the training or the validation set is empty; use fewer folds.")
    if TASKS[targets.task].truth == "class" and config.monitor == "auc":
        classes = np.unique(targets.values[fold.validation, 0])
        if len(classes) < 2:
            name = (targets.class_names or ())[int(classes[0])]
            raise InputError(
                f"{where}the validation set holds the class {name!r} only, so it has no AUC; "
                "split again with both classes, or set train.monitor to 'loss'."
            )
    if config.monitor == "c_index" and not targets.values[fold.validation, 1].any():
        raise InputError(
            f"{where}the validation set has no event, so it has no C-index; split again or monitor the loss."
        )


def _rows(mask: list[bool]) -> Rows:
    return np.flatnonzero(np.array(mask, dtype=bool)).astype(np.int64)
