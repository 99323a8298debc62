"""How good outputs are, by task, without intervals: what is followed from epoch to epoch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from xmil.core.task import TASKS, Floats
from xmil.predictions import weighted
from xmil.training.targets import Goal

Measures = dict[str, float]


def measure(outputs: Floats, rows: npt.NDArray[np.int64], goal: Goal) -> Measures:
    """The measures of a task from outputs (b, c) of the bags at some rows; NaN where one has no value."""
    every = np.ones((1, len(rows)))
    found = _BY_TRUTH[TASKS[goal.task].truth](every, outputs.astype(np.float64), goal.truth[rows], goal)
    return {name: float(value[0]) for name, value in found.items()}


def _classification(every: Floats, outputs: Floats, values: Floats, goal: Goal) -> dict[str, Floats]:
    labels = values[:, 0].astype(np.int64)
    odds = TASKS[goal.task].log_odds(outputs)  # rank as the probabilities do, without their rounding
    if odds.shape[1] == 2:
        area = weighted.auroc(every, labels == 1, odds[:, 1])
    else:
        areas = [weighted.auroc(every, labels == c, odds[:, c]) for c in range(odds.shape[1])]
        area = weighted.nan_mean(areas)
    correct = odds.argmax(axis=1) == labels
    return {
        "auc": area,
        "accuracy": weighted.mean(every, correct.astype(float)),
        "balanced_accuracy": weighted.balanced_accuracy(every, labels, correct),
    }


def _multilabel(every: Floats, outputs: Floats, values: Floats, goal: Goal) -> dict[str, Floats]:
    odds = TASKS[goal.task].log_odds(outputs)
    areas = {
        f"auc:{name}": weighted.auroc(every, values[:, c] > 0.5, odds[:, c])
        for c, name in enumerate(goal.class_names or ())
    }
    right = ((odds > 0) == (values > 0.5)).mean(axis=1)
    return {"auc": weighted.nan_mean([*areas.values()]), "accuracy": weighted.mean(every, right), **areas}


def _regression(every: Floats, outputs: Floats, values: Floats, goal: Goal) -> dict[str, Floats]:
    guess, truth = TASKS[goal.task].numbers(outputs)[:, 0], values[:, 0]
    return {
        "mae": weighted.mean(every, np.abs(guess - truth)),
        "rmse": np.sqrt(weighted.mean(every, (guess - truth) ** 2)),
        "r2": weighted.r_squared(every, truth, guess),
        "spearman": weighted.rank_correlation(every, truth, guess),
    }


def _survival(every: Floats, outputs: Floats, values: Floats, goal: Goal) -> dict[str, Floats]:
    risks = TASKS[goal.task].numbers(outputs)[:, 0]
    return {"c_index": weighted.c_index(every, values[:, 0], values[:, 1] > 0, risks)}


_BY_TRUTH: dict[str, Callable[[Floats, Floats, Floats, Goal], dict[str, Floats]]] = {
    "class": _classification,
    "labels": _multilabel,
    "values": _regression,
    "time": _survival,
}
