"""The rows of slides.csv: a slide with its case, label and prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xmil.core.task import TASKS, Task, with_reference
from xmil.data.bags import Case
from xmil.execute import TableRow

FIRST = ("slide_id", "case_id", "label", "predicted", "correct")  # columns of slides.csv, and its last ones
LAST, NOTES = ("n", "features", "seconds"), ("measured", "warnings")  # notes only if a slide has one


def columns_of_cases(rows: Sequence[TableRow]) -> list[str]:
    """Order the columns of slides.csv: names, outputs, the rest."""
    between = dict.fromkeys(key for row in rows for key in row if key not in (*FIRST, *LAST, *NOTES))
    notes = [name for name in NOTES if any(row.get(name) for row in rows)]
    return [*FIRST, *between, *LAST, *notes]


Logits = Sequence[float] | Sequence[Sequence[float]]  # of one model, or of each of an ensemble


def slide_row(
    case: Case,
    place: int,
    *,
    logits: Logits,
    spec: Mapping[str, Any],
    n: int,
    seconds: float | None = None,
) -> TableRow:
    """Make the row of a case's slide number `place` from the outputs of one or several models."""
    task, outputs = TASKS[str(spec.get("task") or "classification")], np.atleast_2d(np.asarray(logits, float))
    names = task.names(outputs.shape[1], spec.get("class_names"), spec.get("time_bins"))
    columns = prediction(task, with_reference(outputs, spec), names)
    if task.truth == "time":  # as `xmil predict` writes them
        days, event = case.label if isinstance(case.label, tuple) else (None, None)
        columns |= {"time": days, "event": event}
    return {
        "slide_id": case.slides[place],
        "case_id": case.case_id or case.name,
        "label": task.label_text(case.label, names),
        "predicted": columns.pop("predicted", None),
        "correct": task.correct(outputs[None], [case.label])[0],
        **columns,
        "n": n,
        "features": str(case.paths[place].absolute()),
        "seconds": None if seconds is None else round(seconds, 4),
    }


def prediction(task: Task, outputs: Any, names: Sequence[str]) -> TableRow:
    """Convert the outputs (m, c) of one model or an ensemble to the columns of the task's tables.

    >>> prediction(TASKS["classification"], [[0.0, 1.0]], ["benign", "tumour"])
    {'predicted': 'tumour', 'p:benign': 0.268941, 'p:tumour': 0.731059}
    >>> prediction(TASKS["regression"], [[1.5]], ["value"])
    {'value': 1.5}
    """
    columns = task.describe(np.asarray(outputs)[None], names)
    return {
        key: value if isinstance(value, str) else float(f"{value:.6g}") for key, (value,) in columns.items()
    }
