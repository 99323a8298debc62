"""A run of `predict` over a cohort: a table of predictions, how good they are, and the figures.

run.json, failures.csv
predictions.parquet, predictions.csv
metrics.json
roc.png, calibration.png    of classes; values.png of a regression; survival.png of risks
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xmil.core.bag import Bag
from xmil.core.errors import UnsupportedError
from xmil.core.interval import Interval
from xmil.core.runfiles import RunFolder, file_digest, write_json
from xmil.data.cases import Case, read_case
from xmil.data.encoder_names import encoder_warning
from xmil.methods.opening import open_network
from xmil.models import MILModel
from xmil.nn.frozen import frozen
from xmil.predictions.table import Answer, Predictions, write_predictions
from xmil.runs.cautions import Missing, seen_warning
from xmil.runs.ensemble import bins_warning, shared_spec
from xmil.runs.explainer import load_models
from xmil.runs.workers.pool import Outcome, Stages, Workers, process

FIGURES = ("roc.png", "calibration.png", "values.png", "survival.png")
WRITTEN = ("predictions.parquet", "predictions.csv", "metrics.json", *FIGURES)


@dataclass(frozen=True)
class PredictRun:
    """A run's folder, models and settings; `settings` are what the user chose beside them."""

    out: Path
    paths: tuple[Path, ...]
    models: Sequence[MILModel]
    settings: Mapping[str, Any]
    device: str = "cpu"
    draws: int = 1000
    seed: int = 0
    missing: Missing = field(default_factory=Missing)

    @property
    def folder(self) -> RunFolder:
        """The folder, known by the settings and the models' weights."""
        digests = [file_digest(path) for path in self.paths]
        chosen = {**self.settings, "draws": self.draws, "seed": self.seed, "models": digests}
        return RunFolder(self.out, "predict", chosen)

    def about(self) -> dict[str, Any]:
        """What run.json says beside the settings."""
        models = [
            {"path": str(path), "digest": file_digest(path), "spec": asdict(model.spec)}
            for path, model in zip(self.paths, self.models, strict=True)
        ]
        spec = shared_spec([model.spec for model in self.models])
        shared = {"class_names": spec.class_names, "task": spec.task, "features": self.settings["features"]}
        first = {**models[0], "spec": asdict(spec)}
        return {"model": first, "models": models, **shared, **self.missing.as_dict()}

    def predict(
        self,
        cases: Sequence[Case],
        *,
        engine: Workers | None = None,
        restart: bool = False,
        reading: dict[str, Any] | None = None,
        on_case: Callable[[], None] = lambda: None,
    ) -> PredictTally:
        """Predict every case and write the tables; a case that fails is recorded and the rest goes on."""
        folder = self.folder
        with folder.opened(self.about(), folders=(), restart=restart):
            for name in WRITTEN:  # of an earlier run: never beside a newer table
                (self.out / name).unlink(missing_ok=True)
            tally = PredictTally()
            answers: dict[str, Answer] = {}
            outcomes = predict_cases(self.paths, cases, device=self.device, engine=engine, reading=reading)
            for outcome in outcomes:
                if outcome.result is None:
                    tally.failed |= dict.fromkeys(outcome.item.slides, outcome.error or "no result")
                else:
                    answers[outcome.item.name] = outcome.result
                on_case()
            folder.write_failures(tally.failed)
            if answers:
                found = [(case, answers[case.name]) for case in cases if case.name in answers]
                self._write(tally, found)
            return tally

    def _write(self, tally: PredictTally, found: list[tuple[Case, Answer]]) -> None:
        spec = shared_spec([model.spec for model in self.models])
        encoders = [answer.encoder for _, answer in found]
        warnings = (
            encoder_warning(spec.encoder, encoders),
            seen_warning(self.paths, [case for case, _ in found]),
            bins_warning([model.spec for model in self.models]),
            self.missing.warning(),
        )
        tally.warnings = [warning for warning in warnings if warning is not None]
        tally.predictions = Predictions.of(spec, found)
        write_predictions(tally.predictions.columns(), self.out)
        tally.metrics = tally.predictions.metrics(draws=self.draws, seed=self.seed)
        write_json(self.out / "metrics.json", self._report(tally))
        if tally.metrics:
            draw_figures(tally.predictions.labelled(), tally.metrics, self.out, seed=self.seed)

    def _report(self, tally: PredictTally) -> dict[str, Any]:
        """What metrics.json holds; numbers that are not determined are null."""
        every = tally.predictions
        assert every is not None  # noqa: S101  # narrows the type for mypy
        known = every.labelled()
        report: dict[str, Any] = {
            "task": self.models[0].spec.task,
            "by": self.settings.get("by", "slide"),
            "predictions": len(every),
            "labelled": len(known),
            "cases": len({case.case_id or case.name for case in known.cases}),
            "failed": len(tally.failed),
            "warnings": tally.warnings,
            "interval": {"level": 0.95, "draws": self.draws, "seed": self.seed, "drawn": "cases"},
            "metrics": {name: _plain(found) for name, found in tally.metrics.items()},
        }
        if known.task.truth == "class" and len(known):
            report |= _counts(known)
        if every.models > 1:
            report["each_model"] = [
                {"path": str(path), "metrics": _estimates(every.alone(m).metrics(draws=0))}
                for m, path in enumerate(self.paths)
            ]
        return report


@dataclass
class PredictTally:
    """What a run did: predictions, how good they are, what failed with the reason, and what to warn of."""

    predictions: Predictions | None = None
    metrics: dict[str, Interval] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


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


def predict_cases(
    models: Sequence[Path],
    cases: Sequence[Case],
    *,
    device: str = "cpu",
    engine: Workers | None = None,
    reading: dict[str, Any] | None = None,
) -> Iterator[Outcome[Case, Answer]]:
    """Outputs of one or several checkpoints for each case, as they are done; what fails has a reason.

    `reading` are options of `read_bag`.
    """
    make = partial(make_predictor, tuple(models), device, reading or {})
    return process(cases, make, engine)


def make_predictor(paths: tuple[Path, ...], device: str, reading: dict[str, Any]) -> Stages[Case, Answer]:
    """The worker of a prediction: one copy of the models for each process."""
    models = load_models(paths, device)
    return Stages(lambda case: read_case(case, **reading)[0], lambda _, bag: predict_bag(models, bag))


def predict_bag(models: Sequence[MILModel], bag: Bag) -> Answer:
    """The outputs of each model for a bag, in double precision."""
    outputs = [_outputs(model, bag) for model in models]
    return Answer(np.stack(outputs), len(bag), bag.encoder)


def _outputs(model: MILModel, bag: Bag) -> npt.NDArray[np.float64]:
    with frozen(model), torch.no_grad():
        network, x = open_network(model, bag)
        outputs = network(x)[0].double().cpu().numpy()
    if not np.isfinite(outputs).all():
        raise UnsupportedError(f"The outputs of {model.spec.name} are not finite for {bag.slide_id!r}.")
    return np.asarray(outputs)
