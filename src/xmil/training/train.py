"""A training run in a folder: every point of the grid x fold x repeat; a second call resumes it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xmil.core.budget import available_memory, csv_rows
from xmil.core.durable import remove_file, unchanged, write_text
from xmil.core.errors import InputError, UnsupportedError
from xmil.core.task import TASKS, Floats
from xmil.core.text import parse_json, shorten
from xmil.evaluate import prediction_columns
from xmil.network import find_device
from xmil.storage import (
    RUN,
    RunFolder,
    check_folder,
    make_folder,
    read_rows,
    read_run,
    start_manifest,
    sweep_folder,
    write_run,
)
from xmil.training.batches import SiteGroups, TrainingBags
from xmil.training.config import Config, Train, at_point, differences, dumps, grid_points, plain
from xmil.training.fit import (
    LAST,
    LOG,
    METRICS,
    MODEL,
    PREDICTIONS,
    DivergedError,
    Fit,
    Job,
    OnStep,
    State,
    write_rows,
)
from xmil.training.training_set import (
    Goal,
    Rows,
    TrainingSet,
    bag_slides,
    make_folds,
    make_goal,
    parts_of,
    read_training_set,
    slide_rows,
)

logger = logging.getLogger(__name__)
KIND, CONFIG = "train", "config.toml"
JOB_FILES = (MODEL, LAST, LOG, METRICS, PREDICTIONS)
COHORT = "cohort.csv"
ROOT_FILES = ("results.csv", "best.json", PREDICTIONS, COHORT, CONFIG, RUN)


@dataclass(frozen=True)
class TrainingPlan:
    """The bags of a run, and its jobs in order."""

    config: Config
    training_set: TrainingSet
    jobs: tuple[Job, ...]


@dataclass
class TrainOutcome:
    """The result of a run: jobs trained now, already done, and failed with the reason."""

    trained: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reports: bool = True  # whether this process prints and writes for all


OnJob = Callable[[Job, int], OnStep | None]  # called with a job and its number; returns a callback


def make_plan(config: Config) -> TrainingPlan:
    """Read the cohort and plan every job; refuse what cannot be trained."""
    training_set = read_training_set(config)
    folds = make_folds(training_set, config)
    trained = np.unique(np.concatenate([fold.train for fold in folds]))
    jobs, points, notes = [], grid_points(config), list[str]()
    for p, point in enumerate(points):
        settings = at_point(config, point)
        for k, fold in enumerate(folds):
            goal = make_goal(training_set.targets, fold.train, settings, run=trained)
            for r in range(config.train.repeats):
                varies = len(points) > 1, len(folds) > 1, config.train.repeats > 1
                parts = compress((f"grid{p}", fold.name, f"repeat{r}"), varies)
                # the same seed at every point of the grid
                seed = int(np.random.SeedSequence((config.train.seed, k, r)).generate_state(1)[0]) >> 1
                name = "-".join(parts) or "model"
                groups = None
                if settings.train.sampling == "site_balanced":
                    sites = training_set.cohort.column(str(settings.data.site))
                    targets = training_set.targets
                    groups = SiteGroups.of(fold.train, sites, targets.strata, targets.classes)
                    notes += [f"{fold.name}: {note}" if fold.name else note for note in groups.notes]
                features = training_set.encoder, training_set.facts
                jobs.append(Job(name, settings, fold, goal, seed, p, r, *features, groups))
    training_set = replace(training_set, notes=(*training_set.notes, *dict.fromkeys(notes)))
    return TrainingPlan(config, training_set, tuple(jobs))


def train(config: Config, *, restart: bool = False, on_job: OnJob | None = None) -> TrainOutcome:
    """Train all models of a config into its folder; skip finished ones.

    A lock refuses a second training in the same folder.
    """
    plan = make_plan(config)
    folder = Path(config.out)
    with RunFolder(folder, KIND).claim() if is_first_process() else nullcontext():  # one holds the lock
        return _train_all(plan, make_fabric(config), folder, restart=restart, on_job=on_job)


def _train_all(
    plan: TrainingPlan, fabric: Any, folder: Path, *, restart: bool, on_job: OnJob | None
) -> TrainOutcome:
    config = plan.config
    if is_first_process():  # before launching others, to print errors once
        prepare(plan, folder, restart=restart)
    fabric.launch()
    fabric.barrier()
    outcome = TrainOutcome(notes=plan.training_set.notes, reports=bool(fabric.is_global_zero))
    bags: TrainingBags | None = None
    with deterministic(config.train.deterministic), torch.random.fork_rng(devices=[]):
        for number, job in enumerate(plan.jobs):
            if (folder / job.name / METRICS).is_file():
                outcome.found.append(job.name)
                continue
            if bags is None:
                bags = TrainingBags(plan.training_set.bags.preloading(preload_bytes(config.train)))
            on_step = on_job(job, number) if on_job is not None and outcome.reports else None
            try:
                fit = Fit(job, bags, fabric, folder / job.name)
                _write_job(plan, fit, fit.run(on_step))
                outcome.trained.append(job.name)
            except DivergedError as error:
                outcome.failed[job.name] = str(error)
                if outcome.reports:
                    write_text(folder / job.name / METRICS, json.dumps({FAILED: str(error)}) + "\n")
            fabric.barrier()
    return _finish(plan, folder, outcome)


def prepare(plan: TrainingPlan, folder: Path, *, restart: bool) -> None:
    """Make the folder and its description; refuse a folder of another run, or with the user's files.

    Writing run.json marks the folder as ours.
    """
    check_folder(folder, KIND)
    if restart:
        clear(folder)
    make_folder(folder)
    training_set = plan.training_set
    description = {
        "config": plain(plan.config),
        "bags": {"count": len(training_set), "digest": training_set.digest, "width": training_set.bags.dim},
        "task": plan.config.task,
        "class_names": list(training_set.targets.class_names or ()) or None,
        "encoder": training_set.encoder,
        "left_out": list(training_set.notes),
        "jobs": [job.name for job in plan.jobs],
    }
    folds = list({job.fold.name: job.fold for job in plan.jobs}.values())
    full = plan.config.data.full_digests
    slides = slide_rows(training_set, parts_of(folds, len(training_set)), full=full)
    if (folder / RUN).is_file():
        _check_same(folder, description)
        digests = {name: row.get("digest") for name, row in read_rows(folder / COHORT).items()}
        changed = [
            row["slide_id"]
            for row in slides
            if (digest := digests.get(row["slide_id"])) and not unchanged(row["path"], digest, full=full)
        ]
        if changed:
            raise InputError(
                f"{folder}: the feature files of {len(changed)} slides have changed since the run began "
                f"({shorten(changed, 5)}). Put them back, choose another `out=`, or pass `restart=True` to "
                "start over."
            )
    start_manifest(folder, KIND)
    write_run(folder, KIND, description)
    for job in plan.jobs:
        make_folder(folder / job.name)
    sweep_folder(folder)
    write_text(folder / CONFIG, dumps(plain(plan.config)))
    write_rows(folder / COHORT, slides)


def clear(folder: Path) -> None:
    """Remove the files that a run wrote, and nothing else."""
    for part in sorted(folder.iterdir()) if folder.is_dir() else []:
        if part.is_dir() and any((part / name).exists() for name in (LAST, LOG, METRICS)):
            for path in [*(part / name for name in JOB_FILES), *part.glob("events.out.tfevents.*")]:
                remove_file(path)
            sweep_folder(part)
            if not any(part.iterdir()):
                part.rmdir()
    for name in ROOT_FILES:
        remove_file(folder / name)


def _write_job(plan: TrainingPlan, fit: Fit, state: State) -> None:
    """Write predictions and measures of the best weights; the file of measures marks the job as done."""
    fit.plain.load_state_dict(state.best.weights)
    fold, measures, rows = fit.job.fold, {}, []
    for part, members in (("validation", fold.validation), ("test", fold.test)):
        if len(members):
            outputs = fit.outputs(members)
            measures[part] = fit.measures(outputs, members)
            rows += prediction_rows(plan.training_set, fit.job.goal, outputs, members, subset=part)
    results = {
        "monitor": fit.job.config.monitor,
        "best_epoch": state.best.epoch,
        "best": state.best.value,
        "epochs": state.epoch,
        "bags": {part: len(getattr(fold, part)) for part in ("train", "validation", "test")},
        **measures,
        "seconds": round(sum(row["seconds"] for row in state.log), 3),
    }
    if fit.fabric.is_global_zero:
        write_rows(fit.folder / PREDICTIONS, rows)
        write_text(fit.folder / METRICS, json.dumps(results, indent=1) + "\n")


def _finish(plan: TrainingPlan, folder: Path, outcome: TrainOutcome) -> TrainOutcome:
    """Write `results.csv` over all jobs, `best.json` and the test predictions of the best point."""
    paths = {job.name: folder / job.name / METRICS for job in plan.jobs}
    results = {
        name: parse_json(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()
    }
    outcome.failed |= {name: done[FAILED] for name, done in results.items() if FAILED in done}
    outcome.found = [name for name in outcome.found if name not in outcome.failed]
    points = grid_points(plan.config)
    outcome.best = summarise(plan.jobs, points, results)
    if outcome.reports:
        rows = [_row(job, points[job.point], results.get(job.name, {})) for job in plan.jobs]
        write_rows(folder / "results.csv", rows)
    if outcome.reports and outcome.best:
        write_text(folder / "best.json", json.dumps(outcome.best, indent=1) + "\n")
        rows = []  # test bags, or validation bags if there are none
        for job in plan.jobs:
            path = folder / job.name / PREDICTIONS
            if job.point == outcome.best["grid"] and path.is_file():
                own = csv_rows(path)
                tested = [row for row in own if row["subset"] == "test"] or own
                about = {"fold": job.fold.name, "repeat": job.repeat, "model": job.name}
                rows += [{**row, **about} for row in tested]
        write_rows(folder / PREDICTIONS, rows)
    return outcome


def _check_same(folder: Path, now: dict[str, Any]) -> None:
    try:
        before = read_run(folder) or {}
        config, bags = before["config"], before["bags"]
    except (KeyError, TypeError, InputError):
        raise InputError(f"{folder}: its {RUN} is from another kind of run; choose another `out=`.") from None
    changes = differences(config, now["config"])
    if bags != now["bags"]:
        changes.append(
            f"the bags were {bags['count']} of width {bags['width']} (digest {bags['digest']}), "
            f"now {now['bags']['count']} of width {now['bags']['width']} (digest {now['bags']['digest']})"
        )
    if changes:
        raise InputError(
            f"{folder}: holds a run with other settings: {'; '.join(changes[:4])}. "
            "Choose another `out=`, or pass `restart=True` to start over."
        )


FAILED = "failed"
Point = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Any]]


def summarise(jobs: Sequence[Job], points: Sequence[Point], results: Results) -> dict[str, Any]:
    """Find the point with the best mean validation measure; skip points with a failed model."""
    config = jobs[0].config
    scores: dict[int, float] = {}
    for p in range(len(points)):
        own = [results.get(job.name, {}) for job in jobs if job.point == p]
        values = [done["best"] for done in own if "best" in done]
        if values and len(values) == len(own):
            scores[p] = float(np.mean(values))
    if not scores:
        return {}
    best = min(scores, key=scores.__getitem__) if config.falling else max(scores, key=scores.__getitem__)
    chosen = [job for job in jobs if job.point == best]
    return {
        "point": dict(points[best]),
        "grid": best,
        "monitor": config.monitor,
        "mean_validation": scores[best],
        "every_point": [
            {"grid": p, **points[p], f"mean_val_{config.monitor}": value} for p, value in scores.items()
        ],
        "models": [f"{job.name}/{MODEL}" for job in chosen],
        "validation": _spreads(chosen, results, "validation"),
        "test": _spreads(chosen, results, "test"),
    }


def _row(job: Job, point: Point, done: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": job.name, "grid": job.point, **point}
    row |= {"fold": job.fold.name, "repeat": job.repeat, "seed": job.seed}
    row |= {key: done.get(key, "") for key in ("best_epoch", "epochs", "seconds", FAILED)}
    for part, short in (("validation", "val"), ("test", "test")):
        row |= {f"{short}_{name}": f"{value:.6g}" for name, value in done.get(part, {}).items()}
    return row


def _spreads(jobs: Sequence[Job], results: Results, part: str) -> dict[str, Any]:
    """Mean and standard deviation of each measure over the models."""
    parts = [results.get(job.name, {}).get(part, {}) for job in jobs]
    spreads = {}
    for name in dict.fromkeys(name for measures in parts for name in measures):
        values = np.array([measures[name] for measures in parts if name in measures], dtype=float)
        finite = values[np.isfinite(values)]
        if len(finite):
            spreads[name] = {"mean": float(finite.mean()), "std": float(finite.std()), "models": len(finite)}
    return spreads


def prediction_rows(
    training_set: TrainingSet, goal: Goal, outputs: Floats, rows: Rows, *, subset: str
) -> list[dict[str, Any]]:
    """Make the table of predictions: slides and case, truth, prediction."""
    task = TASKS[goal.task]
    names = task.names(goal.outputs, goal.class_names, goal.time_bins)
    as_label: dict[str, Callable[[list[float]], Any]] = {
        "time": lambda row: (row[0], bool(row[1])),
        "class": lambda row: int(row[0]),
    }
    labels = [as_label.get(task.truth, tuple)(row) for row in goal.truth[rows].tolist()]
    columns = prediction_columns(task, outputs[:, None, :], labels=labels, names=names)
    if task.takes_reference:
        columns["reference"] = [goal.reference or 0.0] * len(labels)
    slides, cases, headers = bag_slides(training_set), training_set.cohort.cases, training_set.bags.headers
    table = []
    for row, values in zip(rows.tolist(), zip(*columns.values(), strict=True), strict=True):
        cells = [f"{value:.8g}" if isinstance(value, float) else value for value in values]
        ids = {"slide_id": ";".join(slides[row]), "case_id": cases[row], "subset": subset}
        table.append({**ids, **dict(zip(columns, cells, strict=True)), "n": len(headers[row])})
    return table


def make_fabric(config: Config) -> Any:
    """Make a Fabric, not launched yet."""
    try:
        fabric = import_module("lightning_fabric" if find_spec("lightning_fabric") else "lightning.fabric")
    except ImportError:
        advice = "install it with: pip install 'xmil[train]'"
        raise UnsupportedError(f"Training needs Lightning Fabric; {advice}") from None
    settings = config.train
    accelerator, devices = _devices(settings)
    processes = settings.devices * settings.nodes
    if TASKS[config.task].compares and processes > 1:
        raise UnsupportedError(
            f"{config.task.capitalize()} compares all bags of a batch, so it trains on one device; set "
            "train.devices to 1."
        )
    try:
        return fabric.Fabric(
            accelerator=accelerator,
            devices=devices,
            num_nodes=settings.nodes,
            strategy="ddp" if processes > 1 else "auto",
            precision=settings.precision,
        )
    except (ValueError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(f"The device {settings.device!r} cannot run this training: {reason}") from None


def is_first_process() -> bool:
    """Whether this process writes and prints for all; also works before Fabric is launched."""
    ranks = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "NODE_RANK", "LOCAL_RANK"))
    return all(rank in (None, "0") for rank in ranks)


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Use only deterministic algorithms within the block; restore the flags afterwards."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def preload_bytes(settings: Train) -> int:
    """The bytes of features that a process preloads: the setting, or its share of half the free memory."""
    if settings.preload_gb is not None:
        return int(settings.preload_gb * 1e9)
    return (available_memory() or 0) // (2 * settings.devices)


def _devices(settings: Train) -> tuple[str, int | list[int]]:
    device = torch.device(find_device(settings.device))
    if device.index is not None and settings.devices == 1:
        return device.type, [device.index]
    return device.type, settings.devices
