"""Predictions of a cohort as a table, and how good they are: measures and figures, by case.

An ensemble's outputs are the mean of its models' outputs; its risk and survival function are the mean of
theirs, like the explained risk. `spread` is the standard deviation over the models of the main number: the
probability of the predicted class, the value or the risk. Measures are as scikit-learn defines them, computed
for all draws of a bootstrap at once. `units` has the cases of the predictions: intervals and bands draw cases
with all their rows, bars and survival curves count a case once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmil.core.durable import write_atomically
from xmil.core.errors import InputError
from xmil.core.task import TASKS, Columns, Floats, Task, as_row, references
from xmil.core.text import counted
from xmil.data.bags import Case
from xmil.evaluate import statistics
from xmil.evaluate.statistics import (
    FEWEST,
    Bools,
    Interval,
    Statistic,
    bootstrap,
    count_units,
    draw_weights,
    ratio,
    unit_codes,
)
from xmil.evaluate.survival import concordance, median_halves
from xmil.heatmaps import new_figure, write_figure
from xmil.models.base import ModelSpec
from xmil.storage import write_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish; line styles repeat the distinction.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C510A")
STYLES = ("-", "--", "-.", ":")
GREY = "#7F7F7F"
BINS = 10
DRAWS = 200  # of the band of a ROC curve
Z = 1.959963984540054  # 95 % of a normal
SIZE = (5.2, 5.6)  # inches
EDGE = 1e-6  # by which rounding may move a probability out of its range


@dataclass(frozen=True, eq=False)
class Predictions:
    """Outputs (n, m, c) of m models for n cases."""

    spec: ModelSpec
    cases: Sequence[Case]
    outputs: Floats
    sizes: Sequence[int]

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def task(self) -> Task:
        """What the outputs mean."""
        return TASKS[self.spec.task]

    @property
    def numbers(self) -> Floats:
        """The ensemble's answers (n, k): probabilities of classes, values, or risks."""
        return self.task.answer(self.outputs)

    @property
    def ranks(self) -> Floats:
        """Log odds (n, classes), which rank like the probabilities."""
        return self.task.log_odds(self.outputs.mean(axis=1))

    @property
    def labels(self) -> list[Any]:
        """The label of each case, None if it is unknown."""
        return [case.label for case in self.cases]

    @property
    def units(self) -> list[str]:
        """The case of each prediction, the unit of intervals."""
        return [case.case_id or case.name for case in self.cases]

    @property
    def one_sided(self) -> list[str]:
        """Names of the classes that all labelled slides have, or none: they have nothing to compare."""
        labelled, names = self.labelled(), self.spec.names
        if not self.task.decides or not len(labelled):
            return []
        y = np.array(labelled.labels)
        positive = y.astype(bool) if y.ndim == 2 else y[:, None] == np.arange(len(names))
        return [name for name, own in zip(names, positive.T, strict=True) if own.all() or not own.any()]

    @property
    def unit(self) -> str:
        """The noun for a unit: a case, or a slide if no cohort names cases."""
        return "slide" if all(case.case_id is None for case in self.cases) else "case"

    def columns(self) -> Columns:
        """Make the table: slide and case, truth, prediction, and the numbers behind it."""
        one_model = self.outputs.shape[1] == 1
        spread = {} if one_model else {"spread": self.task.spread(self.outputs).tolist()}
        return {
            "slide_id": [";".join(case.slides) for case in self.cases],
            "case_id": self.units,
            **prediction_columns(self.task, self.outputs, labels=self.labels, names=self.spec.names),
            **spread,
            "n": list(self.sizes),
        }

    def truth(self) -> Floats:
        """Convert the labels to numbers (n, width), nan where there is none."""
        width = 2 if self.task.truth == "time" else len(self.spec.names)
        rows = [as_row(label, width) for label in self.labels]
        return np.array(rows, dtype=np.float64).reshape(len(self), width)

    def labelled(self) -> Predictions:
        """Select the predictions with known labels."""
        parts = [label if isinstance(label, tuple) else (label,) for label in self.labels]
        rows = [i for i, own in enumerate(parts) if all(part is not None and part == part for part in own)]
        return Predictions(
            self.spec, [self.cases[i] for i in rows], self.outputs[rows], [self.sizes[i] for i in rows]
        )

    def metrics(self, **options: Any) -> dict[str, Interval]:
        """Measure the labelled predictions; `options` are those of the bootstrap, drawn by case."""
        labelled = self.labelled()
        if not len(labelled):
            return {}
        options = {"units": labelled.units, **options}
        if self.task.decides:
            options |= {"scores": labelled.ranks, "names": labelled.spec.names}
            return class_metrics(np.array(labelled.labels), labelled.numbers, **options)
        truth, numbers = labelled.truth(), labelled.numbers
        if self.task.truth == "time":
            return risk_metrics(truth[:, 0], truth[:, 1], numbers[:, 0], **options)
        reference, k = self.spec.reference, truth.shape[1]
        parts = [None] * k if reference is None else references(reference, k)
        each = [value_metrics(truth[:, c], numbers[:, c], reference=parts[c], **options) for c in range(k)]
        if k == 1:
            return each[0]
        pairs = zip(labelled.spec.names, each, strict=True)
        return {f"{key}:{name}": value for name, own in pairs for key, value in own.items()}


