"""How good predictions are: measures of each task with seeded bootstrap intervals over cases.

Measures are as scikit-learn defines them; `xmil.predictions.weighted` computes them for all draws at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError, bad_parameter
from xmil.core.interval import Interval
from xmil.predictions import weighted
from xmil.predictions.weighted import Bools, Floats

Statistic = Callable[[Floats], Floats]
BLOCK = 1 << 22  # weights that are drawn at once
LEAST = 0.5  # share of the draws that must determine a measure for it to have an interval


def class_metrics(
    labels: npt.ArrayLike,
    chances: npt.ArrayLike,
    *,
    scores: npt.ArrayLike | None = None,
    names: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Interval]:
    """AUROC, AUPRC, accuracies, Brier score and calibration error of classes from chances (n, c).

    Two classes: those of class 1, with sensitivity and specificity. More: means over the classes, each
    against the rest, and the AUROC of each by its name; calibration is that of the predicted class.
    `scores` (n, c) rank the predictions in place of the chances, see `Task.log_odds`. `options` are those of
    `intervals`.

    >>> found = class_metrics([0, 1, 1, 0], [[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.7, 0.3]], draws=50)
    >>> print(found["auroc"].estimate, found["accuracy"].estimate, found["sensitivity"].estimate)
    1.0 0.75 0.5
    """
    y, p = np.asarray(labels), np.asarray(chances, dtype=np.float64)
    _check_chances(y, p)
    ranked = p if scores is None else np.asarray(scores, dtype=np.float64)
    correct = p.argmax(axis=1) == y
    chosen = [1] if p.shape[1] == 2 else range(p.shape[1])
    statistics = _ranking({_name(names, c): (y == c, ranked[:, c]) for c in chosen})
    statistics["balanced_accuracy"] = partial(weighted.balanced_accuracy, labels=y, correct=correct)
    statistics["accuracy"] = partial(weighted.mean, values=correct.astype(float))
    if p.shape[1] == 2:
        statistics["sensitivity"] = _among(y == 1, correct)
        statistics["specificity"] = _among(y == 0, correct)
        squared, hits, sure = (p[:, 1] - y) ** 2, y == 1, p[:, 1]
    else:
        squared = ((p - np.eye(p.shape[1])[y]) ** 2).sum(axis=1)
        hits, sure = correct, p.max(axis=1)
    statistics["brier"] = partial(weighted.mean, values=squared)
    statistics["ece"] = partial(weighted.calibration_error, hits=hits, chances=sure)
    return intervals(statistics, len(y), **options)


def multilabel_metrics(
    labels: npt.ArrayLike,
    chances: npt.ArrayLike,
    *,
    scores: npt.ArrayLike | None = None,
    names: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Interval]:
    """The same for labels (n, c) of 0 and 1 with chances of their own: means over the labels."""
    y, p = np.asarray(labels).astype(bool), np.asarray(chances, dtype=np.float64)
    if y.shape != p.shape or y.ndim != 2:
        raise InputError(f"Labels {y.shape} and probabilities {p.shape} must both be (slides, labels).")
    columns = range(p.shape[1])
    ranked = p if scores is None else np.asarray(scores, dtype=np.float64)
    correct = (p > 0.5) == y
    statistics = _ranking({_name(names, c): (y[:, c], ranked[:, c]) for c in columns})
    statistics["balanced_accuracy"] = _mean_of(
        [
            partial(weighted.balanced_accuracy, labels=y[:, c].astype(int), correct=correct[:, c])
            for c in columns
        ]
    )
    statistics["accuracy"] = partial(weighted.mean, values=correct.mean(axis=1))
    statistics["brier"] = partial(weighted.mean, values=((p - y) ** 2).mean(axis=1))
    statistics["ece"] = _mean_of(
        [partial(weighted.calibration_error, hits=y[:, c], chances=p[:, c]) for c in columns]
    )
    return intervals(statistics, len(y), **options)


def value_metrics(
    truth: npt.ArrayLike, values: npt.ArrayLike, *, reference: float | None = None, **options: Any
) -> dict[str, Interval]:
    """Mean absolute error, root mean squared error, R2, Pearson's and Spearman's correlation of values (n,).

    `medape` is the median error in percent of the truth, where that is not zero. With a `reference`, `auroc`
    tells how well the values part those above it from the others.

    >>> found = value_metrics([1.0, 2.0, 3.0], [1.5, 2.0, 2.5], draws=50)
    >>> round(found["mae"].estimate, 3), round(found["r2"].estimate, 3), round(found["pearson"].estimate, 3)
    (0.333, 0.75, 1.0)
    """
    y, v = np.asarray(truth, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if y.ndim != 1 or y.shape != v.shape:
        raise InputError(f"Truth {y.shape} and values {v.shape} must be vectors of one length.")
    statistics: dict[str, Statistic] = {
        "mae": partial(weighted.mean, values=np.abs(y - v)),
        "rmse": lambda weights: np.sqrt(weighted.mean(weights, (y - v) ** 2)),
        "r2": partial(weighted.r_squared, truth=y, values=v),
        "pearson": partial(weighted.correlation, first=y, second=v),
        "spearman": partial(weighted.rank_correlation, first=y, second=v),
    }
    some = y != 0
    percent = 100 * np.abs(y - v) / np.where(some, np.abs(y), 1.0)
    statistics["medape"] = lambda weights: weighted.median(weights * some, percent)
    if reference is not None:
        statistics["auroc"] = partial(weighted.auroc, positive=y > reference, scores=v)
    return intervals(statistics, len(y), **options)


def risk_metrics(
    times: npt.ArrayLike, events: npt.ArrayLike, risks: npt.ArrayLike, **options: Any
) -> dict[str, Interval]:
    """Harrell's C-index of risks (n,), for times at which the event was seen or the patient was lost."""
    t, e, r = np.asarray(times, dtype=np.float64), np.asarray(events).astype(bool), np.asarray(risks, float)
    if t.ndim != 1 or not t.shape == e.shape == r.shape:
        raise InputError(f"Times {t.shape}, events {e.shape} and risks {r.shape} must be of one length.")
    statistic: Statistic = partial(weighted.c_index, times=t, events=e, risks=r)
    return intervals({"c_index": statistic}, len(t), **options)


