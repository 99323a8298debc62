"""A training run in a folder: every point of the grid x fold x repeat; a second call resumes it.

Several processes may train a model together. Only the first one opens the folder and its ledger.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xmil.core.budget import available_memory, csv_rows
from xmil.core.durable import remove_file, unchanged, write_text
from xmil.core.errors import FileError, InputError, UnsupportedError
from xmil.core.task import TASKS, Floats
from xmil.core.text import shorten
from xmil.evaluate import prediction_columns
from xmil.execute import Outcome, Step, Tally, execute, work_in_turn
from xmil.network import find_device
from xmil.storage import Item, Record, make_folder, read_json, read_rows, read_run
from xmil.training.batches import SiteGroups, TrainingBags
from xmil.training.config import Config, Train, at_point, differences, dumps, grid_points, plain
from xmil.training.fit import (
    FILES,
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
COHORT, RESULTS, BEST = "cohort.csv", "results.csv", "best.json"


@dataclass(frozen=True)
class TrainingPlan:
    """The bags of a run, and its jobs in order."""

    config: Config
    training_set: TrainingSet
    jobs: tuple[Job, ...]

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config.out)

    @cached_property
    def items(self) -> list[Item[Job]]:
        """The jobs with what decides them, apart from the settings of the run."""
        bags = self.training_set.digest
        return [
            Item(job.name, job, decides={"point": job.point, "seed": job.seed, "bags": bags})
            for job in self.jobs
        ]


@dataclass
class TrainOutcome:
    """The result of a run: jobs trained now, already done, and diverged with the reason."""

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
    plan, fabric = make_plan(config), make_fabric(config)
    with deterministic(config.train.deterministic), torch.random.fork_rng(devices=[]):
        if is_first_process():
            outcome = _train_in_folder(plan, fabric, restart=restart, on_job=on_job)
        else:
            outcome = TrainOutcome()
            for _ in train_jobs((), plan, fabric):
                pass
    shared: TrainOutcome = fabric.broadcast(outcome)
    return replace(shared, reports=bool(fabric.is_global_zero))


def _train_in_folder(plan: TrainingPlan, fabric: Any, *, restart: bool, on_job: OnJob | None) -> TrainOutcome:
    """Train the models that the ledger of the folder lacks; refuse a folder of other settings."""
    config, training_set = plan.config, plan.training_set
    outcome = TrainOutcome(notes=training_set.notes)
    about = {
        "config": plain(config),
        "bags": {"count": len(training_set), "digest": training_set.digest, "width": training_set.bags.dim},
        "task": config.task,
        "class_names": list(training_set.targets.class_names or ()) or None,
        "encoder": training_set.encoder,
        "left_out": list(training_set.notes),
        "jobs": [job.name for job in plan.jobs],
    }
    if not restart:
        _check_same(plan.folder, about)
    step = Step(
        KIND,
        plan.items,
        settings=plain(config),
        about=about,
        compared=False,  # by `_check_same`, since where it runs may differ
        of_slides=False,
        prepare=partial(prepare, plan, restart=restart),
        adopt=partial(adopt_model, plan.folder),
        schedule=partial(train_jobs, plan=plan, fabric=fabric, on_job=on_job),
        finish=partial(_finish, plan, outcome),
    )
    execute(step, plan.folder, restart=restart)
    return outcome


def train_jobs(
    missing: Sequence[Item[Job]], plan: TrainingPlan, fabric: Any, on_job: OnJob | None = None
) -> Iterator[Outcome[Item[Job], Record]]:
    """Train the missing models on all processes of the run; only the first process knows which they are."""
    fabric.launch()
    names = fabric.broadcast([item.key for item in missing])
    if not names:
        return
    bags = TrainingBags(plan.training_set.bags.preloading(preload_bytes(plan.config.train)))
    items = [item for item in plan.items if item.key in names]
    yield from work_in_turn(items, partial(_train_job, plan=plan, bags=bags, fabric=fabric, on_job=on_job))


def _train_job(
    item: Item[Job], *, plan: TrainingPlan, bags: TrainingBags, fabric: Any, on_job: OnJob | None
) -> Record:
    """Train a model, or continue its training, and write its measures, or why it diverged."""
    job, folder, on_step = item.what, plan.folder / item.key, None
    if on_job is not None and fabric.is_global_zero:
        on_step = on_job(job, plan.items.index(item))
    try:
        fit = Fit(job, bags, fabric, folder)
        results = _measure(plan, fit, fit.run(on_step))
    except DivergedError as error:
        results = {FAILED: str(error)}
    if fabric.is_global_zero:
        write_text(folder / METRICS, json.dumps(results, indent=1) + "\n")
    fabric.barrier()
    return Record(facts=results)


def adopt_model(folder: Path, item: Item[Job]) -> Record | None:
    """Make the record of a trained model from its measures: after a kill, or of a run of xmil 0.2."""
    try:
        measures = read_json(folder / item.key / METRICS)
    except FileError:
        return None
    return Record(facts=measures, decides=dict(item.decides))


def prepare(plan: TrainingPlan, *, restart: bool) -> None:
    """Write the settings and the cohort; refuse feature files that have changed since the run began."""
    folder, full = plan.folder, plan.config.data.full_digests
    if restart:  # runs before xmil 0.2 had no list of their files
        for path in [folder / COHORT, *(folder / job.name / name for job in plan.jobs for name in FILES)]:
            remove_file(path)
    folds = list({job.fold.name: job.fold for job in plan.jobs}.values())
    slides = slide_rows(plan.training_set, parts_of(folds, len(plan.training_set)), full=full)
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
    for job in plan.jobs:
        make_folder(folder / job.name)
    write_text(folder / CONFIG, dumps(plain(plan.config)))
    write_rows(folder / COHORT, slides)


def _measure(plan: TrainingPlan, fit: Fit, state: State) -> dict[str, Any]:
    """Measure the best weights, and write their predictions."""
    fit.plain.load_state_dict(state.best.weights)
    fold, measures, rows = fit.job.fold, {}, []
    for part, members in (("validation", fold.validation), ("test", fold.test)):
        if len(members):
            outputs = fit.outputs(members)
            measures[part] = fit.measures(outputs, members)
            rows += prediction_rows(plan.training_set, fit.job.goal, outputs, members, subset=part)
    if fit.fabric.is_global_zero:
        write_rows(fit.folder / PREDICTIONS, rows)
    return {
        "monitor": fit.job.config.monitor,
        "best_epoch": state.best.epoch,
        "best": state.best.value,
        "epochs": state.epoch,
        "bags": {part: len(getattr(fold, part)) for part in ("train", "validation", "test")},
        **measures,
        "seconds": round(sum(row["seconds"] for row in state.log), 3),
    }


def _finish(plan: TrainingPlan, outcome: TrainOutcome, tally: Tally) -> dict[str, Any]:
    """Write `results.csv` over all jobs, `best.json` and the test predictions of the best point."""
    folder, points = plan.folder, grid_points(plan.config)
    results = {name: record.facts for name, record in tally.records.items()}
    outcome.failed = {name: done[FAILED] for name, done in results.items() if FAILED in done}
    outcome.trained = [name for name in tally.done if name not in outcome.failed]
    outcome.found = [name for name in tally.before if name not in outcome.failed]
    outcome.best = summarise(plan.jobs, points, results)
    write_rows(
        folder / RESULTS, [_row(job, points[job.point], results.get(job.name, {})) for job in plan.jobs]
    )
    if outcome.best:
        write_text(folder / BEST, json.dumps(outcome.best, indent=1) + "\n")
        rows = []  # test bags, or validation bags if there are none
        for job in plan.jobs:
            path = folder / job.name / PREDICTIONS
            if job.point == outcome.best["grid"] and path.is_file():
                own = csv_rows(path)
                tested = [row for row in own if row["subset"] == "test"] or own
                about = {"fold": job.fold.name, "repeat": job.repeat, "model": job.name}
                rows += [{**row, **about} for row in tested]
        write_rows(folder / PREDICTIONS, rows)
    return {}


def _check_same(folder: Path, about: Mapping[str, Any]) -> None:
    """Refuse a folder with models of other settings or bags."""
    before = read_run(folder)
    if before is None or before["kind"] != KIND:  # other kinds are refused as the folder is opened
        return
    old = {**before["settings"], "bags": before.get("bags")}
    changes = differences(old, {**about["config"], "bags": about["bags"]})
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
