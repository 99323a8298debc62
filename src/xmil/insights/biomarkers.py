"""Numbers per slide from its map: how much supports the class, spatial patterns, and tests as biomarkers.

If several models explain a slide, also their consensus: sign agreement, rank correlation and the published
mask, which drops patches whose mean sign contradicts the sign of their mean score, and patches whose standard
deviation over the models is above its 99.5 % quantile (Keyl et al., TAPAS). TAPAS is the share of (tumour)
patches whose masked mean is above zero.

Biomarkers are tested over cases: a patient with five slides counts once, with the slides' mean.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import combinations
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import FloatArray, IntArray
from xmil.core.errors import InputError
from xmil.core.explanation import Explanation
from xmil.evaluate import SurvivalCurve, hazard_p, marked_by_geojson, median_halves
from xmil.evaluate.statistics import (
    Bools,
    Floats,
    Interval,
    bootstrap,
    rank_correlation,
    spearman,
    unit_means,
)

MICRON = 1e-3  # millimetres
OUTCOMES = ("time", "event")  # columns of a cohort
STRONG = 0.7  # of the cohort's mean absolute score; chosen in docs/studies/insight.md
QUANTILE = 0.995  # of the spread over models; the mask drops patches above it
REGION = ("patches", "supporting_share", "mean_score", "hot_regions", "largest_region", "density_per_mm2")


@dataclass(frozen=True, eq=False)
class Consensus:
    """Mean and standard deviation per patch over the models, mean sign, and which patches the mask keeps.

    `agreed` marks patches that most models count as support and none counts against; a score of zero counts
    as neither. `largest` is the largest share of one model in the absolute scores: near 1 the mean is that
    model's map.
    """

    mean: FloatArray
    std: FloatArray
    sign: FloatArray
    mask: Bools
    agreement: float
    correlation: float
    agreed: Bools
    models: int
    largest: float

    @property
    def summary(self) -> dict[str, float]:
        """The numbers of a slide for a table."""
        return {
            "models": float(self.models),
            "sign_agreement": self.agreement,
            "rank_correlation": self.correlation,
            "kept_share": float(self.mask.mean()),
            "mean_spread": float(self.std.mean()),
            "largest_model_share": self.largest,
        }

    @property
    def shares(self) -> dict[str, float]:
        """Shares of patches that models agree on as support, and whose masked mean is above zero."""
        return {"agreed_share": float(self.agreed.mean()), "masked_share": float((self.scores > 0).mean())}

    @property
    def scores(self) -> FloatArray:
        """The mean where the mask keeps it, zero elsewhere."""
        return np.where(self.mask, self.mean, 0.0).astype(np.float32)


def find_consensus(scores: npt.ArrayLike) -> Consensus:
    """Compute the consensus of m models on n patches from scores (m, n).

    >>> consensus = find_consensus([[1.0, -1.0, 0.5], [2.0, -2.0, -0.4], [1.5, -1.0, -0.3]])
    >>> consensus.mask.tolist(), round(consensus.agreement, 2)
    ([True, False, True], 0.89)
    """
    s = np.asarray(scores, dtype=np.float64)
    if s.ndim != 2 or len(s) < 2 or not np.isfinite(s).all():
        raise InputError(f"A consensus needs finite scores of two models or more (m, n). Got {s.shape}.")
    mean, std, sign = s.mean(axis=0), s.std(axis=0), np.sign(s).mean(axis=0)
    mask = (np.sign(mean) * sign > 0) & (std <= np.quantile(std, QUANTILE))
    agreement = float(np.maximum((s > 0).mean(axis=0), (s < 0).mean(axis=0)).mean())
    pairs = [spearman(a, b) for a, b in combinations(s, 2)]
    correlation = float(np.nanmean(pairs)) if np.isfinite(pairs).any() else float("nan")
    mean32, std32, sign32 = (np.asarray(values, dtype=np.float32) for values in (mean, std, sign))
    agreed = (s >= 0).all(axis=0) & ((s > 0).mean(axis=0) > 0.5)
    sizes = np.abs(s).sum(axis=1)
    largest = float(sizes.max() / sizes.sum()) if sizes.any() else float("nan")
    return Consensus(mean32, std32, sign32, mask, agreement, correlation, agreed, len(s), largest)


def map_biomarkers(
    scores: npt.ArrayLike,
    *,
    coords: IntArray | None = None,
    patch_size: int | None = None,
    mpp: float | None = None,
    region: npt.ArrayLike | None = None,
) -> dict[str, float]:
    """Compute shares, densities and spatial statistics of one slide's scores; nan where places are unknown.

    `region` (n,) marks the patches to use, such as the annotated tumour.

    >>> grid = np.array([[x * 10, y * 10] for y in range(3) for x in range(3)])
    >>> values = map_biomarkers([1, 1, -1, 1, -1, -1, -1, -1, 2.0], coords=grid, patch_size=10)
    >>> values["supporting_share"], values["hot_regions"], values["largest_region"]
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
    area = n * (patch_size * mpp * MICRON) ** 2 if patch_size and mpp else nan
    return {
        "patches": float(n),
        "supporting_share": float(hot.sum() / n) if n else nan,
        "supporting_relevance": positive,
        "positive_relevance_share": positive / total if total else nan,
        "mean_score": float(s[inside].mean()) if n else nan,
        "mean_absolute": total / n if n else nan,
        **_spatial(hot, cold, coords, patch_size),
        "density_per_mm2": float(hot.sum() / area) if coords is not None and area else nan,
    }


