"""The tables over a run's models: one row each, the best point of the grid, predictions of its test bags."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.storage import write_text
from xmil.core.task import TASKS, Floats, Task
from xmil.predictions.table import prediction_columns
from xmil.training.fit import Job
from xmil.training.state import MODEL, PREDICTIONS, csv_text
from xmil.training.targets import Goal, Rows
from xmil.training.training_set import TrainingSet, bag_slides

FAILED = "failed"
Point = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Any]]


def summarise(jobs: Sequence[Job], points: Sequence[Point], results: Results) -> dict[str, Any]:
    """The point with the best mean validation measure over folds and repeats; empty where all failed.

    A point with a failed model does not compete unless every point has one.
    """
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


def write_results(
    jobs: Sequence[Job], points: Sequence[Point], results: Results, best: Mapping[str, Any], folder: Path
) -> None:
    """Write `results.csv`, `best.json` and the test predictions of the best point."""
    rows = [_row(job, points[job.point], results.get(job.name, {})) for job in jobs]
    write_text(folder / "results.csv", csv_text(rows))
    if best:
        write_text(folder / "best.json", json.dumps(best, indent=1) + "\n")
        chosen = [job for job in jobs if job.point == best["grid"]]
        write_text(folder / PREDICTIONS, csv_text(_predictions(chosen, folder)))


def _row(job: Job, point: Point, done: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": job.name, "grid": job.point, **point}
    row |= {"fold": job.fold.name, "repeat": job.repeat, "seed": job.seed}
    row |= {key: done.get(key, "") for key in ("best_epoch", "epochs", "seconds", FAILED)}
    for part, short in (("validation", "val"), ("test", "test")):
        row |= {f"{short}_{name}": f"{value:.6g}" for name, value in done.get(part, {}).items()}
    return row


def _spreads(jobs: Sequence[Job], results: Results, part: str) -> dict[str, Any]:
    """Mean and standard deviation of each measure over the models that have it."""
    found = [results.get(job.name, {}).get(part, {}) for job in jobs]
    names = list(dict.fromkeys(name for measures in found for name in measures))
    spreads = {}
    for name in names:
        values = np.array([measures[name] for measures in found if name in measures], dtype=float)
        known = values[np.isfinite(values)]
        if len(known):
            spreads[name] = {"mean": float(known.mean()), "std": float(known.std()), "models": len(known)}
    return spreads


def _predictions(jobs: Sequence[Job], folder: Path) -> list[dict[str, Any]]:
    """Each bag as seen by the models that were not trained on it: test bags, else validation bags."""
    rows: list[dict[str, Any]] = []
    for job in jobs:
        path = folder / job.name / PREDICTIONS
        if not path.is_file():
            continue
        with path.open(newline="", encoding="utf-8") as stream:
            own = list(csv.DictReader(stream))
        tested = [row for row in own if row["subset"] == "test"] or own
        rows += [{**row, "fold": job.fold.name, "repeat": job.repeat, "model": job.name} for row in tested]
    return rows


def prediction_rows(
    found: TrainingSet, goal: Goal, outputs: Floats, rows: Rows, *, subset: str
) -> list[dict[str, Any]]:
    """What a model says of some bags: who they are, what is true, what was predicted."""
    said = _said(goal, outputs, goal.truth[rows])
    slides, cases, sizes = (
        bag_slides(found),
        found.cohort.cases,
        [len(header) for header in found.bags.headers],
    )
    return [
        {
            "slide_id": ";".join(slides[row]),
            "case_id": cases[row],
            "subset": subset,
            **own,
            "n": sizes[row],
        }
        for row, own in zip(rows.tolist(), said, strict=True)
    ]


def _said(goal: Goal, outputs: Floats, truth: Floats) -> list[dict[str, Any]]:
    """A row for each bag of what is true and what outputs (n, c) say of it."""
    task = TASKS[goal.task]
    names = task.names(goal.outputs, goal.class_names, goal.time_bins)
    labels = [_label(task, row) for row in truth.tolist()]
    columns = prediction_columns(task, outputs[:, None, :], labels=labels, names=names)
    if task.takes_reference:
        columns["reference"] = [goal.reference or 0.0] * len(labels)
    rows = zip(*columns.values(), strict=True)
    return [{key: _cell(value) for key, value in zip(columns, row, strict=True)} for row in rows]


def _label(task: Task, row: list[float]) -> Any:
    """A row of targets as the label of a case."""
    if task.truth == "time":
        return row[0], bool(row[1])
    return int(row[0]) if task.truth == "class" else tuple(row)


def _cell(value: Any) -> Any:
    return f"{value:.8g}" if isinstance(value, float) else value