def prediction_columns(
    task: Task, outputs: Floats, *, labels: Sequence[Any], names: Sequence[str]
) -> Columns:
    """Make the columns of a table from outputs (n, m, c): truth, answers, and the numbers behind them."""
    answers, truth = task.describe(outputs, names), {**task.describe_truth(labels, names)}
    if task.decides:
        truth |= {"predicted": answers.pop("predicted"), "correct": task.correct(outputs, labels)}
    return {**truth, **answers, **task.describe_outputs(outputs, names)}


def write_predictions(columns: Columns, folder: Path) -> None:
    """Write predictions.parquet and predictions.csv."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(columns)
    write_atomically(folder / "predictions.parquet", lambda part: pq.write_table(table, part))
    rows = zip(*columns.values(), strict=True)
    cells = ([f"{value:.8g}" if isinstance(value, float) else value for value in row] for row in rows)
    write_table(folder / "predictions.csv", list(columns), cells)


def class_metrics(
    labels: npt.ArrayLike,
    chances: npt.ArrayLike,
    *,
    units: Sequence[Any],
    scores: npt.ArrayLike | None = None,
    names: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Interval]:
    """AUROC, AUPRC, accuracies, Brier score and calibration error of classes from chances (n, c).

    `labels` (n,) are class indices. Two classes: measures of class 1, with sensitivity and specificity. More:
    means over the classes, each against the rest, and the AUROC of each by its name; calibration is that of
    the predicted class. For labels (n, c) of 0 and 1, each with its own chance: means over the labels. Means
    leave out a class that all or none have; if a class has few units, they have no intervals. `scores` (n, c)
    rank the predictions instead of the chances, see `Task.log_odds`. `units` (n,) has the cases of the
    predictions; `options` are those of `bootstrap`.

    >>> chances = [[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.7, 0.3]]
    >>> metrics = class_metrics([0, 1, 1, 0], chances, units=range(4), draws=50)
    >>> print(metrics["auroc"].estimate, metrics["accuracy"].estimate, metrics["sensitivity"].estimate)
    1.0 0.75 0.5
    """
    y, p = np.asarray(labels), np.asarray(chances, dtype=np.float64)
    several = y.ndim == 2  # labels that do not exclude each other
    if p.ndim != 2 or (y.shape != p.shape if several else p.shape[1] < 2 or y.shape != p.shape[:1]):
        raise InputError(
            f"Labels must be (slides,) with probabilities (slides, classes), or both (slides, labels). "
            f"Got {y.shape} and {p.shape}."
        )
    ranked = p if scores is None else np.asarray(scores, dtype=np.float64)
    _check_finite("probabilities", p)
    _check_finite("scores", np.where(np.isinf(ranked), 0.0, ranked))  # a sure prediction may be infinite
    if ((p < -EDGE) | (p > 1 + EDGE)).any():
        raise InputError(f"Probabilities must lie in the range [0, 1]. Got {p.min():g} to {p.max():g}.")
    if not several and (y.dtype.kind not in "iu" or (len(y) and not 0 <= y.min() <= y.max() < p.shape[1])):
        raise InputError(f"Labels must be class indices in the range [0, {p.shape[1]}).")
    columns = range(p.shape[1])
    positive = y.astype(bool) if several else y[:, None] == columns  # (n, c)
    correct = (p > 0.5) == positive if several else (p.argmax(axis=1) == y)[:, None]
    two = not several and p.shape[1] == 2
    classes = [1] if two else columns
    areas, precisions = (
        {
            str(c if names is None else names[c]): partial(f, positive=positive[:, c], scores=ranked[:, c])
            for c in classes
        }
        for f in (statistics.auroc, statistics.auprc)
    )
    measures: dict[str, Statistic] = {
        "auroc": _mean_of(areas.values(), len(y)),
        "auprc": _mean_of(precisions.values(), len(y)),
    }
    if len(areas) > 1:
        measures |= {f"auroc:{name}": area for name, area in areas.items()}
    decided = positive.astype(int) if several else y[:, None]
    measures["balanced_accuracy"] = _mean_of(
        [
            partial(balanced_accuracy, labels=own, correct=right)
            for own, right in zip(decided.T, correct.T, strict=True)
        ],
        len(y),
    )
    measures["accuracy"] = partial(statistics.mean, values=correct.mean(axis=1))
    squares = (p - positive) ** 2
    if two:
        right = correct[:, 0].astype(float)
        measures["sensitivity"] = lambda weights: statistics.mean(weights * (y == 1), right)
        measures["specificity"] = lambda weights: statistics.mean(weights * (y == 0), right)
        squared, hits, sure = squares[:, 1], positive[:, 1:], p[:, 1:]
    elif several:
        squared, hits, sure = squares.mean(axis=1), positive, p
    else:
        squared, hits, sure = squares.sum(axis=1), correct, p.max(axis=1, keepdims=True)
    measures["brier"] = partial(statistics.mean, values=squared)
    measures["ece"] = _mean_of(
        [
            partial(calibration_error, hits=own, chances=chance)
            for own, chance in zip(hits.T, sure.T, strict=True)
        ],
        len(y),
    )
    every = np.ones(len(y), dtype=bool)
    shares = {"accuracy": every, "sensitivity": y == 1, "specificity": y == 0} if not several else {}
    sides = {f"auroc:{name}": positive[:, [c]] for name, c in zip(areas, classes, strict=True)}
    sides |= dict.fromkeys(("auroc", "auprc", "balanced_accuracy"), positive[:, classes])
    return _with_intervals(measures, shares, sides, units=units, **options)


def value_metrics(
    truth: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    units: Sequence[Any],
    reference: float | None = None,
    **options: Any,
) -> dict[str, Interval]:
    """Mean absolute error, root mean squared error, R2, Pearson's and Spearman's correlation of values (n,).

    `medape` is the median error in percent of the truth, where that is not zero. With a `reference`, `auroc`
    measures how well the values separate cases above it from the others.

    >>> metrics = value_metrics([1.0, 2.0, 3.0], [1.5, 2.0, 2.5], units=range(3), draws=50)
    >>> [round(metrics[name].estimate, 3) for name in ("mae", "r2", "pearson")]
    [0.333, 0.75, 1.0]
    """
    y, v = np.asarray(truth, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if y.ndim != 1 or y.shape != v.shape:
        raise InputError(f"Truth {y.shape} and values {v.shape} must be vectors of one length.")
    _check_finite("truth and values", y, v)
    measures: dict[str, Statistic] = {
        "mae": partial(statistics.mean, values=np.abs(y - v)),
        "rmse": lambda weights: np.sqrt(statistics.mean(weights, (y - v) ** 2)),
        "r2": partial(r_squared, truth=y, values=v),
        "pearson": partial(statistics.correlation, first=y, second=v),
        "spearman": partial(statistics.rank_correlation, first=y, second=v),
    }
    nonzero = y != 0
    percent = 100 * np.abs(y - v) / np.where(nonzero, np.abs(y), 1.0)
    measures["medape"] = lambda weights: statistics.median(weights * nonzero, percent)
    if reference is not None:
        measures["auroc"] = partial(statistics.auroc, positive=y > reference, scores=v)
    sides = {} if reference is None else {"auroc": (y > reference)[:, None]}
    return _with_intervals(measures, {}, sides, units=units, **options)


def risk_metrics(
    times: npt.ArrayLike, events: npt.ArrayLike, risks: npt.ArrayLike, *, units: Sequence[Any], **options: Any
) -> dict[str, Interval]:
    """Harrell's C-index of risks (n,), for times of the event or of censoring."""
    t, e, r = np.asarray(times, dtype=np.float64), np.asarray(events).astype(bool), np.asarray(risks, float)
    if t.ndim != 1 or not t.shape == e.shape == r.shape:
        raise InputError(f"Times {t.shape}, events {e.shape} and risks {r.shape} must be of one length.")
    _check_finite("times and risks", t, r)
    measures: dict[str, Statistic] = {"c_index": partial(concordance, times=t, events=e, risks=r)}
    return _with_intervals(measures, {}, {"c_index": e[:, None]}, units=units, **options)


