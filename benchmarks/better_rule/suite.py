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
from xmil.study.benchmark import Configuration, train
from xmil.study.instances import Instances, load_instances
from xmil.study.protocol import PAPER_MODELS, PAPER_TASKS, SETUPS, Protocol, Setup
from xmil.study.store import Store
from xmil.study.tasks import TASKS
from xmil.study.training import Training

QUICK = Training(optimizer="adam", lr=1e-3, batch=16, epochs=50, patience=12, warmup=5)
SMALL = {
    "attnmil": ("attnmil", {"dim": 32, "attention_dim": 16}),
    "transmil": ("transmil", {"dim": 32, "heads": 4, "landmarks": 16}),
    "addmil": ("addmil", {"hidden": 32}),
    "clam_sb": ("clam_sb", {"dim": 32, "attention_dim": 16}),
    "clam_mb": ("clam_mb", {"dim": 32, "attention_dim": 16}),
    "dsmil": ("dsmil", {"query_dim": 32}),
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


def train_job(job: Job, out: Path, device: str) -> float:
    """Train all repetitions of a job unless its file is there; the seconds it took."""
    started = time.perf_counter()
    path = job.folder(out) / "models" / f"{job.task}-{job.model}.safetensors"
    if path.is_file():
        return 0.0
    configuration = job.configuration(load_instances(job.data), device)
    fitted = train(configuration)
    if job.suite != "paper":
        fitted.models.flat.copy_(fitted.models.flat.half().float())
    Store(job.folder(out)).save_models(configuration, fitted)
    return time.perf_counter() - started


@dataclass(frozen=True)
class ColonJob:
    """A run of the colon suite."""

    name: str
    task: str
    run: int
    data: str
    suite: str = "colon"

    @property
    def model(self) -> str:
        return f"{self.name} run {self.run}"


def do_job(job: Job | ColonJob, out: Path, device: str) -> float:
    """Train what a job asks for; the seconds it took."""
    if isinstance(job, Job):
        return train_job(job, out, device)
    started = time.perf_counter()
    train_run(job.name, job.task, job.run, read_bags(Path(job.data)), out / f"colon-{Path(job.data).stem}")
    return time.perf_counter() - started


def _work(queue: Any, out: Path, device: str, until: float, threads: int) -> None:
    torch.set_num_threads(threads)
    while time.time() < until:
        try:
            job = queue.get(timeout=2)
        except Empty:
            return
        try:
            print(
                f"{job.suite} {job.model} {job.task} {job.data} {do_job(job, out, device):.0f} s", flush=True
            )
        except Exception as error:  # one job must not end the others
            print(f"FAILED {job}: {type(error).__name__} {str(error)[:300]}", flush=True)


def run_jobs(
    jobs: Sequence[Job | ColonJob], out: Path, *, device: str, workers: int, seconds: float, threads: int = 1
) -> list[BaseProcess]:
    """Start workers on a list of jobs; the processes."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    _QUEUES.append(queue)  # kept: a child that starts late still has to find it
    for job in jobs:
        queue.put(job)
    until = time.time() + seconds
    started = [
        context.Process(target=_work, args=(queue, out, device, until, threads), daemon=True)
        for _ in range(workers)
    ]
    for process in started:
        process.start()
    return list(started)


def paper_jobs(data: str, seed: int, models: tuple[str, ...] = PAPER_MODELS) -> list[Job]:
    return [Job("paper", model, task, data, seed) for model in models for task in PAPER_TASKS]


def small_jobs(data: str, seed: int, tasks: tuple[str, ...] = ALL_TASKS) -> list[Job]:
    return [Job("small", model, task, data, seed) for task in tasks for model in SMALL]


def colon_jobs(features: str) -> list[ColonJob]:
    return [ColonJob(name, task, run, features) for name, task, run in runs()]


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
    parser.add_argument("--workers", type=int, default=1, help="processes for the small suite")
    parser.add_argument("--colon-workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=500.0)
    args = parser.parse_args()
    started: list[BaseProcess] = []
    if "paper" in args.suites:  # a process for each architecture: kernels of small models leave a GPU idle
        for model in PAPER_MODELS:
            jobs = [j for j in paper_jobs(args.data, args.seed, (model,)) if _asked(j, args)]
            started += run_jobs(
                jobs, args.out, device=args.device, workers=1 if jobs else 0, seconds=args.seconds
            )
    if "small" in args.suites:
        jobs = [j for j in small_jobs(args.data, args.seed) if _asked(j, args)]
        started += run_jobs(jobs, args.out, device=args.device, workers=args.workers, seconds=args.seconds)
    if args.colon:
        started += run_jobs(
            colon_jobs(args.colon), args.out, device="cpu", workers=args.colon_workers, seconds=args.seconds
        )
    end = time.time() + args.seconds
    for process in started:
        process.join(max(0.0, end - time.time()))
    for process in started:
        process.kill()


def _asked(job: Job, args: argparse.Namespace) -> bool:
    return job.model in (args.models or [job.model]) and job.task in (args.tasks or [job.task])


if __name__ == "__main__":
    main()
