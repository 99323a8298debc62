"""A run's table of slides: what the model says of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.data.cases import Case

FIRST = ("slide_id", "case_id", "label", "predicted", "correct")
LAST = ("n", "features", "seconds")
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
    said = prediction(logits, spec)
    predicted, index = said.pop("predicted"), said.pop("index")
    label = _label(case.label, spec)
    return {
        "slide_id": case.slides[place],
        "case_id": case.case_id or case.name,
        "label": label,
        "predicted": predicted,
        "correct": None if label is None or index is None else index == case.label,
        **said,
        **_survival(case.label, spec),
        "n": n,
        "features": str(case.paths[place].absolute()),
        "seconds": None if seconds is None else round(seconds, 4),
    }


def prediction(logits: Logits, spec: Mapping[str, Any]) -> Row:
    """What outputs mean: the predicted class with a probability for each, or a value, or a risk.

    An ensemble's class, probabilities and value come from its mean outputs; its risk is the mean of risks.

    >>> prediction([0.0, 1.0], {"task": "classification", "class_names": ["benign", "tumour"]})
    {'predicted': 'tumour', 'index': 1, 'p:benign': 0.268941, 'p:tumour': 0.731059}
    >>> prediction([1.5], {"task": "regression"})
    {'predicted': None, 'index': None, 'value': 1.5}
    """
    each, task = np.atleast_2d(np.asarray(logits, dtype=np.float64)), str(spec.get("task", "classification"))
    z, names = each.mean(axis=0), spec.get("class_names")
    if task == "survival":
        risks = -np.cumprod(_sigmoid(-each), axis=1).sum(axis=1)
        return {"predicted": None, "index": None, "risk": _rounded(risks.mean())}
    if task in ("regression", "cox"):
        word = "value" if task == "regression" else "risk"
        keys = [word] if len(z) == 1 else [f"{word}:{name}" for name in _names(names, len(z))]
        return {"predicted": None, "index": None, **dict(zip(keys, map(_rounded, z), strict=True))}
    z = np.array([-z[0] / 2, z[0] / 2]) if len(z) == 1 and task == "classification" else z
    p = _sigmoid(z) if task == "multilabel" else _softmax(z)
    called = _names(names, len(p))
    chosen = [name for name, value in zip(called, p, strict=True) if value > 0.5]
    top = int(p.argmax())
    predicted = "+".join(chosen) if task == "multilabel" else called[top]
    index = None if task == "multilabel" else top
    chances = {f"p:{name}": _rounded(value) for name, value in zip(called, p, strict=True)}
    return {"predicted": predicted, "index": index, **chances}


def columns(rows: Sequence[Row]) -> list[str]:
    """The columns of a table of rows: names first, outputs between, the rest last."""
    between = dict.fromkeys(key for row in rows for key in row if key not in (*FIRST, *LAST))
    return [*FIRST, *between, *LAST]


def source_of(path: Path) -> list[int]:
    """What tells whether a feature file has changed: its size and time, in nanoseconds."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _label(label: Any, spec: Mapping[str, Any]) -> Any:
    """What is true in one cell: a class or labels by name, a number, a time with `+` where it is censored."""
    task, names = spec.get("task"), spec.get("class_names")
    if isinstance(label, int) and names and 0 <= label < len(names):
        return names[label]
    if not isinstance(label, tuple):
        return label
    if task in ("survival", "cox"):
        return f"{label[0]:g}" + ("" if label[1] else "+")
    if task == "multilabel":
        return "+".join(name for name, on in zip(_names(names, len(label)), label, strict=True) if on)
    return ";".join(f"{value:g}" for value in label)


def _survival(label: Any, spec: Mapping[str, Any]) -> Row:
    """The columns `time` and `event` of models of risks, as `xmil predict` writes them."""
    if spec.get("task") not in ("survival", "cox"):
        return {}
    time, event = label if isinstance(label, tuple) else (None, None)
    return {"time": time, "event": event}


def _names(names: Any, n: int) -> list[str]:
    return [str(name) for name in names] if names and len(names) == n else [str(i) for i in range(n)]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _softmax(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(z - z.max())
    return np.asarray(weights / weights.sum())


def _sigmoid(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(np.exp(-np.logaddexp(0.0, -z)))
