"""Numbers per slide from a map of scores: how much supports the class, how it lies, and what it is worth.

TAPAS is the share of (tumour) patches whose masked mean over the models is above zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import IntArray
from xmil.core.errors import InputError
from xmil.core.interval import Interval

MICRON = 1e-3  # millimetres
STRONG = 0.7  # of the cohort's mean absolute score; docs/insight.md says how it was chosen
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


def map_biomarkers(
    scores: npt.ArrayLike,
    *,
    coords: IntArray | None = None,
    patch_size: int | None = None,
    mpp: float | None = None,
    region: npt.ArrayLike | None = None,
) -> dict[str, float]:
    """Shares, densities and spatial statistics of one slide's scores; nan where places are unknown.

    `region` (n,) marks patches to look at, such as the annotated tumour.

    >>> grid = np.array([[x * 10, y * 10] for y in range(3) for x in range(3)])
    >>> found = map_biomarkers([1, 1, -1, 1, -1, -1, -1, -1, 2.0], coords=grid, patch_size=10)
    >>> found["supporting_share"], found["hot_regions"], found["largest_region"]
    (0.4444444444444444, 2.0, 3.0)
    """
    s = np.asarray(scores, dtype=np.float64)
    if s.ndim != 1 or not np.isfinite(s).all():
        raise InputError(f"Biomarkers need finite scores (n,). Got shape {s.shape}.")
    inside = np.ones(len(s), dtype=bool) if region is None else np.asarray(region, dtype=bool)
    if inside.shape != s.shape:
        raise InputError(f"The region must mark each of the {len(s)} patches. Got shape {inside.shape}.")
    hot, cold = (s > 0) & inside, (s < 0) & inside
    n = int(inside.sum())
    positive, total = float(s[hot].sum()), float(np.abs(s[inside]).sum())
    nan = float("nan")
    told = {
        "patches": float(n),
        "supporting_share": hot.sum() / n if n else nan,
        "supporting_relevance": positive,
        "positive_relevance_share": positive / total if total else nan,
        "mean_score": float(s[inside].mean()) if n else nan,
        "mean_absolute": total / n if n else nan,
    }
    area = n * (patch_size * mpp * MICRON) ** 2 if patch_size and mpp else nan
    found = {key: float(value) for key, value in told.items()} | _spatial(hot, cold, coords, patch_size)
    density = float(hot.sum() / area) if coords is not None and area else nan
    return found | {"density_per_mm2": density}


def score_scale(scores: npt.ArrayLike) -> float:
    """What a score must exceed to be called strong: a part of the mean absolute score of all patches."""
    return float(STRONG * np.abs(np.asarray(scores, dtype=np.float64)).mean())


def strong_share(scores: npt.ArrayLike, scale: float, *, region: npt.ArrayLike | None = None) -> float:
    """The share of patches, of the `region` where one is given, that score above the cohort's scale.

    >>> strong_share([3.0, 0.1, -2.0, 0.2], scale=1.0)
    0.25
    """
    s = np.asarray(scores, dtype=np.float64)
    inside = s if region is None else s[np.asarray(region, dtype=bool)]
    return float((inside > scale).mean()) if len(inside) else float("nan")


def _spatial(hot: Bools, cold: Bools, coords: IntArray | None, patch_size: int | None) -> dict[str, float]:
    names = ("hot_regions", "largest_region", "border", "mixing")
    if coords is None or patch_size is None:
        return dict.fromkeys(names, float("nan"))
    pairs = _neighbours(np.rint(np.asarray(coords) / patch_size).astype(np.int64))
    one, other = pairs
    together = pairs[:, hot[one] & hot[other]]
    sizes = _region_sizes(hot, together)
    signed = (hot | cold)[one] & (hot | cold)[other]
    mixing = (hot[one] != hot[other])[signed].mean() if signed.any() else np.nan
    border = 4 * hot.sum() - 2 * together.shape[1]
    values = (len(sizes), sizes.max(initial=0), border, mixing)
    return dict(zip(names, map(float, values), strict=True))


def _neighbours(cells: IntArray) -> IntArray:
    """Pairs (2, m) of patches that share a side, each once."""
    if not len(cells):
        return np.zeros((2, 0), dtype=np.int64)
    x, y = (cells - cells.min(axis=0)).T
    width = int(y.max()) + 2
    keys = x * width + y
    places, rows = np.unique(keys, return_index=True)
    pairs = []
    for step in (width, 1):
        at = np.searchsorted(places, keys + step).clip(max=len(places) - 1)
        there = np.flatnonzero(places[at] == keys + step)
        pairs.append(np.stack([there, rows[at[there]]]))
    return np.concatenate(pairs, axis=1)


def _region_sizes(hot: Bools, together: IntArray) -> IntArray:
    """Sizes of the connected groups of supporting patches (four neighbours)."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ones = np.ones(together.shape[1], dtype=np.int8)
    graph = coo_array((ones, (together[0], together[1])), shape=(len(hot), len(hot)))
    _, groups = connected_components(graph.tocsr(), directed=False)
    sizes = np.bincount(groups[hot])
    return np.asarray(sizes[sizes > 0], dtype=np.int64)


