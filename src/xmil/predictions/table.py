"""Predictions of a cohort as a table, and how good they are.

An ensemble's outputs are the mean of its models' outputs, its risk and survival function the mean of theirs,
as the explained risk is; `spread` is the standard deviation over the models
of the number that counts: the probability of the predicted class, the value, the risk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.interval import Interval
from xmil.core.runfiles import write_table
from xmil.core.storage import write_atomically
from xmil.data.cases import Case
from xmil.models.base import ModelSpec
from xmil.models.tasks import CLASS_TASKS
from xmil.predictions.metrics import (
    class_metrics,
    log_odds,
    multilabel_metrics,
    probabilities,
    risk_metrics,
    value_metrics,
)

Floats = npt.NDArray[np.float64]
Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Answer:
    """What the models say of a bag: outputs (m, c), its number of instances, the encoder of its features."""

    outputs: npt.NDArray[np.float64]
    n: int
    encoder: str | None = None


@dataclass(frozen=True, eq=False)
class Predictions:
    """Outputs (n, m, c) of m models for n cases."""

    spec: ModelSpec
    cases: Sequence[Case]
    outputs: Floats
    sizes: Sequence[int]

    @classmethod
    def of(cls, spec: ModelSpec, answers: Iterable[tuple[Case, Answer]]) -> Predictions:
        """The predictions of the cases that have an answer."""
        pairs = list(answers)
        outputs = np.stack([answer.outputs for _, answer in pairs])
        return cls(spec, [case for case, _ in pairs], outputs, [answer.n for _, answer in pairs])

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def models(self) -> int:
        """How many models the ensemble has."""
        return int(self.outputs.shape[1])

    @property
    def mean(self) -> Floats:
        """The ensemble's outputs (n, c)."""
        return np.asarray(self.outputs.mean(axis=1))

    @property
    def chances(self) -> Floats:
        """Probabilities (n, classes) of a model with classes."""
        return probabilities(self.mean, self.spec.task)

    @property
    def ranks(self) -> Floats:
        """Log odds (n, classes), which rank as the probabilities do."""
        return log_odds(self.mean, self.spec.task)

    @property
    def risks(self) -> Floats:
        """Risks (n,) of a survival or Cox model; of an ensemble the mean of its models' risks."""
        return np.asarray(self._each_risk().mean(axis=1))

    @property
    def names(self) -> list[str]:
        """Names of the classes, values or time bins; numbers where they have none."""
        single = self.spec.n_classes == 1 and self.spec.task == "classification"
        n = 2 if single else self.spec.n_classes
        known = self.spec.target_names
        return [str(name) for name in known[:n]] if known and len(known) >= n else [str(i) for i in range(n)]

    def columns(self) -> Columns:
        """The table: who, what is true, what was predicted, and the numbers behind it."""
        who: Columns = {
            "slide_id": [";".join(case.slides) for case in self.cases],
            "case_id": [case.case_id or case.name for case in self.cases],
        }
        said = self._classes() if self.spec.task in CLASS_TASKS else self._values()
        spread = {} if self.models == 1 else {"spread": self.spread().tolist()}
        return {**who, **said, **spread, "n": list(self.sizes)}

    def spread(self) -> Floats:
        """The standard deviation (n,) over the models."""
        rows = np.arange(len(self))
        task = self.spec.task
        if task == "multilabel":
            each = probabilities(self.outputs, task)  # (n, m, c)
            return np.asarray(each.std(axis=1, ddof=1).mean(axis=1))
        if task == "classification":
            chosen = self.chances.argmax(axis=1)
            return np.asarray(probabilities(self.outputs, task)[rows, :, chosen].std(axis=1, ddof=1))
        if task == "regression":
            return np.asarray(self.outputs.std(axis=1, ddof=1).mean(axis=1))
        return np.asarray(self._each_risk().std(axis=1, ddof=1))

    def _each_risk(self) -> Floats:
        """The risks (n, m) of each model."""
        return np.stack([risks(self.outputs[:, m], self.spec.task) for m in range(self.models)], axis=1)

    def _classes(self) -> Columns:
        p, names = self.chances, self.names
        labels = [case.label for case in self.cases]
        if self.spec.task == "multilabel":
            said = ["+".join(name for name, on in zip(names, row > 0.5, strict=True) if on) for row in p]
            true = [None if t is None else "+".join(names[c] for c, on in enumerate(t) if on) for t in labels]
        else:
            said = [names[c] for c in p.argmax(axis=1)]
            true = [None if label is None else names[label] for label in labels]
        correct = [None if t is None else t == s for t, s in zip(true, said, strict=True)]
        logits = names if self.mean.shape[1] == len(names) else names[1:]
        return {
            "label": true,
            "predicted": said,
            "correct": correct,
            **_numbered("p", names, p),
            **_numbered("logit", logits, self.mean),
        }

    def _values(self) -> Columns:
        if self.spec.task == "regression":
            return {
                **_spoken("label", self.names, self._truth(self.spec.n_classes)),
                **_spoken("value", self.names, self.mean),
            }
        truth = self._truth(2)
        time, event = truth[:, 0].tolist(), truth[:, 1].tolist()
        found: Columns = {
            "time": [None if np.isnan(t) else t for t in time],
            "event": [None if np.isnan(e) else bool(e) for e in event],
            "risk": self.risks.tolist(),
        }
        if self.spec.task == "survival":
            alive = np.cumprod(1 - probabilities(self.outputs, "survival"), axis=2).mean(axis=1)
            found |= {**_numbered("S", self.names, alive), **_numbered("logit", self.names, self.mean)}
        return found

    def _truth(self, width: int) -> Floats:
        """Labels (n, width) as numbers, nan where there is none."""
        rows = [_row(case.label, width) for case in self.cases]
        return np.array(rows, dtype=np.float64).reshape(len(self), width)

    def labelled(self) -> Predictions:
        """The predictions whose truth is known."""
        rows = [i for i, case in enumerate(self.cases) if _known(case.label)]
        return Predictions(
            self.spec, [self.cases[i] for i in rows], self.outputs[rows], [self.sizes[i] for i in rows]
        )

    def metrics(self, **options: Any) -> dict[str, Interval]:
        """How good the labelled predictions are; `options` are those of the bootstrap, drawn by case."""
        known = self.labelled()
        if not len(known):
            return {}
        options = {"cases": [case.case_id or case.name for case in known.cases], **options}
        labels = [case.label for case in known.cases]
        task = self.spec.task
        if task in CLASS_TASKS:
            measure = class_metrics if task == "classification" else multilabel_metrics
            return measure(np.array(labels), known.chances, scores=known.ranks, names=known.names, **options)
        truth = known._truth(2 if task in ("survival", "cox") else self.spec.n_classes)
        if task != "regression":
            return risk_metrics(truth[:, 0], truth[:, 1], known.risks, **options)
        each = [value_metrics(truth[:, c], known.mean[:, c], **options) for c in range(truth.shape[1])]
        if len(each) == 1:
            return each[0]
        pairs = [(name, own) for name, own in zip(known.names, each, strict=True)]
        return {f"{key}:{name}": value for name, own in pairs for key, value in own.items()}

    def alone(self, model: int) -> Predictions:
        """The predictions of one model of the ensemble."""
        return Predictions(self.spec, self.cases, self.outputs[:, model : model + 1], self.sizes)


