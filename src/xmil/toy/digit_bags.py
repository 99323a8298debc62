"""Bags of one repetition, or of many at once: rows of a table of instances, labels and codes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xmil.toy.digit_tasks import BAG_SIZE, DIGITS, Codes, DigitTask
from xmil.toy.instances import POOLS, Instances


@dataclass(frozen=True)
class BagSet:
    """Bags as rows of the instance table (..., b, n), their codes (..., b, n) and labels (..., b)."""

    rows: Codes
    codes: Codes
    labels: Codes

    def __len__(self) -> int:
        return int(self.labels.shape[-1])


@dataclass(frozen=True)
class Splits:
    """The bags of each split, with the number of bags."""

    train: BagSet
    validation: BagSet
    test: BagSet


def draw_bags(
    task: DigitTask, instances: Instances, pool: str, *, n_bags: int, n: int, seed: tuple[int, ...]
) -> BagSet:
    """Bags of a task from one pool of instances; the same seed gives the same bags."""
    rng = np.random.default_rng(seed)
    codes = task.draw(rng, n_bags, n)
    by_digit = instances.rows_of(pool)
    picks = rng.random(codes.shape)
    rows = np.zeros_like(codes)
    for digit, candidates in enumerate(by_digit):
        here = codes % DIGITS == digit
        rows[here] = candidates[(picks[here] * len(candidates)).astype(np.int64)]
    variant = codes // DIGITS  # rows of each variant follow those of the one before
    n_plain = len(instances.digits) // (1 + len(task.variants))
    return BagSet(rows + variant * n_plain, codes, task.label(codes).astype(np.int64))


def draw_splits(
    task: DigitTask,
    instances: Instances,
    sizes: tuple[int, int, int],
    *,
    seed: int,
    repetition: int,
    n: int = BAG_SIZE,
) -> Splits:
    """Training, validation and test bags of one repetition."""
    return Splits(
        *(
            draw_bags(task, instances, pool, n_bags=size, n=n, seed=(seed, repetition, i))
            for i, (pool, size) in enumerate(zip(POOLS, sizes, strict=True))
        )
    )


def stack_sets(sets: list[BagSet]) -> BagSet:
    """Bag sets of several repetitions as one, repetitions first."""
    return BagSet(*(np.stack([getattr(s, key) for s in sets]) for key in ("rows", "codes", "labels")))


@dataclass(frozen=True)
class Table:
    """The instances' features (m, d) on a device, from which bags are gathered by rows."""

    features: Tensor

    def bags(self, rows: Tensor) -> Tensor:
        """Features (..., n, d) of rows (..., n)."""
        return self.features.index_select(0, rows.flatten()).view(*rows.shape, -1)

    def to_rows(self, rows: Codes) -> Tensor:
        """Rows as a tensor on the table's device."""
        return torch.from_numpy(rows).to(self.features.device)