@dataclass(frozen=True)
class SurvivalSplit:
    """Hazard ratio per standard deviation with its 95 % interval, and a log-rank test at the median."""

    hazard_ratio: Interval
    cox_p: float
    log_rank_p: float
    n: int
    events: int


@dataclass(frozen=True, eq=False)
class SurvivalCurve:
    """Kaplan-Meier's estimate for a group of slides, with its 95 % band."""

    group: str
    n: int
    times: Floats
    share: Floats
    low: Floats
    high: Floats


def survival_of(biomarker: npt.ArrayLike, times: npt.ArrayLike, events: npt.ArrayLike) -> SurvivalSplit:
    """Cox regression on one biomarker, and a log-rank test of its halves (lifelines)."""
    x, t, e = _outcomes(biomarker, times, events)
    import pandas as pd
    from lifelines import CoxPHFitter
    from lifelines.statistics import logrank_test

    scaled = (x - x.mean()) / x.std()
    high = x > np.median(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # how lifelines calls pandas
        fitted = _fitted(CoxPHFitter(), pd.DataFrame({"x": scaled, "t": t, "e": e}))
        row: Any = fitted.summary.loc["x"]
        parted = logrank_test(t[high], t[~high], e[high], e[~high])
    ratio = Interval(
        *(float(row[key]) for key in ("exp(coef)", "exp(coef) lower 95%", "exp(coef) upper 95%"))
    )
    return SurvivalSplit(ratio, float(row["p"]), float(parted.p_value), len(x), int(e.sum()))


def _fitted(model: Any, table: Any) -> Any:
    from lifelines.exceptions import ConvergenceError

    try:
        return model.fit(table, "t", "e")
    except (ConvergenceError, np.linalg.LinAlgError):
        raise InputError(
            "Cox regression did not converge: the biomarker parts the events completely."
        ) from None


def survival_curves(
    biomarker: npt.ArrayLike, times: npt.ArrayLike, events: npt.ArrayLike
) -> list[SurvivalCurve]:
    """Kaplan-Meier curves of the slides above the biomarker's median and of the others (lifelines)."""
    x, t, e = _outcomes(biomarker, times, events)
    from lifelines import KaplanMeierFitter

    high, found = x > np.median(x), []
    for group, rows in (("above the median", high), ("up to the median", ~high)):
        if not rows.any():
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            fitted = KaplanMeierFitter().fit(t[rows], e[rows])
        share = fitted.survival_function_.iloc[:, 0]
        band = fitted.confidence_interval_survival_function_.to_numpy(dtype=np.float64)
        points = (np.asarray(values, dtype=np.float64) for values in (share.index, share, *band.T))
        found.append(SurvivalCurve(group, int(rows.sum()), *points))
    return found


def _outcomes(
    biomarker: npt.ArrayLike, times: npt.ArrayLike, events: npt.ArrayLike
) -> tuple[Floats, Floats, Floats]:
    """Biomarker, times and events where all three are known; too few of them are refused."""
    if find_spec("lifelines") is None:
        raise InputError("Survival statistics need lifelines: pip install 'xmil[insight]'.")
    x, t, e = (np.asarray(values, dtype=np.float64) for values in (biomarker, times, events))
    known = np.isfinite(x) & np.isfinite(t) & np.isfinite(e)
    x, t, e = x[known], t[known], e[known]
    if len(x) < 10 or e.sum() < 3 or np.ptp(x) == 0:
        raise InputError(
            f"Survival needs ten slides, three events and a biomarker that varies; here are {len(x)} slides "
            f"and {int(e.sum())} events."
        )
    return x, t, e


def correlation_with(biomarker: npt.ArrayLike, values: Sequence[Any], *, seed: int = 0) -> Interval:
    """Spearman's correlation with a numeric column, with its bootstrap interval over slides."""
    from xmil.evaluate.sanity import rank_correlation

    x, y = np.asarray(biomarker, dtype=np.float64), np.asarray(values, dtype=np.float64)
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < 3:
        return Interval(float("nan"), float("nan"), float("nan"))
    rows = np.random.default_rng(seed).integers(0, len(x), size=(1000, len(x)))
    drawn = np.array([rank_correlation(x[r], y[r]) for r in rows])
    if not np.isfinite(drawn).any():  # one of them never varies
        return Interval(float("nan"), float("nan"), float("nan"))
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return Interval(rank_correlation(x, y), float(low), float(high))
