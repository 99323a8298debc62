"""Survival: Harrell's C-index, a test of survival against a number, and Kaplan-Meier curves of two halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.evaluate.statistics import FEWEST, Bools, Floats, permutation_p, ratio, unit_codes, unit_means

PAIRS = 1 << 22  # pairs compared at once


@dataclass(frozen=True, eq=False)
class SurvivalCurve:
    """Kaplan-Meier's estimate for a group of `n` units with `slides` slides, from time 0 on.

    `low` and `high` are the 95 % band (log-log), nan for a group of too few units; `censored` has the times
    of censored units.
    """

    group: str
    n: int
    slides: int
    times: Floats
    share: Floats
    low: Floats
    high: Floats
    censored: Floats


def hazard_p(
    values: npt.ArrayLike, times: npt.ArrayLike, events: npt.ArrayLike, *, units: Sequence[Any], seed: int = 0
) -> float:
    """Test whether survival depends on a number: Cox's score test, by 5,000 permutations of units.

    The score is the sum over units of the number times (event - expected events); for a group's flag it is
    the log-rank test's. With few units the usual chi-square rejects too often, permutations do not. A unit
    counts once, as in `median_halves`. The p is nan without an event, or if all values are equal.

    >>> times, events = np.arange(1.0, 13.0), np.ones(12)
    >>> hazard_p(-times, times, events, units=range(12)) < 0.01
    True
    """
    x, t, e, _ = _by_unit(values, times, events, units)
    if not e.any() or np.ptp(x) == 0:
        return float("nan")
    order = np.argsort(t)
    at_risk = len(t) - np.searchsorted(t[order], t[order])
    hazard = np.cumsum(e[order] / at_risk)[np.searchsorted(t[order], t, side="right") - 1]  # Nelson-Aalen's
    surplus, scaled = e - hazard, (x - x.mean()) / x.std()
    rng = np.random.default_rng(seed)
    return permutation_p(lambda rows: np.abs(rows @ surplus), scaled, units=range(len(x)), rng=rng)


def median_halves(
    values: npt.ArrayLike, times: npt.ArrayLike, events: npt.ArrayLike, *, units: Sequence[Any], seed: int = 0
) -> tuple[list[SurvivalCurve], float]:
    """Compute curves of the units above the median value and of the others, and the p of their log-rank test.

    A unit counts once, with the mean of its values and the time and event of its first row. The p is that of
    `hazard_p`: nan if a half is empty, or no unit has an event.

    >>> upper, lower = median_halves([3, 1, 2, 0], [1, 2, 3, 4], [1, 0, 1, 1], units=range(4))[0]
    >>> upper.group, upper.times.tolist(), upper.share.tolist()
    ('above the median', [0.0, 1.0, 3.0], [1.0, 0.5, 0.0])
    """
    from scipy.stats import CensoredData

    x, t, e, slides = _by_unit(values, times, events, units)
    high, curves = x > np.median(x), []
    for group, rows in (("above the median", high), ("up to the median", ~high)):
        if rows.any():
            sample = CensoredData(uncensored=t[rows & e], right=t[rows & ~e])
            points = _kaplan_meier(sample, band=int(rows.sum()) >= FEWEST)
            lost = np.sort(t[rows & ~e])
            curves.append(SurvivalCurve(group, int(rows.sum()), int(slides[rows].sum()), *points, lost))
    return curves, hazard_p(high, t, e, units=range(len(x)), seed=seed)


def _by_unit(
    values: npt.ArrayLike, times: npt.ArrayLike, events: npt.ArrayLike, units: Sequence[Any]
) -> tuple[Floats, Floats, Bools, npt.NDArray[np.int64]]:
    """Return each unit's mean value, time and event of its first row, and number of rows."""
    codes = unit_codes(units, len(np.asarray(values)))
    _, first = np.unique(codes, return_index=True)
    t, e = np.asarray(times, dtype=np.float64)[first], np.asarray(events).astype(bool)[first]
    return unit_means(values, units), t, e, np.bincount(codes)


def _kaplan_meier(sample: Any, *, band: bool) -> tuple[Floats, Floats, Floats, Floats]:
    """Compute times, shares alive and their band; the band is the share where the formula is undefined."""
    import warnings

    from scipy.stats import ecdf

    alive = ecdf(sample).sf
    times, share = np.concatenate([[0.0], alive.quantiles]), np.concatenate([[1.0], alive.probabilities])
    if not band:
        return times, share, np.full(len(times), np.nan), np.full(len(times), np.nan)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # undefined at shares of 1 and 0
        ends = alive.confidence_interval(method="log-log")
    low, high = (np.concatenate([[1.0], end.probabilities]) for end in (ends.low, ends.high))
    return times, share, np.where(np.isnan(low), share, low), np.where(np.isnan(high), share, high)


def concordance(weights: Floats, times: Floats, events: Bools, risks: Floats) -> Floats:
    """Harrell's C: the share of pairs with a known order in which the higher risk has the event first.

    The order is known if the one with the shorter time had the event; with equal times, if one had the event
    and the other was censored, which counts as later. Equal risks count half.

    >>> times, events, risks = np.array([1.0, 2, 3]), np.array([True, True, False]), np.array([3.0, 1, 2])
    >>> concordance(np.ones((1, 3)), times, events, risks)
    array([0.66666667])
    """
    right, pairs = np.zeros(len(weights)), np.zeros(len(weights))
    step = max(1, PAIRS // max(1, len(times)))
    for rows in (slice(i, i + step) for i in range(0, len(times), step)):
        first = times[rows, None] < times[None]  # (r, n)
        tied = (times[rows, None] == times[None]) & ~events[None]
        pair = events[rows, None] & (first | tied)
        ahead = risks[rows, None] - risks[None]
        credit = np.where(pair, np.where(ahead > 0, 1.0, np.where(ahead == 0, 0.5, 0.0)), 0.0)
        right += ((weights @ credit.T) * weights[:, rows]).sum(axis=1)
        pairs += ((weights @ pair.astype(float).T) * weights[:, rows]).sum(axis=1)
    return ratio(right, pairs)
