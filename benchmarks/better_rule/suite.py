"""The trained models that rules are compared on: `python -m benchmarks.better_rule.suite --out DIR ...`.

Every configuration is one file, so that a stopped run goes on; weights are kept in half precision, and the
model with those weights is the one that is explained.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from benchmarks.better_rule.colon import runs, train_run
from benchmarks.better_rule.nets import NETS
from benchmarks.colon.bags import read_bags
from xmil.bench import (
    PAPER_MODELS,
    PAPER_TASKS,
    SETUPS,
    TASKS,
    Configuration,
    Instances,
    Protocol,
    Setup,
    Training,
    load_instances,
    save_stack,
    train_stacked,
)

QUICK = Training(optimizer="adam", lr=1e-3, batch=16, epochs=50, patience=12, warmup=5)
SMALL = {
    "attnmil": ("attnmil", {"dim": 32, "attention_dim": 16}),
    "transmil": ("transmil", {"dim": 32, "heads": 4, "landmarks": 16}),
    "addmil": ("addmil", {"hidden": 32}),
    "clam_sb": ("clam_sb", {"dim": 32, "attention_dim": 16}),
    "clam_mb": ("clam_mb", {"dim": 32, "attention_dim": 16}),
    "dsmil": ("dsmil", {"query_dim": 32}),
    "mambamil": ("mambamil", {"dim": 32, "attention_dim": 16}),
    **{name: (name, {"dim": 32}) for name in NETS},
}
_QUEUES: list[Any] = []
ALL_TASKS = ("standard", *PAPER_TASKS, "pos_neg", "context_flip", "confounder")


def small_setup(name: str) -> Setup:
    """An architecture of the suite, small enough to train many."""
    model, params = SMALL[name]
    return Setup(model, name, params, QUICK)


def foreign_protocol(seed: int = 0, repetitions: int = 5) -> Protocol:
    """Bags and repetitions of the suite."""
    return Protocol(repetitions=repetitions, seed=seed, sizes=(800, 200, 400))


@dataclass(frozen=True)
class Job:
    """A configuration by name: the suite ("paper" or "small"), architecture, task, data and seed."""

    suite: str
    model: str
    task: str
    data: str
    seed: int

    def configuration(self, instances: Instances, device: str) -> Configuration:
        if self.suite == "paper":
            setup, protocol = SETUPS[self.model], Protocol(seed=self.seed)
        else:
            setup, protocol = small_setup(self.model), foreign_protocol(self.seed)
        return Configuration(TASKS[self.task], setup, instances, protocol, device)

    def folder(self, out: Path) -> Path:
        return out / f"{self.suite}-{Path(self.data).name}-{self.seed}"


@dataclass(frozen=True)
class Configured:
    """A configuration to train."""

    job: Job
    out: Path
    device: str

    def __str__(self) -> str:
        return f"{self.job.suite} {self.job.model} {self.job.task} {self.job.data}"

    def do(self) -> None:
        """Train all repetitions unless their file is there."""
        job = self.job
        if (job.folder(self.out) / "models" / f"{job.task}-{job.model}.safetensors").is_file():
            return
        configuration = job.configuration(load_instances(job.data), self.device)
        fitted = train_stacked(configuration)
        if job.suite != "paper":
            fitted.models.flat.copy_(fitted.models.flat.half().float())
        save_stack(job.folder(self.out), configuration, fitted)


@dataclass(frozen=True)
class ColonTraining:
    """A run on colon to train."""

    name: str
    task: str
    run: int
    data: str
    out: Path

    def __str__(self) -> str:
        return f"colon {self.name} {self.task} {self.run}"

    def do(self) -> None:
        """Train it unless its file is there."""
        train_run(self.name, self.task, self.run, read_bags(Path(self.data)), self.out / "colon-colon")


def _work(queue: Any, until: float) -> None:
    torch.set_num_threads(1)
    while time.time() < until:
        try:
            piece = queue.get(timeout=2)
        except Empty:
            return
        started = time.perf_counter()
        try:
            piece.do()
            print(f"{piece} {time.perf_counter() - started:.0f} s", flush=True)
        except Exception as error:  # one piece must not end the others
            print(f"FAILED {piece}: {type(error).__name__} {str(error)[:300]}", flush=True)


def start_workers(pieces: Sequence[Any], *, workers: int, seconds: float) -> list[BaseProcess]:
    """Processes that take pieces of work, anything with `do`, until time is up."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    _QUEUES.append(queue)  # kept: a child that starts late still has to find it
    for piece in pieces:
        queue.put(piece)
    until = time.time() + seconds
    started = [context.Process(target=_work, args=(queue, until), daemon=True) for _ in range(workers)]
    for process in started:
        process.start()
    return list(started)


def paper_jobs(data: str, seed: int, models: tuple[str, ...] = PAPER_MODELS) -> list[Job]:
    return [Job("paper", model, task, data, seed) for model in models for task in PAPER_TASKS]


def small_jobs(data: str, seed: int, tasks: tuple[str, ...] = ALL_TASKS) -> list[Job]:
    return [Job("small", model, task, data, seed) for task in tasks for model in SMALL]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="digits: a folder of features")
    parser.add_argument("--colon", help="features of benchmarks.colon.features")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suites", nargs="*", default=["paper", "small"], choices=["paper", "small"])
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--tasks", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--colon-workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=500.0)
    args = parser.parse_args()
    jobs = paper_jobs(args.data, args.seed) if "paper" in args.suites else []
    jobs += small_jobs(args.data, args.seed) if "small" in args.suites else []
    asked = [j for j in jobs if j.model in (args.models or [j.model]) and j.task in (args.tasks or [j.task])]
    pieces = [Configured(job, args.out, args.device) for job in asked]
    started = start_workers(pieces, workers=args.workers, seconds=args.seconds)
    if args.colon:
        colon = [ColonTraining(*run, args.colon, args.out) for run in runs()]
        started += start_workers(colon, workers=args.colon_workers, seconds=args.seconds)
    end = time.time() + args.seconds
    for process in started:
        process.join(max(0.0, end - time.time()))
    for process in started:
        process.kill()


if __name__ == "__main__":
    main()
