"""`predict_slides`, what models say of a cohort: a table of predictions, how good they are, and the figures.

run.json, failures.csv
predictions.parquet, predictions.csv
metrics.json
roc.png, calibration.png    of classes; values.png of a regression; survival.png of risks
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xmil.core.bag import Bag
from xmil.core.errors import UnsupportedError
from xmil.core.identity import identity
from xmil.core.interval import Interval
from xmil.core.names import listed
from xmil.core.run import Run
from xmil.core.runfiles import write_json
from xmil.data.cases import Case, read_case
from xmil.methods.opening import open_network
from xmil.models import MILModel
from xmil.nn.frozen import frozen
from xmil.predictions.table import Answer, Predictions, write_predictions
from xmil.runs.bag_sample import WHOLE, BagSample
from xmil.runs.cautions import Missing, made_otherwise, seen_warning
from xmil.runs.cohort_run import CohortRun, Tally, as_workers, in_process
from xmil.runs.ensemble import Ensemble, StrPath, bins_warning, ensemble_warning, model_paths
from xmil.runs.inputs import NOTHING, Inputs, Unsaid, reading_of, task_cases
from xmil.runs.listener import Listener
from xmil.runs.rows import with_reference
from xmil.runs.workers.pool import MakeWorker, Stages, Workers, checked_device

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


def predict_slides(
    model: StrPath | Sequence[StrPath],
    features: StrPath,
    *,
    out: StrPath,
    cohort: StrPath | None = None,
    label: str = "",
    time: str = "time",
    event: str = "event",
    split: str | Iterable[str] = (),
    by: str = "slide",
    draws: int = 1000,
    instances: int = 0,
    repetitions: int = 1,
    mpp: float | None = None,
    patch_size: int | None = None,
    format: str = "auto",  # noqa: A002 - the word users know
    class_names: str | Iterable[str] = (),
    device: str = "cpu",
    seed: int = 0,
    restart: bool = False,
    workers: Workers | int = 1,
    follow_links: bool = True,
    full_digests: bool = False,
    listener: Listener | None = None,
) -> Run:
    """Predict every slide of a folder of feature files, or one file, into the folder `out`.

    The same as `xmil predict`, with the same files; `draws` are those of the bootstrap over cases. With
    `instances` each slide is predicted from so many of its patches, drawn `repetitions` times: outputs are
    the means over the draws.
    """
    sample = BagSample(instances, repetitions, seed)
    hear, chosen = listener or Listener(), as_workers(workers)
    where = device if chosen.kind == "ray" else checked_device(device)
    reading = reading_of(mpp, patch_size, format)
    unsaid = Unsaid(tuple(listed(class_names)) or None, Path(features), reading)
    models = Ensemble.load(model_paths(model), where if in_process(chosen) else "cpu", unsaid=unsaid)
    table = None if cohort is None else Path(cohort)
    inputs = Inputs(Path(features), table, tuple(listed(split)), by, follow_links)
    inputs.check_apart(Path(out))
    columns = {"label": label, "time": time, "event": event}
    cases, missing = task_cases(inputs, models.spec, **columns, say=hear.say)
    run = PredictRun(Path(out), models, inputs, columns, where, draws, seed, missing, full_digests, sample)
    what = "slides" if by == "slide" else "cases"
    tally = run.go(cases, workers=chosen, restart=restart, listener=hear, what=what)
    for line in run.lines:
        hear.say(line)
    several = f" by {len(models.models)} models" if len(models.models) > 1 else ""
    hear.say(f"{len(tally.results)} predicted{several}, {len(tally.failed)} failed. Written to {out}.")
    return run.saved()


@dataclass(frozen=True)
class PredictRun(CohortRun[Case, Answer]):
    """A run's folder, models and settings; `columns` are those of the truth."""

    models: Ensemble
    inputs: Inputs
    columns: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    draws: int = 1000
    seed: int = 0
    missing: Missing = field(default_factory=Missing)
    full_digests: bool = False
    sample: BagSample = WHOLE
    lines: list[str] = field(default_factory=list)  # of the measures, for the screen
    kind = "predict"
    verb = "predicted"
    tabled = False

    def settings(self) -> dict[str, Any]:
        """Where the slides come from, how they are measured, and the models' weights."""
        chosen: dict[str, Any] = {**self.inputs.as_dict(), **self.columns, "split": list(self.inputs.splits)}
        chosen |= {"by": self.inputs.by, "draws": self.draws, "seed": self.seed, **self.sample.as_dict()}
        reading = {key: value for key, value in self.models.unsaid.reading.items() if value is not None}
        own = {**self.models.unsaid.as_dict(), **({"reading": reading} if reading else {})}
        return {**chosen, "models": list(self.models.digests), **own}

    def about(self) -> dict[str, Any]:
        """What run.json says beside the settings, with what the feature files held."""
        places = {"features": self.inputs.as_dict()["features"]}
        return {**self.models.about(), **places, **self.missing.as_dict()}

    def slides_of(self, item: Case) -> Sequence[str]:
        """The slides of a case."""
        return item.slides

    def make_worker(self, workers: Workers) -> MakeWorker[Case, Answer]:
        """Workers in other processes load the models from the files that were hashed here."""
        models = self.models
        loaded = models if in_process(workers) else None
        return partial(
            make_predictor, models.paths, models.digests, self.device, models.unsaid, loaded, self.sample
        )

    def outputs(self, items: Sequence[Case]) -> list[Path]:  # noqa: ARG002 - the base's signature
        """Tables, measures and figures."""
        return [self.out / name for name in WRITTEN]

    def begin(self, *, again: bool) -> None:
        """Remove the tables of the earlier run: every case is predicted again."""
        for path in self.outputs(()) if again else ():
            path.unlink(missing_ok=True)

    def warnings(self, items: Sequence[Case], tally: Tally[Answer]) -> list[str]:
        """Sentences on encoders, time bins, slides that are missing and cases of the training."""
        models = self.models
        done = [case for case in items if case.slides[0] in tally.results]
        every = (
            made_otherwise(models.spec, done),
            seen_warning(models.paths, done),
            bins_warning(models.specs),
            ensemble_warning(models.specs, models.paths),
            self.missing.warning(),
        )
        return [warning for warning in every if warning is not None]

    def finish(
        self,
        items: Sequence[Case],
        tally: Tally[Answer],
        workers: Workers,  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Write the tables, the measures and the figures."""
        answers = [(case, tally.results[case.slides[0]]) for case in items if case.slides[0] in tally.results]
        predictions = Predictions.of(self.models.spec, answers)
        write_predictions(predictions.columns(), self.out)
        metrics = predictions.metrics(draws=self.draws, seed=self.seed)
        report = self._report(predictions, metrics, self.warnings(items, tally), failed=len(tally.failed))
        write_json(self.out / "metrics.json", report)
        if metrics:
            draw_figures(predictions.labelled(), metrics, self.out, seed=self.seed)
        self.lines.extend(measure_lines(predictions, metrics))
        every = [(slide, path) for case in items for slide, path in zip(case.slides, case.paths, strict=True)]
        full = self.full_digests
        return {"sources": {slide: identity(path, full=full) for slide, path in every if path.exists()}}

    def _report(
        self, every: Predictions, metrics: Mapping[str, Interval], warnings: list[str], *, failed: int
    ) -> dict[str, Any]:
        """What metrics.json holds; numbers that are not determined are null."""
        known = every.labelled()
        report: dict[str, Any] = {
            "task": self.models.spec.task,
            "by": self.inputs.by,
            "predictions": len(every),
            "labelled": len(known),
            "cases": len({case.case_id or case.name for case in known.cases}),
            "failed": failed,
            "warnings": warnings,
            "interval": {"level": 0.95, "draws": self.draws, "seed": self.seed, "drawn": "cases"},
            "metrics": {name: _plain(found) for name, found in metrics.items()},
        }
        if known.task.truth == "class" and len(known):
            report |= _counts(known)
        if every.models > 1:
            report["each_model"] = [
                {"path": str(path), "metrics": _estimates(every.alone(m).metrics(draws=0))}
                for m, path in enumerate(self.models.paths)
            ]
        return report


def measure_lines(predictions: Predictions, metrics: Mapping[str, Interval]) -> list[str]:
    """The measures with their intervals, one per line."""
    if not metrics:
        return ["No labels are known, so nothing was measured; see --cohort and --label."]
    known = predictions.labelled()
    cases = len({case.case_id or case.name for case in known.cases})
    titles = {name: _title(name) for name in metrics}
    width = max(map(len, titles.values()))
    lines = [f"{titles[name]:<{width}}  {found}" for name, found in metrics.items()]
    return [*lines, f"{len(known)} with a label, of {cases} cases; 95 % intervals over cases."]


def _title(name: str) -> str:
    measure, _, part = name.partition(":")
    title = TITLES.get(measure, measure.replace("_", " "))
    return f"{title} {part}" if part else title


def draw_figures(known: Predictions, metrics: Mapping[str, Interval], folder: Path, *, seed: int) -> None:
    """The figures of labelled predictions that their task has."""
    from xmil.predictions.prediction_plots import draw_survival, draw_values

    task = known.task
    if task.decides:
        _draw_classes(known, metrics, folder, seed=seed)
        return
    truth, numbers = known.truth(), known.numbers[:, 0]
    if task.truth == "values" and truth.shape[1] == 1:
        draw_values(truth[:, 0], numbers, metrics, folder / "values.png", name=known.names[0])
    elif task.truth == "time":
        draw_survival(
            truth[:, 0], truth[:, 1].astype(bool), numbers, metrics["c_index"],
            folder / "survival.png", cases=[case.case_id or case.name for case in known.cases],
        )  # fmt: skip


def _draw_classes(known: Predictions, metrics: Mapping[str, Interval], folder: Path, *, seed: int) -> None:
    from xmil.predictions.prediction_plots import draw_calibration, draw_roc

    p, z, names = known.numbers, known.ranks, known.names
    cases = [case.case_id or case.name for case in known.cases]
    y = np.array(known.labels)
    if known.task.truth == "labels":
        curves = {name: (y[:, c].astype(bool), z[:, c]) for c, name in enumerate(names)}
        hits, sure, what = y.astype(bool).ravel(), p.ravel(), "a label"
        cases_of = [case for case in cases for _ in names]
    else:
        chosen = [1] if len(names) == 2 else range(len(names))
        curves = {names[c]: (y == c, z[:, c]) for c in chosen}
        two = len(names) == 2
        hits, sure = (y == 1, p[:, 1]) if two else (p.argmax(axis=1) == y, p.max(axis=1))
        what, cases_of = (names[1] if two else "the predicted class"), cases
    areas = {name: metrics.get(f"auroc:{name}", metrics["auroc"]) for name in curves}
    draw_roc(curves, areas, folder / "roc.png", cases=cases, seed=seed)
    draw_calibration(hits, sure, metrics["ece"], folder / "calibration.png", what=what, cases=cases_of)


def _counts(known: Predictions) -> dict[str, Any]:
    """How many there are of each class, and of what was predicted for them."""
    names, guess = known.names, known.numbers.argmax(axis=1)
    pairs = Counter((names[case.label], names[g]) for case, g in zip(known.cases, guess, strict=True))
    confusion = {true: {said: pairs[true, said] for said in names} for true in names}
    return {
        "classes": {true: sum(row.values()) for true, row in confusion.items()},
        "confusion": confusion,
    }


def _plain(found: Interval) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in asdict(found).items()}


def _estimates(found: Mapping[str, Interval]) -> dict[str, float | None]:
    return {name: _plain(interval)["estimate"] for name, interval in found.items()}


def make_predictor(
    paths: tuple[Path, ...],
    digests: tuple[str, ...],
    device: str,
    unsaid: Unsaid = NOTHING,
    loaded: Ensemble | None = None,
    sample: BagSample = WHOLE,
) -> Stages[Case, Answer]:
    """The worker of a prediction, with the models that are loaded, or a copy of its own of the same files."""
    models = (loaded or Ensemble.load(paths, device, digests=digests, unsaid=unsaid)).models
    reading = unsaid.reading
    return Stages(lambda case: read_case(case, **reading)[0], lambda _, bag: predict_bag(models, bag, sample))


def predict_bag(models: Sequence[MILModel], bag: Bag, sample: BagSample = WHOLE) -> Answer:
    """The outputs of each model for a bag, in double precision: means over the draws of a sample."""
    drawn = sample.of(bag)
    outputs = [np.mean([_outputs(model, part) for part in drawn], axis=0) for model in models]
    return Answer(np.stack(outputs), len(bag), bag.encoder)


def _outputs(model: MILModel, bag: Bag) -> npt.NDArray[np.float64]:
    with frozen(model), torch.no_grad():
        network, x = open_network(model, bag)
        outputs = network(x)[0].double().cpu().numpy()
    if not np.isfinite(outputs).all():
        raise UnsupportedError(
            f"The outputs of {model.spec.name} are not finite for {bag.called}; check the model."
        )
    return with_reference(np.asarray(outputs), vars(model.spec))
