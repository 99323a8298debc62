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
from xmil.core.task import TASKS, Columns, Floats, Task, as_row, references
from xmil.data.cases import Case
from xmil.models.base import ModelSpec
from xmil.predictions.metrics import class_metrics, multilabel_metrics, risk_metrics, value_metrics


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
    def task(self) -> Task:
        """What the outputs mean."""
        return TASKS[self.spec.task]

    @property
    def numbers(self) -> Floats:
        """What the ensemble says (n, k): probabilities of classes, values, or risks."""
        return self.task.answer(self.outputs)

    @property
    def ranks(self) -> Floats:
        """Log odds (n, classes), which rank as the probabilities do."""
        return self.task.log_odds(self.outputs.mean(axis=1))

    @property
    def labels(self) -> list[Any]:
        """What is true of each case, None where it is not known."""
        return [case.label for case in self.cases]

    @property
    def names(self) -> list[str]:
        """Names of the classes, values or time bins; numbers where they have none."""
        return self.spec.names

    def columns(self) -> Columns:
        """The table: who, what is true, what was predicted, and the numbers behind it."""
        who: Columns = {
            "slide_id": [";".join(case.slides) for case in self.cases],
            "case_id": [case.case_id or case.name for case in self.cases],
        }
        said = prediction_columns(self.task, self.outputs, labels=self.labels, names=self.names)
        spread = {} if self.models == 1 else {"spread": self.task.spread(self.outputs).tolist()}
        return {**who, **said, **spread, "n": list(self.sizes)}

    def truth(self) -> Floats:
        """Labels (n, width) as numbers, nan where there is none."""
        width = 2 if self.task.truth == "time" else len(self.names)
        rows = [as_row(label, width) for label in self.labels]
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
        if self.task.decides:
            measure = class_metrics if self.task.truth == "class" else multilabel_metrics
            labels = np.array(known.labels)
            return measure(labels, known.numbers, scores=known.ranks, names=known.names, **options)
        truth, numbers = known.truth(), known.numbers
        if self.task.truth == "time":
            return risk_metrics(truth[:, 0], truth[:, 1], numbers[:, 0], **options)
        known_reference = getattr(self.spec, "reference", None)
        reference = references(known_reference, truth.shape[1]) if known_reference is not None else None
        each = [
            value_metrics(
                truth[:, c], numbers[:, c], reference=None if reference is None else reference[c], **options
            )
            for c in range(truth.shape[1])
        ]
        if len(each) == 1:
            return each[0]
        pairs = [(name, own) for name, own in zip(known.names, each, strict=True)]
        return {f"{key}:{name}": value for name, own in pairs for key, value in own.items()}

    def alone(self, model: int) -> Predictions:
        """The predictions of one model of the ensemble."""
        return Predictions(self.spec, self.cases, self.outputs[:, model : model + 1], self.sizes)


def prediction_columns(
    task: Task, outputs: Floats, *, labels: Sequence[Any], names: Sequence[str]
) -> Columns:
    """The columns of a table from outputs (n, m, c): what is true, what was said, and what lies behind it."""
    said = task.said(outputs, names)
    found = {**task.true(labels, names)}
    if task.decides:
        found |= {"predicted": said.pop("predicted"), "correct": task.correct(outputs, labels)}
    return {**found, **said, **task.behind(outputs, names)}


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


def _cell(value: Any) -> Any:
    return f"{value:.8g}" if isinstance(value, float) else value
