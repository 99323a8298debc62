"""Measures of predictions under many weightings at once, as a bootstrap needs them.

`weights` (draws, n) count how often each prediction was drawn; each function gives (draws,), nan where a draw
does not determine it. With a row of ones they are the measures as scikit-learn defines them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
BLOCK = 1 << 22  # pairs that are compared at once


def auroc(weights: Floats, positive: Bools, scores: Floats) -> Floats:
    """The chance that a positive has a higher score than a negative; ties count half.

    >>> auroc(np.ones((1, 3)), np.array([True, False, True]), np.array([0.9, 0.5, 0.5]))
    array([0.75])
    """
    hits, misses = _by_score(weights, positive, scores)
    below = np.cumsum(misses, axis=1) - 0.5 * misses
    return _ratio((hits * below).sum(axis=1), hits.sum(axis=1) * misses.sum(axis=1))


def auprc(weights: Floats, positive: Bools, scores: Floats) -> Floats:
    """Average precision: the mean over positives of the precision at their score.

    >>> auprc(np.ones((1, 3)), np.array([True, False, True]), np.array([0.9, 0.5, 0.1])).round(4)
    array([0.8333])
    """
    hits, misses = (part[:, ::-1] for part in _by_score(weights, positive, scores))
    found = np.cumsum(hits, axis=1)
    precision = _ratio(found, found + np.cumsum(misses, axis=1))
    return _ratio(np.nansum(hits * precision, axis=1), hits.sum(axis=1))


def mean(weights: Floats, values: Floats) -> Floats:
    """The weighted mean of values (n,); nan for no weight."""
    return _ratio(weights @ values, weights.sum(axis=1))


def median(weights: Floats, values: Floats) -> Floats:
    """The weighted median of values (n,), halfway between two where the weights balance; nan for no weight.

    >>> median(np.array([[1.0, 1, 0], [1, 1, 1], [0, 0, 0]]), np.array([4.0, 1.0, 7.0]))
    array([2.5, 4. , nan])
    """
    order = np.argsort(values, kind="stable")
    running = np.cumsum(weights[:, order], axis=1)
    half = 0.5 * running[:, -1:]
    lower, upper = (running >= half) & (running > 0), running > half
    middle = 0.5 * (values[order][lower.argmax(axis=1)] + values[order][upper.argmax(axis=1)])
    return np.where(half[:, 0] > 0, middle, np.nan)


def balanced_accuracy(weights: Floats, labels: npt.NDArray[np.int64], correct: Bools) -> Floats:
    """The mean over the classes that were drawn of the share of their slides that are right."""
    classes = np.unique(labels)
    return nan_mean([mean(weights * (labels == c), correct.astype(float)) for c in classes])


def calibration_error(weights: Floats, hits: Bools, chances: Floats, *, bins: int = 10) -> Floats:
    """Expected calibration error: the mean distance of chance and frequency over equal bins of the chance.

    Naeini et al. 2015; Guo et al. 2017, arXiv:1706.04599.
    """
    place = np.minimum((chances * bins).astype(int), bins - 1)
    gaps = [np.abs(weights @ np.where(place == b, hits - chances, 0.0)) for b in range(bins)]
    return _ratio(np.sum(gaps, axis=0), weights.sum(axis=1))


def r_squared(weights: Floats, truth: Floats, values: Floats) -> Floats:
    """The share of the truth's variance that the values explain; negative below the mean's own."""
    centred = truth - truth.mean()
    variance = mean(weights, centred**2) - mean(weights, centred) ** 2
    left = _ratio(mean(weights, (truth - values) ** 2), np.where(variance > 1e-15, variance, 0.0))
    return np.asarray(1.0 - left)


def correlation(weights: Floats, first: Floats, second: Floats) -> Floats:
    """Pearson's correlation; `first` and `second` are (n,) or (draws, n)."""
    total = weights.sum(axis=1, keepdims=True)
    a = first - _ratio((weights * first).sum(axis=1, keepdims=True), total)
    b = second - _ratio((weights * second).sum(axis=1, keepdims=True), total)
    spread = np.sqrt((weights * a**2).sum(axis=1) * (weights * b**2).sum(axis=1))
    return _ratio((weights * a * b).sum(axis=1), np.where(spread > 1e-15, spread, 0.0))


def rank_correlation(weights: Floats, first: Floats, second: Floats) -> Floats:
    """Spearman's correlation: Pearson's of the ranks among the drawn."""
    return correlation(weights, _ranks(weights, first), _ranks(weights, second))


def c_index(weights: Floats, times: Floats, events: Bools, risks: Floats) -> Floats:
    """Harrell's C: of the pairs whose order is known, the share in which the higher risk goes first.

    A pair is known where the one with the shorter time had the event; of equal times where one had the event
    and the other was censored, which is later. Equal risks count half.

    >>> c_index(np.ones((1, 3)), np.array([1.0, 2, 3]), np.array([True, True, False]), np.array([3.0, 1, 2]))
    array([0.66666667])
    """
    right, known = np.zeros(len(weights)), np.zeros(len(weights))
    step = max(1, BLOCK // max(1, len(times)))
    for rows in (slice(i, i + step) for i in range(0, len(times), step)):
        pair = known_pairs(times, events, rows)  # (r, n)
        ahead = risks[rows, None] - risks[None]
        credit = np.where(pair, np.where(ahead > 0, 1.0, np.where(ahead == 0, 0.5, 0.0)), 0.0)
        right += ((weights @ credit.T) * weights[:, rows]).sum(axis=1)
        known += ((weights @ pair.astype(float).T) * weights[:, rows]).sum(axis=1)
    return _ratio(right, known)


def known_pairs(times: Floats, events: Bools, rows: slice) -> Bools:
    """Whether row i is known to have its event before column j."""
    first = times[rows, None] < times[None]
    tied = (times[rows, None] == times[None]) & ~events[None]
    return np.asarray(events[rows, None] & (first | tied))


def nan_mean(columns: list[Floats]) -> Floats:
    """The mean over columns of those that are determined; nan where none is."""
    stacked = np.stack(columns)
    known = np.isfinite(stacked)
    return _ratio(np.where(known, stacked, 0.0).sum(axis=0), known.sum(axis=0))


def _by_score(weights: Floats, positive: Bools, scores: Floats) -> tuple[Floats, Floats]:
    """Weights (draws, u) of positives and of negatives at each of the u different scores, ascending."""
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.diff(scores[order], prepend=-np.inf) > 0)
    drawn, sign = weights[:, order], positive[order]
    return np.add.reduceat(drawn * sign, starts, axis=1), np.add.reduceat(drawn * ~sign, starts, axis=1)


def _ranks(weights: Floats, values: Floats) -> Floats:
    """Ranks (draws, n) among the drawn; equal values share the middle of theirs."""
    found, group = np.unique(values, return_inverse=True)
    starts = np.searchsorted(np.sort(values), found)
    drawn = np.add.reduceat(weights[:, np.argsort(values, kind="stable")], starts, axis=1)
    return np.asarray((np.cumsum(drawn, axis=1) - 0.5 * drawn)[:, group])


def _ratio(top: Floats, bottom: npt.NDArray[np.generic]) -> Floats:
    """top / bottom, nan where the bottom is 0."""
    low = np.asarray(bottom, dtype=np.float64)
    out: Floats = np.full(np.broadcast(top, low).shape, np.nan)
    return np.divide(top, low, out=out, where=low != 0)
