"""Colon nuclei: images of tissue as bags, labelled nuclei as instances (Sirinukunwattana et al. 2016)."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.bench.colour_statistics import STATISTICS, embedder
from xmil.bench.problems import LabelledBag, ListedProblem
from xmil.core.bag import FloatArray
from xmil.core.errors import FileError

CELLS = ("epithelial", "inflammatory", "fibroblast", "others")
EPITHELIAL, INFLAMMATORY = 0, 1
PATCH, FOLDS = 48, 5  # pixels around a nucleus; parts of the images
TASKS = {
    "colon_epithelial": ("Epithelial nuclei", "an image is positive if it holds an epithelial nucleus"),
    "colon_balance": ("More epithelial", "an image is positive if epithelial outnumber inflammatory nuclei"),
}
Rows = npt.NDArray[np.int64]
Nuclei = dict[str, tuple[npt.NDArray[np.float64], Rows]]


def nuclei(folder: Path) -> Nuclei:
    """Image name to the nuclei's centres (n, 2) in pixels and cell types (n,)."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    with (folder / "nuclei.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["image"], []).append(
                (float(row["x"]), float(row["y"]), CELLS.index(row["cell"]))
            )
    tables = {name: np.array(rows) for name, rows in found.items()}
    return {name: (rows[:, :2], rows[:, 2].astype(np.int64)) for name, rows in tables.items()}


def folds(labels: npt.ArrayLike, *, seed: int, n_folds: int = FOLDS) -> list[Rows]:
    """Test rows of each fold, the labels spread evenly."""
    given = np.asarray(labels)
    rng = np.random.default_rng(seed)
    fold = np.empty(len(given), dtype=int)
    for label in np.unique(given):
        rows = rng.permutation(np.flatnonzero(given == label))
        fold[rows] = np.arange(len(rows)) % n_folds
    return [np.flatnonzero(fold == k) for k in range(n_folds)]


def colon_problems(
    folder: Path, *, features: Path | None = None, encoder: str = STATISTICS, runs: int = 10
) -> list[ListedProblem]:
    """Both tasks: run r tests on fold r mod 5 of the r div 5-th division of the images.

    `features` is a file that `benchmarks.colon.features` wrote; without it the nuclei are embedded here.
    """
    if features is None:
        names, parts, cells = _embedded(folder, encoder)
        about: dict[str, Any] = {"encoder": encoder}
    else:
        names, parts, cells = _read(features)
        about = {"encoder": features.name}
    return [
        ListedProblem(
            task,
            TASKS[task][0],
            TASKS[task][1],
            2,
            bags := _bags(task, names, parts, cells),
            [_split([bag.label for bag in bags], run) for run in range(runs)],
            about,
            scaled=features is None,
        )
        for task in TASKS
    ]


def label_of(task: str, cells: Rows) -> int:
    """colon_epithelial: holds an epithelial nucleus. colon_balance: more epithelial than inflammatory."""
    rivals = 0 if task == "colon_epithelial" else int((cells == INFLAMMATORY).sum())
    return int((cells == EPITHELIAL).sum() > rivals)


def evidence_of(task: str, cells: Rows) -> npt.NDArray[np.int8]:
    """What each nucleus says about both classes, (2, n)."""
    against = (cells == INFLAMMATORY) & (task == "colon_balance")
    support = (cells == EPITHELIAL).astype(np.int8) - against.astype(np.int8)
    return np.stack([-support, support]).astype(np.int8)


def _bags(
    task: str, names: Sequence[str], parts: Sequence[FloatArray], cells: Sequence[Rows]
) -> list[LabelledBag]:
    return [
        LabelledBag(name, x, label_of(task, kinds), evidence_of(task, kinds))
        for name, x, kinds in zip(names, parts, cells, strict=True)
    ]


def _split(labels: Sequence[int], run: int) -> dict[str, Rows]:
    test = folds(labels, seed=run // FOLDS)[run % FOLDS]
    rest = np.random.default_rng(run).permutation(np.setdiff1d(np.arange(len(labels)), test))
    held = max(1, len(rest) // FOLDS)
    return {"train": np.sort(rest[held:]), "validation": np.sort(rest[:held]), "test": test}


def _embedded(folder: Path, encoder: str) -> tuple[list[str], list[FloatArray], list[Rows]]:
    embed, tables = embedder(encoder), nuclei(folder)
    parts = [embed(cut(folder / f"{name}.jpg", centres)) for name, (centres, _) in tables.items()]
    return list(tables), parts, [cells for _, cells in tables.values()]


def cut(image: Path, centres: npt.NDArray[np.float64], *, patch: int = PATCH) -> npt.NDArray[np.uint8]:
    """Squares around the centres (n, patch, patch, 3), reflected at the border."""
    from PIL import Image

    with Image.open(image) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    half = patch // 2
    padded = np.pad(pixels, ((half, half), (half, half), (0, 0)), mode="reflect")
    limit = [pixels.shape[1] - 1, pixels.shape[0] - 1]
    corners = np.clip(np.rint(centres).astype(int), 0, limit)
    return np.stack([padded[y : y + patch, x : x + patch] for x, y in corners])


def _read(path: Path) -> tuple[list[str], list[FloatArray], list[Rows]]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            image, cells, names = arrays["image"], arrays["cells"], arrays["names"]
            features = arrays["features"].astype(np.float32)
    except (OSError, KeyError, ValueError) as error:
        raise FileError(f"{path}: not a file of colon features ({error}).") from None
    rows = [np.flatnonzero(image == i) for i in range(len(names))]
    return [str(name) for name in names], [features[r] for r in rows], [cells[r] for r in rows]