def risks(outputs: Floats, task: str) -> Floats:
    """Risks (n,) from outputs (n, c): a log risk, or minus the sum of the survival function."""
    if task == "cox":
        return np.asarray(outputs[:, 0])
    return np.asarray(-np.cumprod(1 - probabilities(outputs, "survival"), axis=1).sum(axis=1))


def write_predictions(columns: Columns, folder: Path) -> None:
    """predictions.parquet and predictions.csv."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(columns)
    write_atomically(folder / "predictions.parquet", lambda part: pq.write_table(table, part))
    rows = ([_cell(value) for value in row] for row in zip(*columns.values(), strict=True))
    write_table(folder / "predictions.csv", list(columns), rows)


def _known(label: Any) -> bool:
    if isinstance(label, tuple):
        return all(_known(part) for part in label)
    return label is not None and not (isinstance(label, float) and np.isnan(label))


def _row(label: Any, width: int) -> list[float]:
    parts = label if isinstance(label, tuple) else (label,)
    return (
        [np.nan if part is None else float(part) for part in parts]
        if len(parts) == width
        else [np.nan] * width
    )


def _numbered(kind: str, names: Sequence[str], values: Floats) -> Columns:
    return {f"{kind}:{name}": values[:, c].tolist() for c, name in enumerate(names)}


def _spoken(kind: str, names: Sequence[str], values: Floats) -> Columns:
    """One column under the kind's own name, or one for each name; None where there is no number."""
    cells = [[None if np.isnan(v) else v for v in column] for column in values.T.tolist()]
    return (
        {kind: cells[0]} if len(names) == 1 else {f"{kind}:{n}": c for n, c in zip(names, cells, strict=True)}
    )


def _cell(value: Any) -> Any:
    return f"{value:.8g}" if isinstance(value, float) else value