def c_index(times: npt.ArrayLike, events: npt.ArrayLike, risks: npt.ArrayLike) -> float:
    """Harrell's C-index alone; nan where no pair's order is known.

    >>> c_index([5, 3, 9], [1, 1, 0], [0.2, 0.9, -1.0])
    1.0
    """
    return risk_metrics(times, events, risks, draws=0)["c_index"].estimate


def intervals(
    statistics: Mapping[str, Statistic],
    n: int,
    *,
    cases: Sequence[Any] | None = None,
    draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Each statistic with its percentile interval over draws of cases with replacement.

    `cases` (n,) names the case of each prediction: all of a case are drawn together. Draws that do not
    determine a measure, such as those without one of the classes, are left out of its interval.
    """
    if not isinstance(draws, int) or draws < 0:
        raise bad_parameter("draws", "a bootstrap", "an int in the range [0, inf)", draws)
    if not 0 < level < 1:
        raise bad_parameter("level", "a bootstrap", "a share in the range (0, 1)", level)
    if n == 0:
        raise InputError("There is no prediction with a label to measure.")
    _, group = np.unique([str(c) for c in cases] if cases is not None else np.arange(n), return_inverse=True)
    drawn: dict[str, list[Floats]] = {name: [] for name in statistics}
    for weights in _weights(group, draws, seed):
        for name, statistic in statistics.items():
            drawn[name].append(statistic(weights))
    whole = np.ones((1, n))
    return {
        name: _interval(float(statistic(whole)[0]), drawn[name], level)
        for name, statistic in statistics.items()
    }


def _weights(group: npt.NDArray[np.intp], draws: int, seed: int) -> Any:
    """How often each prediction is drawn, in blocks (b, n); a single case has no spread to draw from."""
    rng = np.random.default_rng(seed)
    size = int(group.max()) + 1
    step = max(1, BLOCK // len(group))
    for start in range(0, draws if size > 1 else 0, step):
        counts = rng.multinomial(size, np.full(size, 1 / size), size=min(step, draws - start))
        yield counts[:, group].astype(np.float64)


def _interval(estimate: float, drawn: list[Floats], level: float) -> Interval:
    values = np.concatenate(drawn) if drawn else np.zeros(0)
    known = values[np.isfinite(values)]
    if not len(values) or len(known) < LEAST * len(values) or np.isnan(estimate):
        return Interval(estimate, float("nan"), float("nan"))
    low, high = np.quantile(known, ((1 - level) / 2, (1 + level) / 2))
    return Interval(estimate, float(low), float(high))


def _ranking(classes: Mapping[str, tuple[Bools, Floats]]) -> dict[str, Statistic]:
    """Means over classes of AUROC and AUPRC, and the AUROC of each where there are several."""
    areas: dict[str, Statistic] = {
        f"auroc:{name}": partial(weighted.auroc, positive=y, scores=s) for name, (y, s) in classes.items()
    }
    precisions = [partial(weighted.auprc, positive=y, scores=s) for y, s in classes.values()]
    means = {"auroc": _mean_of([*areas.values()]), "auprc": _mean_of([*precisions])}
    return means if len(areas) == 1 else {**means, **areas}


def _name(names: Sequence[str] | None, c: int) -> str:
    return str(c) if names is None else str(names[c])


def _mean_of(parts: list[Statistic]) -> Statistic:
    return lambda weights: weighted.nan_mean([part(weights) for part in parts])


def _among(chosen: Bools, correct: Bools) -> Statistic:
    """The share of the chosen predictions that are right."""
    return lambda weights: weighted.mean(weights * chosen, correct.astype(float))


def _check_chances(labels: npt.NDArray[Any], chances: Floats) -> None:
    if chances.ndim != 2 or chances.shape[1] < 2 or labels.shape != chances.shape[:1]:
        raise InputError(
            f"Labels {labels.shape} must be (slides,), probabilities {chances.shape} (slides, classes)."
        )
    if labels.dtype.kind not in "iu" or (
        len(labels) and not 0 <= labels.min() <= labels.max() < chances.shape[1]
    ):
        raise InputError(f"Labels must be class indices in the range [0, {chances.shape[1]}).")