def _with_intervals(
    measures: Mapping[str, Statistic],
    shares: Mapping[str, Bools],
    sides: Mapping[str, Bools],
    *,
    units: Sequence[Any],
    **options: Any,
) -> dict[str, Interval]:
    """Bootstrap measures over units, without intervals that draws cannot estimate.

    If all draws are equal, such as 11 of 11, a share of 0 or 1 gets Clopper and Pearson's interval for the
    number of units among its rows, and any other measure has no interval. A measure that compares the `sides`
    (n, k) of rows with the rest has none either if a side has few units: draws hardly change it, see
    docs/studies/null-cohorts.md.
    """
    estimates, codes = bootstrap(measures, units=units, **options), unit_codes(units, len(units))
    for name, own in estimates.items():
        columns = sides[name].T if name in sides else ()
        sizes = [len(np.unique(codes[rows])) for column in columns for rows in (column, ~column)]
        is_few = any(0 < size < FEWEST for size in sizes)
        if own.exists and (is_few or own.high - own.low < 1e-12):
            estimates[name] = Interval(own.estimate, float("nan"), float("nan"))
            if name in shares and own.estimate in (0.0, 1.0):
                n, level = len(np.unique(codes[shares[name]])), options.get("level", 0.95)
                estimates[name] = statistics.exact_share(own.estimate, n, level)
    return estimates


