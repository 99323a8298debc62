"""`xmil train`: train models from feature files and a table of labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen, progress_bars
from xmil.core.request import OUTPUT, Request, option
from xmil.core.text import counted

if TYPE_CHECKING:
    from xmil.training.config import Config
    from xmil.training.fit import Job, OnStep, Step
    from xmil.training.train import TrainOutcome


class TrainRequest(Request):
    """Train models from a file of settings."""

    config: Path = option("TOML file of settings; see docs/howto/training.md.", argument=True)
    set: tuple[Any, ...] = option("Change a setting: --set optim.lr=1e-3; may be repeated.", ())
    features: tuple[Path, ...] = option("Folder of feature files; may be repeated.", ())
    cohort: Path | None = option("Table of slides and labels.", None)
    out: Path | None = option(
        "Folder for models; an interrupted run continues where it stopped.", None, panel=OUTPUT
    )
    restart: bool = option("Delete the models in the folder and train again.", False, panel=OUTPUT)
    dry_run: bool = option(
        "Print the resolved settings, check cohort and features, and stop.", False, panel=OUTPUT
    )


@with_examples("train config.toml", "train config.toml --set optim.lr=1e-3 --out models")
@command(TrainRequest)
def train(request: TrainRequest, screen: Screen) -> int:
    """Train models from a file of settings: folds, repeats and a grid in one command."""
    from xmil.training.config import dumps, load_config, plain
    from xmil.training.train import train as run_training
    from xmil.training.training_set import check_columns

    folders = [str(folder) for folder in request.features]
    flags = {
        "out": request.out and str(request.out),
        "data.features": (folders[0] if len(folders) == 1 else folders) or None,
        "data.cohort": request.cohort and str(request.cohort),
    }
    named = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    settings = load_config(request.config, [*map(str, request.set), *named])
    if request.dry_run:
        print(dumps(plain(settings)), end="")
        check_columns(settings)
        return _check_plan(settings)
    with progress_bars() as bars:
        outcome = run_training(settings, restart=request.restart, on_job=lambda job, _: _watch(job, bars))
    if outcome.reports and screen.as_json:
        about = {name: getattr(outcome, name) for name in ("best", "notes", "trained", "found", "failed")}
        print(json.dumps({"out": str(settings.out), **about}, indent=2, default=str))
    elif outcome.reports:
        _report(settings, outcome, screen)
    if not outcome.best:
        return 2
    return 1 if outcome.failed else 0


def _check_plan(settings: Config) -> int:
    """Print, as comments of the file, what a run would do and leave out; raise what it would raise."""
    from xmil.training.train import make_plan

    folders = settings.data.features
    inputs = [settings.data.cohort, *([folders] if isinstance(folders, str) else folders)]
    if not all(Path(one).exists() for one in inputs):
        return 0
    plan = make_plan(settings)
    for note in plan.training_set.notes:
        print(f"# {settings.data.cohort}: {note}")
    print(f"# {counted(len(plan.jobs), 'model')} of {counted(len(plan.training_set), 'bag')}")
    return 0


def _watch(job: Job, progress: Any) -> OnStep:
    """Show a bar for one model: current loss, best of the monitored measure, remaining time."""
    settings = job.config.train
    for old in list(progress.task_ids):
        progress.remove_task(old)
    bar = progress.add_task(job.name, total=settings.epochs)

    def show(step: Step) -> None:
        text = f"{job.name}: epoch {step.epoch}, loss {step.loss:.4f}, "
        text += f"best {job.config.monitor} {step.best:.4f}" if step.best == step.best else "no best yet"
        progress.update(bar, description=text, completed=step.epoch - 1 + step.batch / step.batches)

    return show


def _report(settings: Config, outcome: TrainOutcome, screen: Screen) -> None:
    best = outcome.best
    for note in outcome.notes:
        print(f"{settings.data.cohort}: {note}")
    screen.failures(outcome.failed)
    if best:
        if best["point"]:
            print(
                "best of the grid: " + ", ".join(f"{key} = {value}" for key, value in best["point"].items())
            )
        for part in ("validation", "test"):
            measures = []
            for name, over in best[part].items():
                spread = f" ± {over['std']:.3f}" if over["models"] > 1 else ""
                measures.append(f"{name} {over['mean']:.3f}{spread}")
            if measures:
                print(f"{part:<10}  " + "   ".join(measures))
    done = f"{counted(len(outcome.trained), 'model')} trained, {len(outcome.found)} already done"
    print(f"{done}, {len(outcome.failed)} failed. Written to {settings.out}.")
