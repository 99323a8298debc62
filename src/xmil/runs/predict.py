"""`predict_slides`: predict a cohort, measure how good the predictions are, and draw figures.

run.json, failures.csv
predictions.parquet, predictions.csv
metrics.json
roc.png, calibration.png    of classes; values.png of a regression; survival.png of risks
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag
from xmil.core.durable import identity, remove_file
from xmil.core.request import takes
from xmil.core.task import with_reference
from xmil.core.text import counted, shorten, text_table
from xmil.data.bags import Case, read_case
from xmil.evaluate import Answer, Predictions, draw_figures, write_predictions
from xmil.evaluate.statistics import FEWEST, Interval, count_units, why_no_interval
from xmil.models import MILModel
from xmil.network import open_network
from xmil.runs import Listener
from xmil.runs.cohort_run import Tally
from xmil.runs.ensemble import ModelRun, open_models
from xmil.runs.inputs import task_cases
from xmil.runs.requests import PredictRequest
from xmil.runs.workers.pool import Stages
from xmil.storage import Run, write_json

FIGURES = ("roc.png", "calibration.png", "values.png", "survival.png")
WRITTEN = ("predictions.parquet", "predictions.csv", "metrics.json", *FIGURES)
TITLES = {
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "balanced_accuracy": "balanced accuracy",
    "brier": "Brier score",
    "ece": "calibration error",
    "mae": "MAE",
    "rmse": "RMSE",
    "r2": "R2",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "medape": "MedAPE (%)",
    "c_index": "C-index",
}


@takes(PredictRequest, "model", "features")
def predict_slides(request: PredictRequest, *, listener: Listener | None = None) -> Run:
    """Predict every slide of a folder of feature files, or one file, into the folder `out`.

    Same as `xmil predict`, with the same options and files; `draws` is the number of bootstrap draws over
    cases. With `instances` each slide is predicted from that many of its patches, drawn `repetitions` times:
    outputs are the means over the draws.
    """
    listener, out = listener or Listener(), request.out
    models, device = open_models(request)
    request.check_apart(out)
    cases, missing = task_cases(request, models.spec, say=listener.say)
    run = PredictRun(out, request, models, device, missing)
    tally = run.execute(cases, listener)
    for line in run.lines:
        listener.say(line)
    several = f" by {len(models.models)} models" if len(models.models) > 1 else ""
    listener.say(f"{len(tally.results)} predicted{several}, {len(tally.failed)} failed. Written to {out}.")
    return Run(run.out)


def draw_samples(bag: Bag, request: PredictRequest) -> list[Bag]:
    """Draw samples of a bag without replacement, in its order; a small bag is one sample.

    The draws depend on the slide's name and the seed.
    """
    if not 0 < request.instances < len(bag):
        return [bag]
    rng = np.random.default_rng([request.seed, crc32((bag.slide_id or "").encode())])
    samples = (rng.choice(len(bag), request.instances, replace=False) for _ in range(request.repetitions))
    return [bag.select(np.sort(rows)) for rows in samples]


@dataclass(frozen=True)
class PredictRun(ModelRun[Answer]):
    request: PredictRequest
    lines: list[str] = field(default_factory=list)  # of the measures, for the screen
    kind = "predict"
    doing = "predicting"
    verb = "predicted"
    tabled = False

    def settings(self) -> dict[str, Any]:
        request = self.request
        names = ("by", "draws", "seed", *(("instances", "repetitions") if request.instances else ()))
        chosen = {**request.places(), "label": list(request.label), "split": list(request.split)}
        chosen |= {name: getattr(request, name) for name in names}
        own = {**self.models.settings(), **({"reading": request.reading} if request.reading else {})}
        return {**chosen, "models": list(self.models.digests), **own}

    def about(self) -> dict[str, Any]:
        places = {"features": self.request.places()["features"], "request": self.request.as_dict()}
        return {**self.models.about(), **places, **self.missing.as_dict()}

    def worker(self) -> Stages[Case, Answer]:
        """Read a case while the previous one is predicted."""
        reading = self.request.reading
        return Stages(lambda case: read_case(case, **reading)[0], lambda _, bag: self._predict(bag))

    def _predict(self, bag: Bag) -> Answer:
        """Return the outputs of each model for a bag, averaged over samples, in double precision."""
        samples = draw_samples(bag, self.request)
        outputs = [np.mean([_outputs(m, part) for part in samples], axis=0) for m in self.models.models]
        return Answer(np.stack(outputs), len(bag), bag.encoder)

    def outputs(self, items: Sequence[Case]) -> list[Path]:  # noqa: ARG002 - the base's signature
        return [self.out / name for name in WRITTEN]

    def begin(self, *, again: bool) -> None:
        """Remove the tables of the earlier run, because every case is predicted again."""
        for path in self.outputs(()) if again else ():
            remove_file(path)

    def finish(self, items: Sequence[Case], tally: Tally[Answer]) -> Mapping[str, Any]:
        cases = [case for case in items if case.slides[0] in tally.results]
        answers = [tally.results[case.slides[0]] for case in cases]
        outputs = np.stack([answer.outputs for answer in answers])
        predictions = Predictions(self.models.spec, cases, outputs, [answer.n for answer in answers])
        write_predictions(predictions.columns(), self.out)
        metrics = predictions.metrics(draws=self.request.draws, seed=self.request.seed)
        report = self._report(predictions, metrics, tally)
        write_json(self.out / "metrics.json", report)
        if metrics:
            draw_figures(predictions.labelled(), metrics, self.out, seed=self.request.seed)
        self.lines.extend(measure_lines(predictions, metrics))
        read = [(slide, path) for case in cases for slide, path in zip(case.slides, case.paths, strict=True)]
        return {"sources": {slide: identity(path) for slide, path in read if path.exists()}}

    def _report(
        self, predictions: Predictions, metrics: Mapping[str, Interval], tally: Tally[Answer]
    ) -> dict[str, Any]:
        """Make the content of metrics.json; undefined numbers are null."""
        labelled, request, outputs = predictions.labelled(), self.request, predictions.outputs
        drawn, cases = labelled.unit + "s", count_units(labelled.units)
        none = why_no_interval(cases, labelled.unit) if cases else None
        report: dict[str, Any] = {
            "task": self.models.spec.task,
            "by": self.request.by,
            "predictions": len(predictions),
            "labelled": len(labelled),
            "cases": cases,
            "failed": len(tally.failed),
            "warnings": tally.warnings,
            "interval": {"level": 0.95, "draws": request.draws, "seed": request.seed, "drawn": drawn}
            | ({"none": none} if none else {}),
            "metrics": {name: _plain(interval) for name, interval in metrics.items()},
        }
        if labelled.task.truth == "class" and len(labelled):
            report |= _counts(labelled)
        if len(self.models.paths) > 1:
            singles = [replace(predictions, outputs=outputs[:, [m]]) for m in range(len(self.models.paths))]
            report["each_model"] = [
                {
                    "path": str(path),
                    "metrics": {k: _plain(v)["estimate"] for k, v in single.metrics(draws=0).items()},
                }
                for path, single in zip(self.models.paths, singles, strict=True)
            ]
        return report


def measure_lines(predictions: Predictions, metrics: Mapping[str, Interval]) -> list[str]:
    """Write the measures with their intervals, one per line."""
    if not metrics:
        return ["Nothing was measured, because no labels are known; see `cohort=` and `label=`."]
    labelled = predictions.labelled()
    rows = []
    for name, interval in metrics.items():
        measure, _, part = name.partition(":")
        title = TITLES.get(measure, measure.replace("_", " "))
        rows.append([f"{title} {part}" if part else title, str(interval)])
    lines = text_table(rows).splitlines()
    cases = count_units(labelled.units)
    over = f"{len(labelled)} with a label, of {counted(cases, labelled.unit)}"
    alone = ", taken as independent: no case_id" if labelled.unit == "slide" else ""
    intervals = why_no_interval(cases, labelled.unit) or f"95 % intervals over {labelled.unit}s"
    if cases >= FEWEST and any(not own.exists for own in metrics.values() if not math.isnan(own.estimate)):
        few = f"fewer than {FEWEST} {labelled.unit}s have, or lack, the class or the event"
        intervals += f", none if all draws agree or {few}"
    lines.append(f"{over}{alone}; {intervals}.")
    if one_sided := predictions.one_sided:
        rest = "; means are over the others" if len(one_sided) < len(labelled.spec.names) else ""
        lines.append(f"No measure compares {shorten(one_sided, 5)}: all have that label, or none has{rest}.")
    if labelled.task.truth == "class" and len(labelled) > 1:
        guesses = set(labelled.numbers.argmax(axis=1).tolist())
        if len(guesses) == 1 and len(set(labelled.labels)) > 1:
            lines.append(f"The model predicts the same class for all: {labelled.spec.names[guesses.pop()]}.")
    return lines


def _counts(labelled: Predictions) -> dict[str, Any]:
    """Count cases by class, and by class and prediction."""
    names, guess = labelled.spec.names, labelled.numbers.argmax(axis=1)
    pairs = Counter((names[case.label], names[g]) for case, g in zip(labelled.cases, guess, strict=True))
    confusion = {true: {guessed: pairs[true, guessed] for guessed in names} for true in names}
    return {
        "classes": {true: sum(row.values()) for true, row in confusion.items()},
        "confusion": confusion,
    }


def _plain(interval: Interval) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in asdict(interval).items()}


def _outputs(model: MILModel, bag: Bag) -> npt.NDArray[np.float64]:
    network, x = open_network(model, bag)
    return with_reference(network.outputs(x), vars(model.spec))
