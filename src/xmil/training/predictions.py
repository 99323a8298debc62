"""Predictions as rows of a table: one for each bag."""

from __future__ import annotations

from typing import Any

import numpy as np

from xmil.training.cohort import TrainingSet
from xmil.training.measures import Floats, probabilities, risk
from xmil.training.targets import Goal, Rows


def prediction_rows(
    found: TrainingSet, goal: Goal, outputs: Floats, rows: Rows, *, subset: str
) -> list[dict[str, Any]]:
    """What a model says of some bags: who they are, what is true, what was predicted."""
    said = _BY_TASK[goal.task](goal, outputs, goal.truth[rows])
    cases = found.cohort.cases
    return [
        {"slide_id": found.names[row], "case_id": cases[row], "subset": subset, **own}
        for row, own in zip(rows.tolist(), said, strict=True)
    ]


def _classes(goal: Goal, outputs: Floats, truth: Floats) -> list[dict[str, Any]]:
    names = goal.class_names or ()
    guess = outputs.argmax(axis=1)
    chances = probabilities(outputs, goal.task)
    return [
        {
            "label": names[int(label)],
            "predicted": names[int(g)],
            "correct": int(g == int(label)),
            **_numbers("p", names, p),
            **_numbers("logit", names, z),
        }
        for label, g, p, z in zip(truth[:, 0], guess, chances, outputs, strict=True)
    ]


def _labels(goal: Goal, outputs: Floats, truth: Floats) -> list[dict[str, Any]]:
    names = goal.class_names or ()
    chances = probabilities(outputs, goal.task)
    return [
        {
            "label": "+".join(name for name, on in zip(names, labels, strict=True) if on),
            "predicted": "+".join(name for name, on in zip(names, p > 0.5, strict=True) if on),
            "correct": int(np.array_equal(labels > 0.5, p > 0.5)),
            **_numbers("p", names, p),
            **_numbers("logit", names, z),
        }
        for labels, p, z in zip(truth, chances, outputs, strict=True)
    ]


def _values(goal: Goal, outputs: Floats, truth: Floats) -> list[dict[str, Any]]:
    return [
        {"label": f"{t:.6g}", "value": f"{v:.6g}", "reference": f"{goal.reference or 0.0:.6g}"}
        for t, v in zip(truth[:, 0], outputs[:, 0], strict=True)
    ]


def _risks(goal: Goal, outputs: Floats, truth: Floats) -> list[dict[str, Any]]:
    names = [f"bin{i}" for i in range(goal.outputs)] if goal.task == "survival" else []
    return [
        {"time": f"{t:.6g}", "event": int(e), "risk": f"{r:.6g}", **_numbers("logit", names, z[: len(names)])}
        for (t, e), r, z in zip(truth, risk(outputs, goal.task), outputs, strict=True)
    ]


def _numbers(kind: str, names: Any, values: Any) -> dict[str, str]:
    return {f"{kind}:{name}": f"{value:.6g}" for name, value in zip(names, values, strict=True)}


_BY_TASK = {
    "classification": _classes,
    "multilabel": _labels,
    "regression": _values,
    "survival": _risks,
    "cox": _risks,
}