def c_index(times: npt.ArrayLike, events: npt.ArrayLike, risks: npt.ArrayLike) -> float:
    """Harrell's C-index; nan if no pair has a known order.

    >>> c_index([5, 3, 9], [1, 1, 0], [0.2, 0.9, -1.0])
    1.0
    """
    units = range(np.size(times))
    return risk_metrics(times, events, risks, units=units, draws=0)["c_index"].estimate


def balanced_accuracy(weights: Floats, labels: npt.NDArray[np.int64], correct: Bools) -> Floats:
    """The mean over classes of the share of correct slides; nan if a class is not drawn."""
    classes = np.unique(labels)
    if len(classes) < 2:
        return np.full(len(weights), np.nan)
    each = [statistics.mean(weights * (labels == c), correct.astype(float)) for c in classes]
    return np.asarray(np.mean(each, axis=0))


def calibration_error(weights: Floats, hits: Bools, chances: Floats) -> Floats:
    """Expected calibration error: the mean distance of chance and frequency over equal bins of the chance.

    Naeini et al. 2015; Guo et al. 2017, arXiv:1706.04599.
    """
    place = np.minimum((chances * BINS).astype(int), BINS - 1)
    gaps = [np.abs(weights @ np.where(place == b, hits - chances, 0.0)) for b in range(BINS)]
    return ratio(np.sum(gaps, axis=0), weights.sum(axis=1))


def r_squared(weights: Floats, truth: Floats, values: Floats) -> Floats:
    """The share of the truth's variance that the values explain; negative if the mean explains more."""
    centred = truth - truth.mean()
    variance = statistics.mean(weights, centred**2) - statistics.mean(weights, centred) ** 2
    left = ratio(statistics.mean(weights, (truth - values) ** 2), np.where(variance > 1e-15, variance, 0.0))
    return np.asarray(1.0 - left)


