"""`xmil train`: models from feature files and a table of labels."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmil.cli._command import Json
from xmil.cli._screen import print_failures

if TYPE_CHECKING:
    from xmil.training.config import Config
    from xmil.training.fit import Job, OnStep, Step
    from xmil.training.train import TrainOutcome

REFRESH = 0.1  # seconds between two changes of the bar


def train(
    config: Annotated[Path, typer.Argument(help="TOML file of settings; see docs/training.md.")],
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting: --set optim.lr=1e-3; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for models; an interrupted run continues where it stopped.")
    ] = None,
    features: Annotated[
        list[Path] | None, typer.Option(help="Folder of feature files; may be repeated.")
    ] = None,
    cohort: Annotated[Path | None, typer.Option(help="Table of slides and labels.")] = None,
    label: Annotated[str | None, typer.Option(help="Label column.")] = None,
    folds: Annotated[
        int | None, typer.Option(help="Cross-validate over this many folds, made by case.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for weights, sampling and order.")] = None,
    follow_links: Annotated[
        bool | None, typer.Option(help="Follow links in the folders of feature files.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete the models in the folder and train again.")
    ] = False,
    as_json: Json = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the resolved settings, check the cohort's columns and stop."),
    ] = False,
) -> int:
    """Train models: folds, repeats and a grid in one command; goes on after an interruption."""
    from xmil.training.config import dumps, load_config, plain
    from xmil.training.training_set import check_columns

    folders = [str(folder) for folder in features or ()]
    flags: dict[str, Any] = {
        "out": out,
        "data.features": folders[0] if len(folders) == 1 else folders or None,
        "data.cohort": cohort,
        "data.label": label,
        "data.folds": folds,
        "data.follow_links": follow_links,
        "train.device": device,
        "train.seed": seed,
    }
    settings = load_config(config, [*(change or ()), *_as_changes(flags)])
    if dry_run:
        print(dumps(plain(settings)), end="")
        check_columns(settings)
        return 0
    outcome = _train(settings, restart=restart)
    return _json_report(settings, outcome) if as_json else _report(settings, outcome)


def _as_changes(flags: dict[str, Any]) -> list[str]:
    import json

    given = {key: value for key, value in flags.items() if value is not None}
    return [
        f"{key}={json.dumps(str(value) if isinstance(value, Path) else value)}"
        for key, value in given.items()
    ]


def _train(settings: Config, *, restart: bool) -> TrainOutcome:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from xmil.training.train import train as run

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        return run(settings, restart=restart, on_job=lambda job, _: _watch(job, progress))


def _watch(job: Job, progress: Any) -> OnStep:
    """A bar for one model: loss so far, the best of the monitored measure, time left."""
    settings = job.config.train
    for old in list(progress.task_ids):
        progress.remove_task(old)
    bar = progress.add_task(job.name, total=settings.epochs)
    shown = [0.0]

    def hear(step: Step) -> None:
        now = time.monotonic()
        if now - shown[0] < REFRESH and step.batch < step.batches:
            return
        shown[0] = now
        told = f"{job.name}: epoch {step.epoch}, loss {step.loss:.4f}, "
        told += f"best {job.config.monitor} {step.best:.4f}" if step.best == step.best else "no best yet"
        progress.update(bar, description=told, completed=step.epoch - 1 + step.batch / step.batches)

    return hear


def _code(outcome: TrainOutcome) -> int:
    return (0 if not outcome.failed else 1) if outcome.best else 2


def _json_report(settings: Config, outcome: TrainOutcome) -> int:
    """The same for programs."""
    import json

    if not outcome.reports:
        return _code(outcome)
    told = {name: getattr(outcome, name) for name in ("best", "notes", "trained", "found", "failed")}
    print(json.dumps({"out": str(settings.out), **told}, indent=2, default=str))
    return _code(outcome)


def _report(settings: Config, outcome: TrainOutcome) -> int:
    """A few lines on the screen; the exit code."""
    best = outcome.best
    code = _code(outcome)
    if not outcome.reports:
        return code
    for note in outcome.notes:
        print(f"{settings.data.cohort}: {note}")
    print_failures(outcome.failed)
    if best:
        if best["point"]:
            print(
                "best of the grid: " + ", ".join(f"{key} = {value}" for key, value in best["point"].items())
            )
        for part in ("validation", "test"):
            told = [f"{name} {_spread(found)}" for name, found in best[part].items()]
            if told:
                print(f"{part:<10}  " + "   ".join(told))
    done = f"{len(outcome.trained)} models trained, {len(outcome.found)} already done"
    print(f"{done}, {len(outcome.failed)} failed. Written to {settings.out}.")
    return code


def _spread(found: dict[str, Any]) -> str:
    spread = f" ± {found['std']:.3f}" if found["models"] > 1 else ""
    return f"{found['mean']:.3f}{spread}"
