"""Every candidate on every trained model.

    python -m benchmarks.better_rule.study --models DIR --data FEATURES --colon FEATURES --out DIR

leaves a file of rows for each configuration, with the measures on validation and on test bags; a stopped one
goes on. `python -m benchmarks.better_rule` reads them: it chooses on validation and reports on test bags.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.better_rule.candidates import Ordinary, candidates, scores_of
from benchmarks.better_rule.colon import OWN, held_out, load_run, parts, runs
from benchmarks.better_rule.measures import evidence_measures, faithfulness, shapley_agreement
from benchmarks.better_rule.suite import ALL_TASKS, SMALL, Job, start_workers
from benchmarks.colon.bags import ColonBag, read_bags
from xmil.bench import (
    BUFFER,
    FLAT,
    PAPER_TASKS,
    BagSet,
    Configuration,
    Stacked,
    Table,
    load_instances,
    read_stack,
)
from xmil.core.durable import write_text
from xmil.models import MILModel

Row = dict[str, Any]
FAITHFUL = 60  # bags of a split that removal curves are made of
FEW_BAGS, FEW_INSTANCES = 40, 8  # bags cut short, whose Shapley values are exact
LIMITS = {"paper": (200, 1000, "some"), "small": (100, 200, "more")}  # validation, test bags; candidates


@dataclass(frozen=True)
class Piece:
    """A part of the study: a trained configuration, or a run on colon."""

    job: Job | tuple[str, str, int]
    repetitions: int
    models: Path
    data: str
    out: Path
    device: str

    @property
    def path(self) -> Path:
        if isinstance(self.job, Job):
            return self.out / f"{self.job.folder(Path()).name}_{self.job.task}_{self.job.model}.json"
        return self.out / f"colon_{self.job[1]}_{self.job[0]}_{self.job[2]}.json"

    def __str__(self) -> str:
        return self.path.stem

    def do(self) -> None:
        """Measure it, unless its file is there."""
        if self.path.is_file():
            return
        rows = digit_rows(self) if isinstance(self.job, Job) else colon_rows(self)
        if rows:
            self.out.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(rows))


def digit_rows(piece: Piece) -> list[Row]:
    """A row for each repetition of a configuration on digits."""
    job = piece.job
    assert isinstance(job, Job)  # narrows the type
    path = job.folder(piece.models) / "models" / f"{job.task}-{job.model}.safetensors"
    if not path.is_file():
        return []
    c = job.configuration(load_instances(piece.data), piece.device)
    models, table = _stacked(c, path, piece.device), c.table()
    ordinary = ordinary_patches(c, table)
    n_validation, n_test, which = LIMITS[job.suite]
    rows = []
    for r in range(min(piece.repetitions, len(models))):
        model, splits = models.model(r), c.splits(r)
        assert isinstance(model, MILModel)  # narrows the type
        about = {"suite": job.suite, "data": Path(job.data).name, "seed": job.seed}
        rows.append({**about, "model": job.model, "task": job.task, "repetition": r})
        for split, bags, n in (
            ("validation", splits.validation, n_validation),
            ("test", splits.test, n_test),
        ):
            rows[-1][split] = _measured(c, model, table, ordinary, bags, n, which=which)
    return rows


def ordinary_patches(c: Configuration, table: Table) -> Ordinary:
    """The means of the patches in the first training bags: what a training would keep."""
    train = c.splits(0).train
    patches = table.bags(table.to_rows(train.rows[:200]))  # (b, n, d)
    labels = torch.from_numpy(train.labels[:200]).to(patches.device)
    return ordinary_of(list(patches), labels.tolist())


def ordinary_of(bags: Sequence[Tensor], labels: Sequence[int]) -> Ordinary:
    """Mean patches of bags (n, d) with labels."""
    classes = [torch.cat([x for x, own in zip(bags, labels, strict=True) if own == c]) for c in set(labels)]
    balanced = torch.stack([patches.mean(dim=0) for patches in classes]).mean(dim=0)
    return Ordinary(torch.cat(list(bags)).mean(dim=0), balanced)


def _stacked(c: Configuration, path: Path, device: str) -> Stacked:
    fresh = replace(c, protocol=replace(c.protocol, repetitions=1)).fresh_models()
    stored = read_stack(path, device)[1]
    tensors = {key: value.float() if value.is_floating_point() else value for key, value in stored.items()}
    return Stacked(fresh.template, tensors[FLAT], {name: tensors[BUFFER + name] for name in fresh.buffers})


def _measured(
    c: Configuration, model: MILModel, table: Table, ordinary: Ordinary, bags: BagSet, n: int, *, which: str
) -> dict[str, dict[str, float]]:
    x = table.bags(table.to_rows(bags.rows[:n]))
    truth = torch.from_numpy(c.task.evidence(bags.codes[:n])).to(x.device)
    labels = torch.from_numpy(bags.labels[:n]).to(x.device)
    rules = candidates(which)
    scores = scores_of(model, x, ordinary, rules)
    few = x[:FEW_BAGS, :FEW_INSTANCES]
    agree = shapley_agreement(model, few, labels[:FEW_BAGS], scores_of(model, few, ordinary, rules))
    some = {name: s[:FAITHFUL] for name, s in scores.items()}
    faith = faithfulness(model, x[:FAITHFUL], labels[:FAITHFUL], some)
    return {
        name: {**evidence_measures(s, truth), **faith[name], "shapley": agree[name]}
        for name, s in scores.items()
    }


def colon_rows(piece: Piece) -> list[Row]:
    """The row of a run on colon: means over its bags."""
    name, task, run = piece.job  # type: ignore[misc]
    bags = read_bags(Path(piece.data))
    model = load_run(name, task, run, piece.models / "colon-colon", bags[0].features.shape[1])
    if model is None:
        return []
    training, test = parts(bags, task, run)
    held = held_out(training, run)
    apart = {bag.name for bag in held}
    kept = [bag for bag in training if bag.name not in apart]
    ordinary = ordinary_of([bag.features for bag in kept], [bag.label(task) for bag in kept])
    row: Row = {
        "suite": "colon",
        "data": Path(piece.data).stem,
        "seed": 0,
        "model": name,
        "task": task,
        "repetition": run,
    }
    for split, chosen in (("validation", held), ("test", test)):
        row[split] = _mean_of(
            [_colon_bag(model, bag, task, ordinary) for bag in chosen if len(bag.features) > 1]
        )
    return [row]


def _colon_bag(model: MILModel, bag: ColonBag, task: str, ordinary: Ordinary) -> dict[str, dict[str, float]]:
    """The measures of one image; nan where it cannot say."""
    x, evidence = bag.features.unsqueeze(0), torch.from_numpy(bag.evidence(task))
    scores = scores_of(model, x, ordinary, candidates("few"))
    faith = faithfulness(model, x, torch.tensor([bag.label(task)]), scores)
    found = {}
    for name, s in scores.items():
        own = evidence_measures(s[:, 1], evidence.unsqueeze(0))
        if not bool(evidence.any()):
            own["signs"] = float("nan")
        found[name] = {**own, **faith[name]}
    return found


def _mean_of(bags: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        name: {key: float(np.nanmean([bag[name][key] for bag in bags])) for key in bags[0][name]}
        for name in bags[0]
    }


def pieces(args: argparse.Namespace) -> tuple[list[Piece], list[Piece]]:
    """Pieces for the device, the needed ones first, and pieces of colon for the CPU."""
    make = partial(Piece, models=args.models, out=args.out)
    digits: Callable[[Job, int], Piece] = lambda job, reps: make(  # noqa: E731
        job, reps, data=args.data if job.data != "digits" else "digits", device=args.device
    )
    name = str(args.data)
    paper = [
        Job("paper", m, t, name, s)
        for s in (0, 1)
        for m in ("attnmil", "transmil", "addmil")
        for t in PAPER_TASKS
    ]
    small = [Job("small", m, t, name, 0) for t in ALL_TASKS[:4] for m in SMALL]
    fresh = [Job("small", m, t, d, 1) for t in ALL_TASKS[:4] for m in SMALL for d in ("digits", name)]
    more = [Job("small", m, t, name, 0) for t in ALL_TASKS[4:] for m in SMALL]
    found = [digits(j, args.paper_repetitions) for j in paper] + [digits(j, args.repetitions) for j in small]
    found += [digits(j, max(1, args.repetitions // 2)) for j in fresh + more]
    colon = [make(job, 1, data=args.colon, device="cpu") for job in runs()] if args.colon else []
    order = sorted(colon, key=lambda p: (p.job[0] not in OWN[:2], p.job[2]))  # type: ignore[index]
    return [p for p in found if _asked(p, args)], [p for p in order if _asked(p, args)]


def _asked(piece: Piece, args: argparse.Namespace) -> bool:
    return not args.only or any(word in str(piece) for word in args.only)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--colon")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--colon-workers", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--paper-repetitions", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--only", nargs="*", help="parts of the names of the pieces")
    args = parser.parse_args()
    on_device, on_cpu = pieces(args)
    started = start_workers(on_device, workers=args.workers, seconds=args.seconds)
    started += start_workers(on_cpu, workers=args.colon_workers if on_cpu else 0, seconds=args.seconds)
    end = time.time() + args.seconds
    for process in started:
        process.join(max(0.0, end - time.time()))
    for process in started:
        process.kill()


if __name__ == "__main__":
    main()
