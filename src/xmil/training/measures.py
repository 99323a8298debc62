"""How good predictions are, by task: AUROC, accuracies, C-index, errors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit, softmax

from xmil.nn.survival import survival_risk
from xmil.training.targets import Goal

Floats = npt.NDArray[np.float64]
Measures = dict[str, float]


def measure(outputs: Floats, rows: npt.NDArray[np.int64], goal: Goal) -> Measures:
    """The measures of a task from outputs (b, c) of the bags at some rows."""
    return _BY_TASK[goal.task](outputs.astype(np.float64), goal.truth[rows], goal)


def probabilities(outputs: Floats, task: str) -> Floats:
    """Outputs (b, c) as probabilities of classes."""
    return np.asarray(expit(outputs) if task == "multilabel" else softmax(outputs, axis=1))


def risk(outputs: Floats, task: str) -> Floats:
    """Risk (b,): the log risk of Cox, or minus the sum of the survival curve of discrete hazards."""
    if task == "cox":
        return np.asarray(outputs[:, 0])
    return np.asarray(survival_risk(torch.from_numpy(outputs)).numpy())


def c_index(times: Floats, events: Floats, risks: Floats) -> float:
    """Harrell's C: of the pairs whose order is known, the share with the higher risk first; ties count half.

    >>> c_index(np.array([1.0, 2, 3]), np.array([1.0, 1, 0]), np.array([3.0, 1, 2]))
    0.6666666666666666
    """
    first = (events[:, None] > 0) & (times[:, None] < times[None, :])  # i had its event before j's time
    if not first.any():
        return float("nan")
    higher = risks[:, None] > risks[None, :]
    tied = risks[:, None] == risks[None, :]
    return float((higher[first] + 0.5 * tied[first]).mean())


def auroc(labels: Floats, scores: Floats) -> float:
    """Area under the ROC curve; NaN where one side is empty."""
    from sklearn.metrics import roc_auc_score

    if len(np.unique(labels)) < 2:
        return float("nan")
    return float(roc_auc_score(labels, scores))


def _classification(outputs: Floats, values: Floats, goal: Goal) -> Measures:
    labels = values[:, 0].astype(int)
    chances, guess = probabilities(outputs, goal.task), outputs.argmax(axis=1)
    if goal.outputs == 2:
        auc = auroc(
            labels, outputs[:, 1] - outputs[:, 0]
        )  # monotone in the probability, without its rounding
    else:
        auc = _mean([auroc(labels == c, chances[:, c]) for c in range(goal.outputs)])
    recalls = [float((guess[labels == c] == c).mean()) for c in np.unique(labels)]
    return {
        "auc": auc,
        "accuracy": float((guess == labels).mean()),
        "balanced_accuracy": _mean(recalls),
    }


def _multilabel(outputs: Floats, values: Floats, goal: Goal) -> Measures:
    names = goal.class_names or ()
    each = {f"auc:{name}": auroc(values[:, c], outputs[:, c]) for c, name in enumerate(names)}
    right = (outputs > 0) == (values > 0.5)
    return {"auc": _mean(list(each.values())), "accuracy": float(right.mean()), **each}


def _regression(outputs: Floats, values: Floats, _: Goal) -> Measures:
    from scipy.stats import rankdata

    guess, truth = outputs[:, 0], values[:, 0]
    spread = float(((truth - truth.mean()) ** 2).sum())
    ranks = np.corrcoef(rankdata(guess), rankdata(truth))[0, 1] if spread and np.ptp(guess) else np.nan
    return {
        "mae": float(np.abs(guess - truth).mean()),
        "rmse": float(np.sqrt(((guess - truth) ** 2).mean())),
        "r2": 1 - float(((guess - truth) ** 2).sum()) / spread if spread else float("nan"),
        "spearman": float(ranks),
    }


def _survival(outputs: Floats, values: Floats, goal: Goal) -> Measures:
    return {"c_index": c_index(values[:, 0], values[:, 1], risk(outputs, goal.task))}


def _mean(values: list[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


_BY_TASK: dict[str, Callable[[Floats, Floats, Goal], Measures]] = {
    "classification": _classification,
    "multilabel": _multilabel,
    "regression": _regression,
    "survival": _survival,
    "cox": _survival,
}
