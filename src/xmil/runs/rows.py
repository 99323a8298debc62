"""A run's table of slides: what the model says of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.task import TASKS, Task, references
from xmil.data.cases import Case

FIRST = ("slide_id", "case_id", "label", "predicted", "correct")
LAST = ("n", "features", "seconds", "warnings")
Row = dict[str, Any]
Logits = Sequence[float] | Sequence[Sequence[float]]  # of one model, or of each of an ensemble


def slide_row(
    case: Case,
    place: int,
    *,
    logits: Logits,
    spec: Mapping[str, Any],
    n: int,
    seconds: float | None = None,
) -> Row:
    """The row of a case's slide number `place`, from the outputs of the model, or models, for the case."""
    task, each = TASKS[str(spec.get("task") or "classification")], np.atleast_2d(np.asarray(logits, float))
    names = task.names(each.shape[1], spec.get("class_names"), spec.get("time_bins"))
    said = prediction(task, with_reference(each, spec), names)
    return {
        "slide_id": case.slides[place],
        "case_id": case.case_id or case.name,
        "label": task.label_text(case.label, names),
        "predicted": said.pop("predicted", None),
        "correct": task.correct(each[None], [case.label])[0],
        **said,
        **_beside(task, case.label),
        "n": n,
        "features": str(case.paths[place].absolute()),
        "seconds": None if seconds is None else round(seconds, 4),
    }


def with_reference(outputs: npt.NDArray[np.float64], spec: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """Outputs (..., c) as values, where a regression's are deviations from its reference.

    >>> with_reference(np.array([0.5]), {"relative": True, "reference": 2.0})
    array([2.5])
    """
    if not spec.get("relative"):
        return outputs
    reference: npt.NDArray[np.float64] = np.asarray(references(spec.get("reference"), outputs.shape[-1]))
    return outputs + reference


def prediction(task: Task, outputs: Any, names: Sequence[str]) -> Row:
    """What the outputs (m, c) of one model or an ensemble mean, in the columns of the task's tables.

    >>> prediction(TASKS["classification"], [[0.0, 1.0]], ["benign", "tumour"])
    {'predicted': 'tumour', 'p:benign': 0.268941, 'p:tumour': 0.731059}
    >>> prediction(TASKS["regression"], [[1.5]], ["value"])
    {'value': 1.5}
    """
    said = task.said(np.asarray(outputs)[None], names)
    return {key: value if isinstance(value, str) else _rounded(value) for key, (value,) in said.items()}


def columns(rows: Sequence[Row]) -> list[str]:
    """The columns of a table of rows: names first, outputs between, the rest last."""
    between = dict.fromkeys(key for row in rows for key in row if key not in (*FIRST, *LAST))
    last = LAST if any(row.get(LAST[-1]) for row in rows) else LAST[:-1]
    return [*FIRST, *between, *last]


def _beside(task: Task, label: Any) -> Row:
    """The columns `time` and `event` of models of risks, as `xmil predict` writes them."""
    if task.truth != "time":
        return {}
    time, event = label if isinstance(label, tuple) else (None, None)
    return {"time": time, "event": event}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
