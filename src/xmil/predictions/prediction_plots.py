"""Figures of predictions: ROC, calibration, values against the truth, survival by risk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from xmil.core.interval import Interval
from xmil.core.lettering import letter_figure
from xmil.core.storage import write_atomically
from xmil.predictions.weighted import Bools, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by colour-blind readers; line styles repeat the distinction.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C510A")
STYLES = ("-", "--", "-.", ":")
GREY = "#7F7F7F"
BINS = 10
DRAWS = 200  # of the band of a ROC curve


def draw_roc(
    curves: Mapping[str, tuple[Bools, Floats]],
    areas: Mapping[str, Interval],
    path: Path,
    *,
    cases: Sequence[Any] | None = None,
    seed: int = 0,
) -> None:
    """A ROC curve for each name from its positives (n,) and scores (n,); one alone has its 95 % band.

    `areas` has the AUROC of each name.
    """
    from sklearn.metrics import roc_curve

    figure, axis = _square()
    axis.plot([0, 1], [0, 1], color=GREY, lw=1, ls=":", label="chance")
    for i, (name, (positive, scores)) in enumerate(curves.items()):
        if not 0 < positive.sum() < len(positive):
            continue
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]
        if len(curves) == 1:
            grid, low, high = _band(positive, scores, cases, seed)
            axis.fill_between(grid, low, high, color=colour, alpha=0.2, lw=0, label="95 % of redrawn cases")
        false, true, _ = roc_curve(positive, scores)
        axis.plot(false, true, color=colour, ls=style, lw=1.8, label=f"{name}: AUROC {areas[name]}")
    axis.set(xlabel="1 - specificity (false positive rate)", ylabel="sensitivity (true positive rate)")
    axis.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
    n = len(next(iter(curves.values()))[0])
    axis.set_title(f"ROC, {_counted(n, cases)}", fontsize=10)
    _finish(figure, axis, path)


def draw_calibration(
    hits: Bools,
    chances: Floats,
    error: Interval,
    path: Path,
    *,
    what: str,
    cases: Sequence[Any] | None = None,
) -> None:
    """How often what was predicted with a chance came true, by bins of the chance, above their histogram.

    The bars are as wide as the number of cases in a bin says: slides of one patient are not independent.
    """
    figure = Figure(figsize=(5.2, 6.4), layout="constrained")
    axis, below = figure.subplots(2, 1, height_ratios=(4, 1), sharex=True)
    axis.plot([0, 1], [0, 1], color=GREY, lw=1, ls=":", label="perfect")
    points = np.array(calibration_bins(hits, chances, cases))
    errors = np.abs(points[:, 2:4].T - points[:, 1])
    axis.errorbar(
        points[:, 0], points[:, 1], yerr=errors, fmt="o-", color=COLOURS[0], capsize=3, lw=1.5, ms=5,
        label=f"calibration error {error}",
    )  # fmt: skip
    axis.set(ylabel=f"share in which {what} was true", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    axis.set_title(f"calibration, {_counted(len(hits), cases)}\nbars: 95 % (Wilson, by case)", fontsize=10)
    axis.legend(loc="upper left", fontsize=8, frameon=False)
    axis.grid(alpha=0.3)
    below.hist(chances, bins=np.linspace(0, 1, BINS + 1).tolist(), color=COLOURS[0], alpha=0.6)
    below.set(xlabel=f"predicted probability of {what}", ylabel="count")
    _save(figure, path)


def draw_values(
    truth: Floats, values: Floats, metrics: Mapping[str, Interval], path: Path, *, name: str
) -> None:
    """Predicted against true values, with the line on which both agree."""
    figure, axis = _square()
    low, high = float(min(truth.min(), values.min())), float(max(truth.max(), values.max()))
    axis.plot([low, high], [low, high], color=GREY, lw=1, ls=":", label="equal")
    axis.scatter(truth, values, s=18, color=COLOURS[0], alpha=0.6, lw=0)
    axis.set(xlabel=f"true {name}", ylabel=f"predicted {name}", aspect="equal")
    told = ", ".join(f"{title} {metrics[key]}" for key, title in (("mae", "MAE"), ("r2", "R2")))
    axis.set_title(f"{told}, {len(truth)} predictions", fontsize=9)
    _finish(figure, axis, path)


def draw_survival(
    times: Floats,
    events: Bools,
    risks: Floats,
    c_index: Interval,
    path: Path,
    *,
    cases: Sequence[Any] | None = None,
) -> None:
    """Kaplan-Meier curves of the half with the higher risk and the half with the lower, and their test.

    A case counts once, with the mean risk of its rows: patients are compared, not slides.
    """
    from scipy.stats import CensoredData, ecdf, logrank

    first, member = _members(len(times), cases)
    risks = np.bincount(member, weights=risks) / np.bincount(member)
    times, events = times[first], events[first]
    figure, axis = _square()
    high = risks > np.median(risks)
    groups = {"higher risk": high, "lower risk": ~high}
    samples = {}
    for i, (name, rows) in enumerate(groups.items()):
        if not rows.any():
            continue
        sample = CensoredData(uncensored=times[rows & events], right=times[rows & ~events])
        samples[name] = sample
        curve = ecdf(sample).sf
        x = np.concatenate([[0.0], curve.quantiles])
        y = np.concatenate([[1.0], curve.probabilities])
        axis.step(x, y, where="post", color=COLOURS[1 - i], ls=STYLES[i], label=f"{name} ({rows.sum()})")
        lost = np.sort(times[rows & ~events])
        at = y[np.searchsorted(x, lost, side="right") - 1]
        axis.plot(lost, at, "|", color=COLOURS[1 - i], ms=7)
    told = f"C-index {c_index}"
    if len(samples) == 2:
        with np.errstate(all="ignore"):  # too few events to tell: nan
            p = float(logrank(*samples.values()).pvalue)
        told += "" if np.isnan(p) else f"; log-rank p = {p:.2g}"
    told += "" if cases is None else f"; {len(times)} cases"
    axis.set(xlabel="time", ylabel="survival (bars: censored)", ylim=(-0.02, 1.02))
    axis.set_title(told, fontsize=10)
    _finish(figure, axis, path, upper=True)


def _band(
    positive: Bools, scores: Floats, cases: Sequence[Any] | None, seed: int
) -> tuple[Floats, Floats, Floats]:
    """The sensitivities between which 95 % of the curves of redrawn cases lie."""
    from sklearn.metrics import roc_curve

    rng, grid = np.random.default_rng(seed), np.linspace(0, 1, 101)
    _, group = np.unique([str(c) for c in cases] if cases else np.arange(len(scores)), return_inverse=True)
    members = [np.flatnonzero(group == g) for g in range(group.max() + 1)]
    curves = []
    for _ in range(DRAWS):
        rows = np.concatenate([members[g] for g in rng.integers(0, len(members), len(members))])
        if 0 < positive[rows].sum() < len(rows):
            false, true, _ = roc_curve(positive[rows], scores[rows])
            curves.append(np.interp(grid, false, true))
    low, high = np.quantile(curves, (0.025, 0.975), axis=0) if curves else (grid * 0, grid * 0 + 1)
    return grid, low, high


def calibration_bins(
    hits: Bools, chances: Floats, cases: Sequence[Any] | None = None
) -> list[tuple[float, float, float, float]]:
    """Mean chance, frequency and the ends of its Wilson interval, for each bin that is not empty.

    The frequency is over predictions, the interval that of as many draws as there are cases in the bin.
    """
    _, member = _members(len(hits), cases)
    place = np.minimum((chances * BINS).astype(int), BINS - 1)
    found = []
    for b in np.unique(place):
        inside = place == b
        share = float(hits[inside].mean())
        low, high = wilson(share, len(np.unique(member[inside])))
        found.append((float(chances[inside].mean()), share, low, high))
    return found


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a frequency among n; scipy's takes whole counts only.

    >>> [round(end, 4) for end in wilson(0.5, 10)]
    [0.2366, 0.7634]
    """
    z = 1.959963984540054
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * float(np.sqrt(share * (1 - share) / n + z * z / (4 * n * n)))
    return max(0.0, middle - half), min(1.0, middle + half)


def _members(n: int, cases: Sequence[Any] | None) -> tuple[Any, Any]:
    """The first row of each case, and the case's number for each of n rows."""
    names = np.arange(n) if cases is None else np.array([str(case) for case in cases])
    _, first, member = np.unique(names, return_index=True, return_inverse=True)
    return first, member


def _counted(n: int, cases: Sequence[Any] | None) -> str:
    different = n if cases is None else len(set(map(str, cases)))
    return f"{n} predictions" if different == n else f"{n} predictions of {different} cases"


def _square() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.2, 5.6), layout="constrained")
    return figure, figure.subplots()


def _finish(figure: Figure, axis: Axes, path: Path, *, upper: bool = False) -> None:
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right" if upper else "lower right", fontsize=8, frameon=True, framealpha=0.9)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    write_atomically(path, lambda part: letter_figure(figure).savefig(part, format="png", dpi=120))
