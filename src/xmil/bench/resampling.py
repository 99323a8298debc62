"""Intervals over bags and repetitions; all rows of a column share their draws, so differences are paired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xmil.bench.folder import Unit
from xmil.core.interval import Interval

DRAWS = 1000
LEVEL = 0.95
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Draws:
    """Means of rows and measures: over everything, (m, k), by repetition, (r, m, k), and redrawn, (D, m, k).

    A draw takes repetitions with replacement and, within each, bags with replacement.
    """

    methods: tuple[str, ...]
    measures: tuple[str, ...]
    means: Floats
    by_repetition: Floats
    redrawn: Floats

    def interval(self, method: str, measure: str) -> Interval:
        """A row's mean with its percentile interval."""
        i, k = self.methods.index(method), self.measures.index(measure)
        return _interval(self.means[i, k], self.redrawn[:, i, k])

    def difference(self, first: str, second: str, measure: str) -> Interval:
        """First less second, drawn in pairs."""
        i, j = self.methods.index(first), self.methods.index(second)
        k = self.measures.index(measure)
        return _interval(self.means[i, k] - self.means[j, k], self.redrawn[:, i, k] - self.redrawn[:, j, k])

    def mean(self, method: str, measure: str) -> float:
        """A row's mean."""
        return float(self.means[self.methods.index(method), self.measures.index(measure)])


def draws_of(unit: Unit, repetitions: Sequence[int], *, draws: int = DRAWS, seed: int = 0) -> Draws:
    """The draws of a column's repetitions; a row that lacks one of them has the others.

    The mean of a row is that of its repetitions' means over bags; bags without a value are left out.
    """
    rng = np.random.default_rng(seed)
    methods = tuple(unit.methods)
    by_repetition, redrawn = [], []
    for r in repetitions:
        grid = _grid(unit, r, methods)  # (bags, m * k)
        weights = rng.multinomial(len(grid), np.full(len(grid), 1 / len(grid)), size=draws)
        by_repetition.append(_means(np.ones((1, len(grid))), grid)[0])
        redrawn.append(_means(weights.astype(np.float64), grid))
    picks = rng.integers(len(repetitions), size=(draws, len(repetitions)))
    shape = (len(methods), len(unit.measures))
    chosen = np.stack(redrawn)[picks, np.arange(draws)[:, None]]  # (draws, r, m * k)
    single = np.stack(by_repetition)
    return Draws(
        methods,
        unit.measures,
        _nanmean(single, 0).reshape(shape),
        single.reshape(len(single), *shape),
        _nanmean(chosen, 1).reshape(draws, *shape),
    )


def _grid(unit: Unit, repetition: int, methods: tuple[str, ...]) -> Floats:
    some = next(v for (r, _), v in unit.values.items() if r == repetition)
    empty = np.full_like(some, np.nan)
    return np.concatenate([unit.values.get((repetition, m), empty) for m in methods], axis=1)


def _means(weights: Floats, grid: Floats) -> Floats:
    known = np.isfinite(grid)
    total = weights @ known.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(total > 0, weights @ np.where(known, grid, 0.0) / total, np.nan))


def _nanmean(values: Floats, axis: int) -> Floats:
    known = np.isfinite(values)
    n = known.sum(axis=axis)
    return np.where(n > 0, np.where(known, values, 0.0).sum(axis=axis) / np.maximum(n, 1), np.nan)


def _interval(estimate: float, drawn: Floats) -> Interval:
    known = drawn[np.isfinite(drawn)]
    if not len(known):
        return Interval(float(estimate), float("nan"), float("nan"))
    low, high = np.quantile(known, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Interval(float(estimate), float(low), float(high))