def draw_figures(labelled: Predictions, metrics: Mapping[str, Interval], folder: Path, *, seed: int) -> None:
    """Draw the figures of labelled predictions for their task."""
    p, names, units, kind = labelled.numbers, labelled.spec.names, labelled.units, labelled.task.truth
    truth = labelled.truth() if kind in ("values", "time") else np.array(labelled.labels)
    if kind == "time":
        times, events = truth[:, 0], truth[:, 1].astype(bool)
        draw_survival(times, events, p[:, 0], metrics["c_index"], folder / "survival.png", units=units)
    elif kind == "values" and len(names) == 1:
        draw_values(truth[:, 0], p[:, 0], metrics, folder / "values.png", name=names[0], units=units)
    if not labelled.task.decides:
        return
    if kind == "labels":
        classes, positive = range(len(names)), truth.astype(bool)
        hits, sure, what = positive.ravel(), p.ravel(), "a label"
    elif len(names) == 2:
        classes, positive = range(1, 2), truth[:, None] == [0, 1]
        hits, sure, what = positive[:, 1], p[:, 1], names[1]
    else:
        classes, positive = range(len(names)), truth[:, None] == range(len(names))
        hits, sure, what = p.argmax(axis=1) == truth, p.max(axis=1), "the predicted class"
    curves = {names[c]: (positive[:, c], labelled.ranks[:, c]) for c in classes}
    areas = {name: metrics.get(f"auroc:{name}", metrics["auroc"]) for name in curves}
    draw_roc(curves, areas, folder / "roc.png", units=units, seed=seed)
    units_of = [unit for unit in units for _ in range(len(hits) // len(units))]
    draw_calibration(hits, sure, metrics["ece"], folder / "calibration.png", what=what, units=units_of)


def draw_roc(
    curves: Mapping[str, tuple[Bools, Floats]],
    areas: Mapping[str, Interval],
    path: Path,
    *,
    units: Sequence[Any],
    seed: int = 0,
) -> None:
    """Draw a ROC curve for each name from its positives (n,) and scores (n,); a single one has a 95 % band.

    `areas` has the AUROC of each name.
    """
    from sklearn.metrics import roc_curve

    figure, axis = new_figure(SIZE)
    axis.plot([0, 1], [0, 1], color=GREY, lw=1, ls=":", label="chance")
    for i, (name, (positive, scores)) in enumerate(curves.items()):
        if not 0 < positive.sum() < len(positive):
            continue
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]
        if len(curves) == 1:
            grid, redrawn = np.linspace(0, 1, 101), []
            draws = DRAWS if areas[name].exists else 0
            for weights in (row for block in draw_weights(units, draws, seed) for row in block):
                if 0 < weights[positive].sum() < weights.sum():
                    false, true, _ = roc_curve(positive, scores, sample_weight=weights)
                    redrawn.append(np.interp(grid, false, true))
            if redrawn:
                low, high = np.quantile(redrawn, (0.025, 0.975), axis=0)
                label = "95 % of redrawn cases"
                axis.fill_between(grid, low, high, color=colour, alpha=0.2, lw=0, label=label)
        false, true, _ = roc_curve(positive, scores)
        axis.plot(false, true, color=colour, ls=style, lw=1.8, label=f"{name}: AUROC {areas[name]}")
    axis.set(xlabel="1 - specificity (false positive rate)", ylabel="sensitivity (true positive rate)")
    axis.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
    n = len(next(iter(curves.values()))[0])
    axis.set_title(f"ROC, {_counted(n, units)}", fontsize=10)
    _finish(figure, axis, path)


def draw_calibration(
    hits: Bools, chances: Floats, error: Interval, path: Path, *, what: str, units: Sequence[Any]
) -> None:
    """Draw how often predictions were true, by bins of their chance, above a histogram of the bins.

    The bars depend on the number of cases in a bin: slides of one patient are not independent.
    """
    figure, (axis, below) = new_figure((5.2, 6.4), 2, 1, height_ratios=(4, 1), sharex=True)
    axis.plot([0, 1], [0, 1], color=GREY, lw=1, ls=":", label="perfect")
    points = np.array(calibration_bins(hits, chances, units))
    errors = np.abs(points[:, 2:4].T - points[:, 1])
    axis.errorbar(
        points[:, 0], points[:, 1], yerr=errors, fmt="o-", color=COLOURS[0], capsize=3, lw=1.5, ms=5,
        label=f"calibration error {error}",
    )  # fmt: skip
    axis.set(ylabel=f"share in which {what} was true", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    axis.set_title(f"calibration, {_counted(len(hits), units)}\nbars: 95 % (Wilson, by case)", fontsize=10)
    axis.legend(loc="upper left", fontsize=8, frameon=False)
    axis.grid(alpha=0.3)
    below.hist(chances, bins=np.linspace(0, 1, BINS + 1).tolist(), color=COLOURS[0], alpha=0.6)
    below.set(xlabel=f"predicted probability of {what}", ylabel="count")
    write_figure(figure, path)


def draw_values(
    truth: Floats,
    values: Floats,
    metrics: Mapping[str, Interval],
    path: Path,
    *,
    name: str,
    units: Sequence[Any],
) -> None:
    """Draw predicted against true values, with the line of equality."""
    figure, axis = new_figure(SIZE)
    low, high = float(min(truth.min(), values.min())), float(max(truth.max(), values.max()))
    axis.plot([low, high], [low, high], color=GREY, lw=1, ls=":", label="equal")
    axis.scatter(truth, values, s=18, color=COLOURS[0], alpha=0.6, lw=0)
    axis.set(xlabel=f"true {name}", ylabel=f"predicted {name}", aspect="equal")
    title = ", ".join(f"{title} {metrics[key]}" for key, title in (("mae", "MAE"), ("r2", "R2")))
    axis.set_title(f"{title}, {_counted(len(truth), units)}", fontsize=9)
    _finish(figure, axis, path)


def draw_survival(
    times: Floats, events: Bools, risks: Floats, c_index: Interval, path: Path, *, units: Sequence[Any]
) -> None:
    """Draw Kaplan-Meier curves of the halves with higher and lower risk, and their test.

    A case counts once, with the mean risk of its rows: patients are compared, not slides.
    """
    figure, axis = new_figure(SIZE)
    curves, p = median_halves(risks, times, events, units=units)
    for curve in curves:
        i, name = (0, "higher risk") if curve.group.startswith("above") else (1, "lower risk")
        colour, at = COLOURS[1 - i], np.searchsorted(curve.times, curve.censored, side="right") - 1
        label = f"{name} ({curve.n})"
        axis.step(curve.times, curve.share, where="post", color=colour, ls=STYLES[i], label=label)
        axis.plot(curve.censored, curve.share[at], "|", color=colour, ms=7)
    title = f"C-index {c_index}" + ("" if np.isnan(p) else f"; log-rank p = {p:.2g}")
    axis.set(xlabel="time", ylabel="survival (bars: censored)", ylim=(-0.02, 1.02))
    axis.set_title(f"{title}; {_counted(len(times), units)}", fontsize=10)
    _finish(figure, axis, path, upper=True)


def calibration_bins(
    hits: Bools, chances: Floats, units: Sequence[Any]
) -> list[tuple[float, float, float, float]]:
    """Compute mean chance, frequency and the ends of its Wilson interval, for each bin that is not empty.

    The frequency is over predictions, the interval is for the number of cases in the bin. It equals SciPy's,
    which only takes whole counts.
    """
    codes = unit_codes(units, len(hits))
    place = np.minimum((chances * BINS).astype(int), BINS - 1)
    bins = []
    for b in np.unique(place):
        inside = place == b
        share, n = float(hits[inside].mean()), len(np.unique(codes[inside]))
        middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * float(np.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)))
        bins.append((float(chances[inside].mean()), share, max(0.0, middle - half), min(1.0, middle + half)))
    return bins


