"""`xmil predict`: what a model, or an ensemble, says of every slide, and how good it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xmil.cli import _options, _workers
from xmil.cli._cohort import checked_device, listed, progress_bar, task_cases
from xmil.cli._report import print_failures
from xmil.core.errors import InputError

if TYPE_CHECKING:
    from xmil.runs.predict import PredictRun, PredictTally

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
    "c_index": "C-index",
}


def predict(
    model: _options.Models,
    features: _options.Features,
    out: Annotated[Path, typer.Option(help="Folder for results.")],
    cohort: _options.CohortTable = None,
    label: _options.Labels = "",
    time: _options.Time = "time",
    event: _options.Event = "event",
    split: _options.Splits = "",
    by: _options.By = "slide",
    draws: Annotated[int, typer.Option(help="Draws of the bootstrap, over cases.")] = 1000,
    device: _options.Device = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    restart: Annotated[
        bool, typer.Option("--restart", help="Replace an earlier run with other settings in --out.")
    ] = False,
    engine: _workers.Kind = "local",
    workers: _workers.WorkerCount = 0,
    address: _workers.Address = "",
    cpus: _workers.Cpus = 1.0,
    gpus: _workers.Gpus = 0.0,
) -> int:
    """Predict every slide: probabilities, values or risks, with measures where the truth is known."""
    from xmil.models.checkpoints.files import checkpoint_files
    from xmil.runs.explainer import load_models
    from xmil.runs.predict import PredictRun

    chosen = _workers.workers_of(
        engine, workers=workers, address=address, cpus=cpus, gpus=gpus, device=device
    )
    paths = tuple(file for path in model for file in checkpoint_files(path))
    models = load_models(paths)
    columns = {"label": label, "time": time, "event": event}
    cases, missing = task_cases(features, cohort, models[0].spec, **columns, splits=listed(split), by=by)
    where = device if chosen.kind == "ray" else checked_device(device)
    settings = {
        "features": str(features.resolve()),
        "cohort": None if cohort is None else str(cohort.resolve()),
        **columns,
        "split": listed(split),
        "by": by,
    }
    run = PredictRun(out, paths, models, settings, where, draws, seed, missing)
    with progress_bar("slides" if by == "slide" else "cases", len(cases)) as advance:
        tally = run.predict(cases, engine=chosen, restart=restart, on_case=advance)
    return _report(run, tally)


def _report(run: PredictRun, tally: PredictTally) -> int:
    """A few lines on the screen; the exit code."""
    print_failures(tally.failed)
    if tally.predictions is None:
        raise InputError(f"No slide could be predicted; {run.out / 'failures.csv'} says why.")
    for warning in tally.warnings:
        print(f"warning: {warning}")
    for line in _table(tally):
        print(line)
    several = f" by {tally.predictions.models} models" if tally.predictions.models > 1 else ""
    done, failed = len(tally.predictions), len(tally.failed)
    print(f"{done} predicted{several}, {failed} failed. Written to {run.out}.")
    return 1 if tally.failed else 0


def _table(tally: PredictTally) -> list[str]:
    """The measures with their intervals, one a line."""
    if not tally.metrics or tally.predictions is None:
        return ["No label is known: there is nothing to measure against; see --cohort and --label."]
    known = tally.predictions.labelled()
    cases = len({case.case_id or case.name for case in known.cases})
    titles = {name: _title(name) for name in tally.metrics}
    width = max(map(len, titles.values()))
    lines = [f"{titles[name]:<{width}}  {found}" for name, found in tally.metrics.items()]
    return [*lines, f"{len(known)} with a label, of {cases} cases; 95 % intervals over cases."]


def _title(name: str) -> str:
    measure, _, part = name.partition(":")
    title = TITLES.get(measure, measure.replace("_", " "))
    return f"{title} {part}" if part else title
