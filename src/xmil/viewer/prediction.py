"""What a model's outputs say, from the logits alone: probabilities, a value, a risk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

VALUES = {"regression": "value", "cox": "risk", "survival": "risk"}


@dataclass(frozen=True)
class Prediction:
    """Names and numbers to show: `numbers` are probabilities, or the values where there are no classes."""

    labels: list[str]
    numbers: list[float]
    probabilities: list[float] | None
    value: float | None


def predict(logits: Sequence[float], task: str, names: Sequence[str] | None) -> Prediction:
    """The prediction that logits (c,) stand for.

    >>> predict([0.0, 0.0], "classification", ["benign", "tumour"]).numbers
    [0.5, 0.5]
    >>> predict([0.0, 0.0], "survival", None)  # S = 1/2, 1/4
    Prediction(labels=['risk'], numbers=[-0.75], probabilities=None, value=-0.75)
    """
    z = np.asarray(logits, dtype=np.float64)
    if task in VALUES:
        numbers = [-float(np.cumprod(_sigmoid(-z)).sum())] if task == "survival" else z.tolist()
        labels = _labels(len(numbers), names if task == "regression" else None, VALUES[task])
        return Prediction(labels, numbers, None, numbers[0] if len(numbers) == 1 else None)
    if len(z) == 1 and task == "classification":  # one logit stands for two classes
        z = np.array([-z[0] / 2, z[0] / 2])
    p = _sigmoid(z) if task == "multilabel" else _softmax(z)
    return Prediction(_labels(len(p), names, None), p.tolist(), p.tolist(), None)


def _labels(n: int, names: Sequence[str] | None, single: str | None) -> list[str]:
    if names is not None and len(names) == n:
        return [str(name) for name in names]
    return [single] if single and n == 1 else [str(i) for i in range(n)]


def _softmax(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(z - z.max()) if len(z) else z
    return np.asarray(weights / weights.sum())


def _sigmoid(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(np.exp(-np.logaddexp(0.0, -z)))