def _check_finite(what: str, *arrays: Floats) -> None:
    """Refuse rows with NaN or infinity: without them, a measure would be of other slides."""
    for array in arrays:
        if bad := np.flatnonzero(~np.isfinite(array).all(axis=tuple(range(1, array.ndim)))).tolist():
            raise InputError(
                f"Measures need finite {what}; {counted(len(bad), 'row')} of {len(array)} "
                f"{'is' if len(bad) == 1 else 'are'} not, first row {bad[0]}. Leave them out, or check the "
                "model."
            )


def _counted(n: int, units: Sequence[Any]) -> str:
    different = count_units(units)
    return f"{n} predictions" if different == n else f"{n} predictions of {different} cases"


def _finish(figure: Figure, axis: Axes, path: Path, *, upper: bool = False) -> None:
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right" if upper else "lower right", fontsize=8, frameon=True, framealpha=0.9)
    write_figure(figure, path)


def _mean_of(parts: Iterable[Statistic], n: int) -> Statistic:
    """Average the statistics that are defined for all n values; nan for draws where one is undefined."""
    known = [part for part in parts if np.isfinite(part(np.ones((1, n)))[0])]
    if not known:
        return lambda weights: np.full(len(weights), np.nan)
    return lambda weights: np.asarray(np.mean([part(weights) for part in known], axis=0))