def region_files(folder: str | PathLike[str]) -> dict[str, Path]:
    """List the annotations in a folder, one GeoJSON file per slide."""
    place = Path(folder)
    if not place.is_dir():
        raise InputError(f"{place}: not a folder; give one with an annotation <slide_id>.geojson per slide.")
    files = {path.stem: path for path in sorted(place.glob("*.geojson"))}
    if not files:
        raise InputError(f"{place}: holds no *.geojson; name annotations after their slides.")
    return files


def region_mask(path: Path, e: Explanation, classes: Sequence[str] = ()) -> Bools:
    """Mark the patches with at least half in the annotation, or in its parts of these classes."""
    if e.coords is None or e.patch_size is None:
        raise InputError(f"{path}: the explanation has no places of patches to hold against a region.")
    return marked_by_geojson(path, e.coords, patch_size=e.patch_size, names=list(classes) or None)


def region_biomarkers(e: Explanation, inside: Bools, consensus: Consensus | None) -> dict[str, float]:
    """Compute biomarkers within a region; TAPAS is the share of its patches with a masked mean above zero."""
    every = map_biomarkers(e.scores, coords=e.coords, patch_size=e.patch_size, mpp=e.mpp, region=inside)
    values = {f"region_{name}": every[name] for name in REGION}
    if consensus is not None and inside.any():
        values["tapas"] = float((consensus.scores[inside] > 0).mean())
    return values


def strong_share(scores: npt.ArrayLike, scale: float, *, region: npt.ArrayLike | None = None) -> float:
    """Compute the share of patches, in the `region` if there is one, that score above the cohort's scale.

    >>> strong_share([3.0, 0.1, -2.0, 0.2], scale=1.0)
    0.25
    """
    s = np.asarray(scores, dtype=np.float64)
    inside = s if region is None else s[np.asarray(region, dtype=bool)]
    return float((inside > scale).mean()) if len(inside) else float("nan")


def _spatial(hot: Bools, cold: Bools, coords: IntArray | None, patch_size: int | None) -> dict[str, float]:
    names = ("hot_regions", "largest_region", "border", "mixing")  # regions: connected supporting patches
    if coords is None or patch_size is None:
        return dict.fromkeys(names, float("nan"))
    pairs = _neighbours(np.rint(np.asarray(coords) / patch_size).astype(np.int64))
    one, other = pairs
    together = pairs[:, hot[one] & hot[other]]
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array(
        (np.ones(together.shape[1], dtype=np.int8), tuple(together)), shape=(len(hot), len(hot))
    )
    _, groups = connected_components(graph.tocsr(), directed=False)
    sizes = np.bincount(groups[hot])
    sizes = sizes[sizes > 0]
    signed = (hot | cold)[one] & (hot | cold)[other]
    mixing = (hot[one] != hot[other])[signed].mean() if signed.any() else np.nan
    border = 4 * hot.sum() - 2 * together.shape[1]
    values = (len(sizes), sizes.max(initial=0), border, mixing)
    return dict(zip(names, map(float, values), strict=True))


def _neighbours(cells: IntArray) -> IntArray:
    """Find pairs (2, m) of patches that share a side, each once."""
    if not len(cells):
        return np.zeros((2, 0), dtype=np.int64)
    x, y = (cells - cells.min(axis=0)).T
    width = int(y.max()) + 2
    keys = x * width + y
    places, rows = np.unique(keys, return_index=True)
    pairs = []
    for step in (width, 1):
        at = np.searchsorted(places, keys + step).clip(max=len(places) - 1)
        matches = np.flatnonzero(places[at] == keys + step)
        pairs.append(np.stack([matches, rows[at[matches]]]))
    return np.concatenate(pairs, axis=1)


