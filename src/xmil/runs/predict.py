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
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag
from xmil.core.durable import remove_file
from xmil.core.request import takes
from xmil.core.task import with_reference
from xmil.core.text import counted, shorten, text_table
from xmil.data.bags import Case, read_case
from xmil.evaluate import Predictions, draw_figures, write_predictions
from xmil.evaluate.statistics import FEWEST, Interval, count_units, why_no_interval
from xmil.execute import Listener, Stages, Step, Tally, execute
from xmil.models import MILModel
from xmil.network import open_network
from xmil.runs.ensemble import Ensemble, open_models, warnings_of_models, worker_with
from xmil.runs.inputs import Missing, item_of_case, task_cases
from xmil.runs.requests import PredictRequest
from xmil.storage import Item, Record, Run, write_json

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
    summary = PredictSummary(request, models, missing, cases)
    step = Step(
        "predict",
        [item_of_case(case) for case in cases],
        settings=request.with_options(settings_of(request, models)),
        about={**models.about(), **about_request(request), **missing.as_dict()},
        make_worker=worker_with(
            models, device, partial(make_predictor, request), in_process=request.pool.in_process
        ),
        prepare=partial(remove_results, out),
        finish=summary.write,
        doing=f"predicting {request.by}s",
        verb="predicted",
        columns=None,
    )
    tally = execute(step, out, workers=request.pool, listener=listener, restart=request.restart)
    for line in summary.lines:
        listener.say(line)
    several = f" by {len(models.models)} models" if len(models.models) > 1 else ""
    listener.say(f"{len(tally.records)} predicted{several}, {len(tally.failed)} failed. Written to {out}.")
    return Run(out)


def settings_of(request: PredictRequest, models: Ensemble) -> dict[str, Any]:
    """The settings that decide predictions and their measures."""
    names = ("by", "draws", "seed", *(("instances", "repetitions") if request.instances else ()))
    chosen = {**request.places(), "label": list(request.label), "split": list(request.split)}
    chosen |= {name: getattr(request, name) for name in names}
    own = {**models.settings(), **({"reading": request.reading} if request.reading else {})}
    return {**chosen, "models": list(models.digests), **own}


def about_request(request: PredictRequest) -> dict[str, Any]:
    """Entries of run.json on the request."""
    return {"features": request.places()["features"], "request": request.as_dict()}


def remove_results(out: Path) -> None:
    """Remove the tables of the earlier run, which are written again from all predictions."""
    for name in WRITTEN:
        remove_file(out / name)


def draw_samples(bag: Bag, request: PredictRequest) -> list[Bag]:
    """Draw samples of a bag without replacement, in its order; a small bag is one sample.

    The draws depend on the slide's name and the seed.
    """
    if not 0 < request.instances < len(bag):
        return [bag]
    rng = np.random.default_rng([request.seed, crc32((bag.slide_id or "").encode())])
    samples = (rng.choice(len(bag), request.instances, replace=False) for _ in range(request.repetitions))
    return [bag.select(np.sort(rows)) for rows in samples]


def make_predictor(request: PredictRequest, models: Ensemble) -> Stages[Item[Case], Record]:
    """Make the worker that reads a case while the previous one is predicted."""

    def read(item: Item[Case]) -> Bag:
        return read_case(item.what, **request.reading)[0]

    return Stages(read, lambda _, bag: predict_bag(bag, request, models))


def predict_bag(bag: Bag, request: PredictRequest, models: Ensemble) -> Record:
    """Keep the outputs of each model for a bag, averaged over samples, in double precision."""
    samples = draw_samples(bag, request)
    outputs = [np.mean([_outputs(m, part) for part in samples], axis=0) for m in models.models]
    return Record(facts={"outputs": np.stack(outputs).tolist(), "n": len(bag)})


@dataclass
class PredictSummary:
    """The summary of a run: its table, measures and figures; `lines` are for the screen."""

    request: PredictRequest
    models: Ensemble
    missing: Missing
    cases: Sequence[Case]
    lines: list[str] = field(default_factory=list)

    def write(self, tally: Tally) -> dict[str, Any]:
        """Write the tables and figures."""
        request, out = self.request, self.request.out
        cases = [case for case in self.cases if case.name in tally.records]
        facts = [tally.records[case.name].facts for case in cases]
        outputs = np.stack([np.asarray(each["outputs"], dtype=np.float64) for each in facts])
        warnings = warnings_of_models(self.models, cases, self.missing)
        predictions = Predictions(self.models.spec, cases, outputs, [each["n"] for each in facts])
        write_predictions(predictions.columns(), out)
        metrics = predictions.metrics(draws=request.draws, seed=request.seed)
        report = self._report(predictions, metrics, failed=len(tally.failed), warnings=warnings)
        write_json(out / "metrics.json", report)
        if metrics:
            draw_figures(predictions.labelled(), metrics, out, seed=request.seed)
        self.lines.extend(measure_lines(predictions, metrics))
        return {"warnings": warnings}

    def _report(
        self,
        predictions: Predictions,
        metrics: Mapping[str, Interval],
        *,
        failed: int,
        warnings: Sequence[str],
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
            "failed": failed,
            "warnings": list(warnings),
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
