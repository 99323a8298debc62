"""A training run in a folder: every point of the grid x fold x repeat, resumed where it stopped."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xmil.core.errors import InputError
from xmil.core.identity import unchanged
from xmil.core.parsing import parse_json
from xmil.core.runfiles import RUN, locked, make_folder, read_rows, read_run, write_run
from xmil.core.storage import write_text
from xmil.training.batches import TrainingBags
from xmil.training.config import Config, at_point, differences, grid_points, plain
from xmil.training.fit import DivergedError, Fit, Job, OnStep
from xmil.training.folds import Fold, make_folds, parts_of
from xmil.training.machine import deterministic, is_first_process, make_fabric, preload_bytes
from xmil.training.results import FAILED, prediction_rows, summarise, write_results
from xmil.training.site_balance import SiteGroups
from xmil.training.state import LAST, LOG, METRICS, MODEL, PREDICTIONS, State, csv_text, sweep
from xmil.training.targets import make_goal
from xmil.training.toml import dumps
from xmil.training.training_set import TrainingSet, read_training_set, slide_rows

logger = logging.getLogger(__name__)
CONFIG = "config.toml"
JOB_FILES = (MODEL, LAST, LOG, METRICS, PREDICTIONS)
COHORT = "cohort.csv"
ROOT_FILES = ("results.csv", "best.json", PREDICTIONS, COHORT, CONFIG, RUN)


@dataclass(frozen=True)
class TrainingPlan:
    """What a run will do: the bags, and the jobs in order."""

    config: Config
    found: TrainingSet
    jobs: tuple[Job, ...]

    @property
    def points(self) -> list[dict[str, Any]]:
        """The points of the grid."""
        return grid_points(self.config)


@dataclass
class TrainOutcome:
    """What a run came to: jobs trained now, already done, and failed with the reason."""

    trained: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reports: bool = True  # the one process of several that speaks


OnJob = Callable[[Job, int], OnStep | None]  # a job begins, with its number; gives what hears of its steps


def make_plan(config: Config) -> TrainingPlan:
    """Read the cohort and lay out every job; whatever cannot be trained is refused here."""
    found = read_training_set(config)
    folds = make_folds(found, config)
    trained = np.unique(np.concatenate([fold.train for fold in folds]))
    jobs = []
    points = grid_points(config)
    for p, point in enumerate(points):
        at = at_point(config, point)
        for k, fold in enumerate(folds):
            goal = make_goal(found.targets, fold.train, at, run=trained)
            for r in range(config.train.repeats):
                parts = [f"grid{p}"] * (len(points) > 1) + [fold.name] * (len(folds) > 1)
                parts += [f"repeat{r}"] * (config.train.repeats > 1)
                seed = job_seed(config.train.seed, k, r)
                name = "-".join(parts) or "model"
                groups = _site_groups(found, fold, at)
                jobs.append(Job(name, at, fold, goal, seed, p, r, found.encoder, found.facts, groups))
    return TrainingPlan(config, found, tuple(jobs))


def _site_groups(found: TrainingSet, fold: Fold, config: Config) -> SiteGroups | None:
    if config.train.sampling != "site_balanced":
        return None
    return SiteGroups.of(fold.train, found.cohort.column(str(config.data.site)), found.targets.strata)


def job_seed(seed: int, fold: int, repeat: int) -> int:
    """A seed of its own for each fold and repeat, the same at every point of the grid."""
    return int(np.random.SeedSequence((seed, fold, repeat)).generate_state(1)[0]) >> 1


def train(config: Config, *, restart: bool = False, on_job: OnJob | None = None) -> TrainOutcome:
    """Train everything a config asks for into its folder; what is done already is not done again.

    A second training that would write into the folder is refused.
    """
    plan = make_plan(config)
    folder = Path(config.out)
    with _kept_for_us(folder):
        return _train_all(plan, make_fabric(config), folder, restart=restart, on_job=on_job)


@contextmanager
def _kept_for_us(folder: Path) -> Iterator[None]:
    """The folder, locked; of several processes the first holds the lock."""
    if not is_first_process():
        yield
        return
    make_folder(folder)
    with locked(folder):
        yield


def _train_all(
    plan: TrainingPlan, fabric: Any, folder: Path, *, restart: bool, on_job: OnJob | None
) -> TrainOutcome:
    config = plan.config
    if is_first_process():  # before others are launched: what is refused here is then said once
        prepare(plan, folder, restart=restart)
    fabric.launch()
    fabric.barrier()
    outcome = TrainOutcome(notes=plan.found.notes, reports=bool(fabric.is_global_zero))
    bags: TrainingBags | None = None
    with deterministic(config.train.deterministic), torch.random.fork_rng(devices=[]):
        for number, job in enumerate(plan.jobs):
            if (folder / job.name / METRICS).is_file():
                outcome.found.append(job.name)
                continue
            if bags is None:
                bags = TrainingBags(plan.found.bags.preloading(preload_bytes(config.train)))
            on_step = on_job(job, number) if on_job is not None and outcome.reports else None
            _train_job(plan, job, bags, fabric, folder / job.name, outcome, on_step)
            fabric.barrier()
    return _finish(plan, folder, outcome)


def prepare(plan: TrainingPlan, folder: Path, *, restart: bool) -> None:
    """Make the folder and its description; a folder of another run is refused."""
    if restart:
        clear(folder)
    make_folder(folder)
    described = _description(plan)
    folds = list({job.fold.name: job.fold for job in plan.jobs}.values())
    full = plan.config.data.full_digests
    slides = slide_rows(plan.found, parts_of(folds, len(plan.found)), full=full)
    if (folder / RUN).is_file():
        _check_same(folder, described)
        _check_files(folder, slides, full=full)
    elif any((folder / job.name / name).exists() for job in plan.jobs for name in JOB_FILES):
        raise InputError(f"{folder}: holds models but no {RUN}; choose another --out, or pass --restart.")
    for job in plan.jobs:
        make_folder(folder / job.name)
        sweep(folder / job.name)
    sweep(folder)
    write_text(folder / CONFIG, dumps(plain(plan.config)))
    write_text(folder / COHORT, csv_text(slides))
    write_run(folder, "train", described)


def clear(folder: Path) -> None:
    """Remove the files that a run wrote, and nothing else."""
    for part in sorted(folder.iterdir()) if folder.is_dir() else []:
        if part.is_dir() and any((part / name).exists() for name in (LAST, LOG, METRICS)):
            for path in [*(part / name for name in JOB_FILES), *part.glob("events.out.tfevents.*")]:
                path.unlink(missing_ok=True)
            sweep(part)
            if not any(part.iterdir()):
                part.rmdir()
    for name in ROOT_FILES:
        (folder / name).unlink(missing_ok=True)


def _train_job(
    plan: TrainingPlan,
    job: Job,
    bags: TrainingBags,
    fabric: Any,
    folder: Path,
    outcome: TrainOutcome,
    on_step: OnStep | None,
) -> None:
    try:
        fit = Fit(job, bags, fabric, folder)
        state = fit.run(on_step)
    except DivergedError as error:
        outcome.failed[job.name] = str(error)
        if fabric.is_global_zero:
            write_text(folder / METRICS, json.dumps({FAILED: str(error)}) + "\n")
        return
    _write_job(plan, fit, state, folder)
    outcome.trained.append(job.name)


def _write_job(plan: TrainingPlan, fit: Fit, state: State, folder: Path) -> None:
    """Predictions and measures of the best weights; the measures are written last, they say it is done."""
    fit.load_best(state)
    fold, measures, rows = fit.job.fold, {}, []
    for part in ("validation", "test"):
        members = getattr(fold, part)
        if len(members):
            outputs = fit.outputs(members)
            measures[part] = fit.measures(outputs, members)
            rows += prediction_rows(plan.found, fit.job.goal, outputs, members, subset=part)
    done = {
        "monitor": fit.job.config.monitor,
        "best_epoch": state.best.epoch,
        "best": state.best.value,
        "epochs": state.epoch,
        "bags": {part: len(getattr(fold, part)) for part in ("train", "validation", "test")},
        **measures,
        "seconds": round(sum(row["seconds"] for row in state.log), 3),
    }
    if fit.fabric.is_global_zero:
        write_text(folder / PREDICTIONS, csv_text(rows))
        write_text(folder / METRICS, json.dumps(done, indent=1) + "\n")


def _finish(plan: TrainingPlan, folder: Path, outcome: TrainOutcome) -> TrainOutcome:
    """The tables over all jobs."""
    results = dict(_done(plan, folder))
    outcome.failed |= {name: done[FAILED] for name, done in results.items() if FAILED in done}
    outcome.found = [name for name in outcome.found if name not in outcome.failed]
    outcome.best = summarise(plan.jobs, plan.points, results)
    if outcome.reports:
        write_results(plan.jobs, plan.points, results, outcome.best, folder)
    return outcome


def _done(plan: TrainingPlan, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for job in plan.jobs:
        path = folder / job.name / METRICS
        if path.is_file():
            yield job.name, parse_json(path.read_text(encoding="utf-8"))


def _description(plan: TrainingPlan) -> dict[str, Any]:
    found = plan.found
    return {
        "config": plain(plan.config),
        "bags": {"count": len(found), "digest": found.digest, "width": found.bags.dim},
        "task": plan.config.task,
        "class_names": list(found.targets.class_names or ()) or None,
        "encoder": found.encoder,
        "left_out": list(found.notes),
        "jobs": [job.name for job in plan.jobs],
    }


def _check_same(folder: Path, now: dict[str, Any]) -> None:
    try:
        before = read_run(folder) or {}
        config, bags = before["config"], before["bags"]
    except (KeyError, TypeError, InputError):
        raise InputError(f"{folder}: its {RUN} is not one of a training; choose another --out.") from None
    found = differences(config, now["config"])
    if bags != now["bags"]:
        found.append(
            f"the bags were {bags['count']} of width {bags['width']} (digest {bags['digest']}), "
            f"now {now['bags']['count']} of width {now['bags']['width']} (digest {now['bags']['digest']})"
        )
    if found:
        raise InputError(
            f"{folder}: holds a run with other settings: {'; '.join(found[:4])}. "
            "Choose another --out, or pass --restart to start over."
        )


def _check_files(folder: Path, slides: list[dict[str, str]], *, full: bool) -> None:
    """Refuse to go on with other feature files than those the run began with."""
    before = {name: row.get("digest") for name, row in read_rows(folder / COHORT).items()}
    known = [(row, before.get(row["slide_id"])) for row in slides]
    changed = [row["slide_id"] for row, word in known if word and not unchanged(row["path"], word, full=full)]
    if changed:
        shown = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        raise InputError(
            f"{folder}: the feature files of {len(changed)} slides have changed since the run began "
            f"({shown}). Put them back, choose another --out, or pass --restart to start over."
        )
