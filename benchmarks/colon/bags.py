"""Bags, labels and instance-level evidence of the two colon tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xmil.bench import CELLS
from xmil.bench import folds as spread_folds

TASKS = ("epithelial", "balance")
EPITHELIAL, INFLAMMATORY = CELLS.index("epithelial"), CELLS.index("inflammatory")


@dataclass(frozen=True)
class ColonBag:
    """One image: a feature vector and a cell type for each nucleus."""

    name: str
    features: Tensor  # (n, 512)
    cells: np.ndarray  # (n,)

    def label(self, task: str) -> int:
        """epithelial: holds an epithelial nucleus. balance: more epithelial than inflammatory ones."""
        n_epithelial = int((self.cells == EPITHELIAL).sum())
        rivals = 0 if task == "epithelial" else int((self.cells == INFLAMMATORY).sum())
        return int(n_epithelial > rivals)

    def evidence(self, task: str) -> np.ndarray:
        """What each nucleus says about class 1: for (1), against (-1), nothing (0)."""
        against = (self.cells == INFLAMMATORY) & (task == "balance")
        return (self.cells == EPITHELIAL).astype(int) - against.astype(int)


def read_bags(path: Path) -> list[ColonBag]:
    """The bags of a feature file that `benchmarks.colon.features` wrote."""
    with np.load(path) as arrays:
        image, cells, names = arrays["image"], arrays["cells"], arrays["names"]
        features = torch.from_numpy(arrays["features"].astype(np.float32))
    rows = [np.flatnonzero(image == i) for i in range(len(names))]
    return [ColonBag(str(name), features[r], cells[r]) for name, r in zip(names, rows, strict=True)]


def folds(bags: list[ColonBag], task: str, *, seed: int, n_folds: int = 5) -> list[np.ndarray]:
    """Test rows of each fold, the labels spread evenly."""
    return spread_folds([bag.label(task) for bag in bags], seed=seed, n_folds=n_folds)
