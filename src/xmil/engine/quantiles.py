"""Quantiles over more scores than memory holds: weighted points, thinned out when they become many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

POINTS = 1_000  # of one slide
MOST = 2_000_000  # kept at a time
KEPT = 200_000  # after thinning out
Floats = npt.NDArray[np.float64]


@dataclass
class Quantiles:
    """Points with weights: each stands for as many scores as its weight says.

    >>> both = Quantiles.of(np.arange(5.0))
    >>> both.add(Quantiles.of(np.arange(5.0, 10.0)))
    >>> both.at([0.0, 0.5, 1.0]).tolist()
    [0.0, 4.5, 9.0]
    """

    points: list[npt.NDArray[np.float32]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of each point of an array

    @classmethod
    def of(cls, ordered: npt.NDArray[Any]) -> Quantiles:
        """All scores of a slide, given in order, or as many quantiles of them as are kept."""
        n = len(ordered)
        if n <= POINTS:
            return cls([ordered.astype(np.float32)], [1.0])
        kept = np.interp(_middles(POINTS) * n - 0.5, np.arange(n), ordered)
        return cls([kept.astype(np.float32)], [n / POINTS])

    def add(self, other: Quantiles) -> None:
        """Take in another slide's points."""
        self.points += other.points
        self.weights += other.weights
        if sum(map(len, self.points)) > MOST:
            total = sum(len(p) * w for p, w in zip(self.points, self.weights, strict=True))
            kept = self.at(_middles(KEPT).tolist())
            self.points, self.weights = [kept.astype(np.float32)], [total / KEPT]

    def at(self, levels: Sequence[float]) -> Floats:
        """The scores below which the given shares of all scores lie, linear between points."""
        points = np.concatenate(self.points).astype(np.float64)
        weights = np.repeat(self.weights, [len(p) for p in self.points])
        order = np.argsort(points, kind="stable")
        points, weights = points[order], weights[order]
        before = np.cumsum(weights) - 0.5 * weights
        span = before[-1] - before[0]
        places = (before - before[0]) / span if span > 0 else np.zeros_like(before)
        return np.asarray(np.interp(np.asarray(levels), places, points), dtype=np.float64)


def _middles(n: int) -> Floats:
    return np.asarray((np.arange(n) + 0.5) / n, dtype=np.float64)