def read_number(cell: Any) -> float:
    """Convert a cell to a number; nan if it is not one."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return float("nan")


@dataclass(frozen=True)
class SurvivalSplit:
    """Hazard ratio per standard deviation with its 95 % interval, its score test, and a test of the halves.

    Both p-values come from permutations of cases (`hazard_p`).
    """

    hazard_ratio: Interval
    cox_p: float
    log_rank_p: float
    n: int  # cases
    events: int


def survival_of(
    biomarker: npt.ArrayLike,
    times: npt.ArrayLike,
    events: npt.ArrayLike,
    *,
    cases: Sequence[str] | None,
    seed: int = 0,
) -> SurvivalSplit:
    """Run a Cox regression on one biomarker (lifelines), and a log-rank test of its halves.

    `cases` names the patient of each slide, whose mean counts once; None treats slides as independent.
    """
    if find_spec("lifelines") is None:
        raise InputError("Cox regression needs lifelines: pip install 'xmil[insight]'.")
    x, t, e, _ = _case_outcomes(biomarker, times, events, cases)
    import pandas as pd
    from lifelines import CoxPHFitter
    from lifelines.exceptions import ConvergenceError

    scaled = (x - x.mean()) / x.std()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # how lifelines calls pandas
        try:
            cox = CoxPHFitter().fit(pd.DataFrame({"x": scaled, "t": t, "e": e}), "t", "e")
        except (ConvergenceError, np.linalg.LinAlgError):
            raise InputError(
                "Cox regression did not converge: the biomarker parts the events completely."
            ) from None
        row: Any = cox.summary.loc["x"]
    ratio = Interval(
        *(float(row[key]) for key in ("exp(coef)", "exp(coef) lower 95%", "exp(coef) upper 95%"))
    )
    halves = x > np.median(x)
    cox_p, log_rank_p = (hazard_p(own, t, e, units=range(len(x)), seed=seed) for own in (x, halves))
    return SurvivalSplit(ratio, cox_p, log_rank_p, len(x), int(e.sum()))


def survival_curves(
    biomarker: npt.ArrayLike, times: npt.ArrayLike, events: npt.ArrayLike, *, cases: Sequence[str] | None
) -> list[SurvivalCurve]:
    """Compute Kaplan-Meier curves of the cases above the biomarker's median and of the others."""
    x, t, e, slides = _case_outcomes(biomarker, times, events, cases)
    rows = np.repeat(np.arange(len(x)), slides)  # a case has as many rows as slides
    return median_halves(x[rows], t[rows], e[rows], units=rows.tolist())[0]


def _case_outcomes(
    biomarker: npt.ArrayLike, times: npt.ArrayLike, events: npt.ArrayLike, cases: Sequence[str] | None
) -> tuple[Floats, Floats, Floats, IntArray]:
    """Return biomarker, time, event and slides of each case with all three; refuse too few cases."""
    (x, t, e), units = _case_means((biomarker, times, events), cases)
    if not np.isin(e, (0.0, 1.0)).all():
        raise InputError("The slides of a case must have one event, 0 or 1.")
    if len(x) < 10 or e.sum() < 3 or np.ptp(x) == 0:
        unit = "slides" if cases is None else "cases"
        raise InputError(
            f"Survival needs ten {unit}, three events and a biomarker that varies; there are {len(x)} {unit} "
            f"and {int(e.sum())} events."
        )
    return x, t, e, np.array(list(Counter(units).values()), dtype=np.int64)


def _case_means(
    columns: Sequence[npt.ArrayLike], cases: Sequence[str] | None
) -> tuple[list[Floats], list[str]]:
    """Average columns over the slides of each case that have a value in all; also the case of each slide."""
    rows = np.array(columns, dtype=np.float64)
    usable = np.isfinite(rows).all(axis=0)
    units = [str(i) if cases is None else cases[i] for i in np.flatnonzero(usable).tolist()]
    return [unit_means(row[usable], units) for row in rows], units


def correlation_with(
    biomarker: npt.ArrayLike, values: Sequence[Any], *, cases: Sequence[str] | None, seed: int = 0
) -> Interval:
    """Compute Spearman's correlation with a numeric column over cases, with its bootstrap interval.

    `cases` names the patient of each slide, whose means count once; None treats slides as independent.
    """
    (x, y), _ = _case_means((biomarker, values), cases)
    if len(x) < 3:
        return Interval(float("nan"), float("nan"), float("nan"))
    statistics = {"spearman": partial(rank_correlation, first=x, second=y)}
    return bootstrap(statistics, units=range(len(x)), seed=seed)["spearman"]
