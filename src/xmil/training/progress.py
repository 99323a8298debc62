"""How good outputs are, by task, without intervals: what is followed from epoch to epoch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit, softmax

from xmil.nn.survival import survival_risk
from xmil.predictions import weighted
from xmil.training.targets import Goal

Floats = npt.NDArray[np.float64]
Measures = dict[str, float]


def measure(outputs: Floats, rows: npt.NDArray[np.int64], goal: Goal) -> Measures:
    """The measures of a task from outputs (b, c) of the bags at some rows; NaN where one has no value."""
    every = np.ones((1, len(rows)))
    found = _BY_TASK[goal.task](every, outputs.astype(np.float64), goal.truth[rows], goal)
    return {name: float(value[0]) for name, value in found.items()}


def probabilities(outputs: Floats, task: str) -> Floats:
    """Outputs (b, c) as probabilities of classes."""
    return np.asarray(expit(outputs) if task == "multilabel" else softmax(outputs, axis=1))


def risk(outputs: Floats, task: str) -> Floats:
    """Risk (b,): the log risk of Cox, or minus the sum of the survival curve of discrete hazards."""
    if task == "cox":
        return np.asarray(outputs[:, 0])
    return np.asarray(survival_risk(torch.from_numpy(outputs)).numpy())


def _classification(every: Floats, outputs: Floats, values: Floats, goal: Goal) -> dict[str, Floats]:
    labels = values[:, 0].astype(np.int64)
    if goal.outputs == 2:  # the difference is monotone in the probability, without its rounding
        area = weighted.auroc(every, labels == 1, outputs[:, 1] - outputs[:, 0])
    else:
        chances = probabilities(outputs, goal.task)
        areas = [weighted.auroc(every, labels == c, chances[:, c]) for c in range(goal.outputs)]
        area = weighted.nan_mean(areas)
    correct = outputs.argmax(axis=1) == labels
    return {
        "auc": area,
        "accuracy": weighted.mean(every, correct.astype(float)),
        "balanced_accuracy": weighted.balanced_accuracy(every, labels, correct),
    }


def _multilabel(every: Floats, outputs: Floats, values: Floats, goal: Goal) -> dict[str, Floats]:
    areas = {
        f"auc:{name}": weighted.auroc(every, values[:, c] > 0.5, outputs[:, c])
        for c, name in enumerate(goal.class_names or ())
    }
    right = ((outputs > 0) == (values > 0.5)).mean(axis=1)
    return {"auc": weighted.nan_mean([*areas.values()]), "accuracy": weighted.mean(every, right), **areas}


def _regression(every: Floats, outputs: Floats, values: Floats, _: Goal) -> dict[str, Floats]:
    guess, truth = outputs[:, 0], values[:, 0]
    return {
        "mae": weighted.mean(every, np.abs(guess - truth)),
        "rmse": np.sqrt(weighted.mean(every, (guess - truth) ** 2)),
        "r2": weighted.r_squared(every, truth, guess),
        "spearman": weighted.rank_correlation(every, truth, guess),
    }


def _survival(every: Floats, outputs: Floats, values: Floats, goal: Goal) -> dict[str, Floats]:
    risks = risk(outputs, goal.task)
    return {"c_index": weighted.c_index(every, values[:, 0], values[:, 1] > 0, risks)}


_BY_TASK: dict[str, Callable[[Floats, Floats, Floats, Goal], dict[str, Floats]]] = {
    "classification": _classification,
    "multilabel": _multilabel,
    "regression": _regression,
    "survival": _survival,
    "cox": _survival,
}
