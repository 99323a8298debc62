"""Predictions as rows of a table: one for each bag, in the columns of `xmil predict`."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import expit

from xmil.models.tasks import target_names
from xmil.training.cohort import TrainingSet, bag_slides
from xmil.training.measures import Floats, probabilities, risk
from xmil.training.targets import Goal, Rows


def prediction_rows(
    found: TrainingSet, goal: Goal, outputs: Floats, rows: Rows, *, subset: str
) -> list[dict[str, Any]]:
    """What a model says of some bags: who they are, what is true, what was predicted."""
    said = _BY_TASK[goal.task](goal, outputs, goal.truth[rows])
    slides, cases, sizes = (
        bag_slides(found),
        found.cohort.cases,
        [len(header) for header in found.bags.headers],
    )
    return [
        {
            "slide_id": ";".join(slides[row]),
            "case_id": cases[row],
            "subset": subset,
            **own,
            "n": sizes[row],
        }
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
            "correct": bool(g == int(label)),
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
            "correct": bool(np.array_equal(labels > 0.5, p > 0.5)),
            **_numbers("p", names, p),
            **_numbers("logit", names, z),
        }
        for labels, p, z in zip(truth, chances, outputs, strict=True)
    ]


def _values(goal: Goal, outputs: Floats, truth: Floats) -> list[dict[str, Any]]:
    return [
        {"label": f"{t:.8g}", "value": f"{v:.8g}", "reference": f"{goal.reference or 0.0:.8g}"}
        for t, v in zip(truth[:, 0], outputs[:, 0], strict=True)
    ]


def _risks(goal: Goal, outputs: Floats, truth: Floats) -> list[dict[str, Any]]:
    said = [
        {"time": f"{t:.8g}", "event": bool(e), "risk": f"{r:.8g}"}
        for (t, e), r in zip(truth, risk(outputs, goal.task), strict=True)
    ]
    if goal.task == "cox":
        return said
    names = (target_names(goal.task, goal.outputs, None, goal.time_bins) or ())[: goal.outputs]
    alive = np.cumprod(1 - expit(outputs), axis=1)
    return [
        {**row, **_numbers("S", names, s), **_numbers("logit", names, z)}
        for row, s, z in zip(said, alive, outputs, strict=True)
    ]


def _numbers(kind: str, names: Any, values: Any) -> dict[str, str]:
    return {f"{kind}:{name}": f"{value:.8g}" for name, value in zip(names, values, strict=True)}


_BY_TASK = {
    "classification": _classes,
    "multilabel": _labels,
    "regression": _values,
    "survival": _risks,
    "cox": _risks,
}
