"""Kill every command at every point of writing, go on, and compare with an unbroken run.

    python -m benchmarks.killed --kills 1000 [--processes 16] [--commands tile explain] [--workers 1 4]

A point is a file made, half written, about to be renamed, renamed, or a folder made. The process that
reaches it dies by kill -9, alone or with all others of the command, by turns. Then nothing under a final name
may be half a file, and the same command must end as the unbroken run does. Commands whose packages are not
installed are named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.killed.commands import COMMANDS, IN_PROCESSES, contents, prepare, run
from benchmarks.killed.points import install

LIMIT = 120.0  # seconds for one attempt; beyond is a hang


@dataclass(frozen=True)
class Trial:
    """One command, with so many workers, killed at one point."""

    command: str
    workers: int
    at: int
    everyone: bool


@dataclass(frozen=True)
class Result:
    """Whether the kill happened, and what was wrong."""

    trial: Trial
    killed: bool
    faults: list[str]


class Study:
    """The inputs, the unbroken runs, and the number of points of each."""

    def __init__(self, folder: Path, commands: list[str], workers: list[int]) -> None:
        self.folder, self.points = folder, dict[tuple[str, int], int]()
        self.whole = dict[tuple[str, int], dict[str, str]]()
        self.left_out = dict[str, str]()
        _import_all()
        prepare(folder / "data")
        for command in commands:
            for number in workers if command in IN_PROCESSES else [1]:
                self._unbroken(command, number)

    def _unbroken(self, command: str, number: int) -> None:
        out = self.folder / "whole" / f"{command}{number}"
        code = self.attempt(Trial(command, number, 0, False), out)
        if code:
            log = (self.folder / "log").read_text().strip().splitlines() or ["no word"]
            self.left_out[command] = f"exit code {code}: {log[-1][:150]}"
            return
        self.points[command, number] = out.with_suffix(".points").stat().st_size
        self.whole[command, number] = contents(out)

    def attempt(self, trial: Trial, out: Path) -> int:
        """Run the command in a forked process, which may be killed; its exit code, negative for a signal."""
        counter = out.with_suffix(".points")
        out.parent.mkdir(parents=True, exist_ok=True)
        counter.unlink(missing_ok=True)
        if (child := os.fork()) == 0:
            os._exit(self._run(trial, out, counter))
        until = time.monotonic() + LIMIT
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > until:
                os.killpg(child, 9)
            time.sleep(0.005)

    def _run(self, trial: Trial, out: Path, counter: Path) -> int:
        os.setpgid(0, 0)
        log = os.open(
            self.folder / "log" if not trial.at else os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        )
        for stream in (1, 2):
            os.dup2(log, stream)
        site = Path(__file__).parent / "site"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *sys.path])
        workers = ["--workers", str(trial.workers)] if trial.command in IN_PROCESSES else []
        install(trial.at, counter, everyone=trial.everyone)
        try:
            return run([*COMMANDS[trial.command](self.folder / "data"), "--out", str(out), *workers])
        except SystemExit as end:
            return int(end.code or 0)

    def judge(self, trial: Trial) -> Result:
        """Kill, look for half files, go on, compare."""
        out = Path(tempfile.mkdtemp(dir=self.folder)) / "out"
        key, faults = (trial.command, trial.workers), []
        try:
            code = self.attempt(trial, out)
            killed = _size(out.with_suffix(".points")) >= trial.at
            faults += _half_files(out)
            if code:
                code = self.attempt(Trial(trial.command, trial.workers, 0, False), out)
                faults += [f"ended with {code}"] if code else []
            faults += _differences(self.whole[key], out)
        finally:
            shutil.rmtree(out.parent, ignore_errors=True)
        return Result(trial, killed, faults)


def _import_all() -> None:
    """What the commands import on first use, so that forked attempts need not."""
    lazy = ["matplotlib.pyplot", "sklearn.metrics", "sklearn.cluster", "scipy.stats", "pandas", "h5py"]
    lazy += [f"xmil.runs.{name}" for name in ("tile", "embed", "predict", "explain", "evaluate", "insight")]
    lazy += ["xmil.runs.heatmap", "xmil.heatmaps.drawing", "xmil.heatmaps.standards", "xmil.training.train"]
    for name in lazy:
        with suppress(ImportError):
            import_module(name)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _half_files(out: Path) -> list[str]:
    try:
        contents(out)
    except Exception as error:  # whatever reading half a file raises
        return [f"half a file: {error!r}"]
    return []


def _differences(whole: dict[str, str], out: Path) -> list[str]:
    found = contents(out)
    names = sorted(whole.keys() ^ found.keys())
    left = [str(path) for path in out.rglob(".*.part")]
    others = [name for name in whole.keys() & found.keys() if whole[name] != found[name]]
    return [f"missing or too many: {names}"] * bool(names) + [f"differs: {n}" for n in others] + left


def plan(points: dict[tuple[str, int], int], kills: int, first: int = 0) -> list[Trial]:
    """Every point in turn, each command the same number of times, alone and with all by turns."""
    trials: list[Trial] = []
    turn = first
    while len(trials) < kills and points:
        for (command, workers), number in points.items():
            trials.append(
                Trial(command, workers, 1 + turn % number, everyone=bool((turn // number + turn) % 2))
            )
        turn += 1
    return trials[:kills]


_study: Study | None = None


def _judge(trial: Trial, until: float) -> Result:
    assert _study is not None
    return _study.judge(trial) if time.monotonic() < until else Result(trial, False, [])


def kill_commands(
    folder: Path,
    commands: list[str],
    *,
    workers: list[int],
    kills: int,
    processes: int = 1,
    seconds: float = float("inf"),
    first: int = 0,
) -> dict[str, object]:
    """The counts of a study, and every fault."""
    global _study
    torch.set_num_threads(1)
    _study = Study(folder, commands, workers)
    trials = plan(_study.points, kills, first)
    judge = partial(_judge, until=time.monotonic() + seconds)
    if processes > 1:
        with get_context("fork").Pool(processes) as pool:
            results = list(pool.imap_unordered(judge, trials, chunksize=1))
    else:
        results = [judge(trial) for trial in trials]
    counted = Counter(f"{r.trial.command}, {r.trial.workers} workers" for r in results if r.killed)
    faults = [f"{r.trial}: {fault}" for r in results for fault in r.faults]
    points = {f"{command}, {number} workers": value for (command, number), value in _study.points.items()}
    return {
        "kills": sum(r.killed for r in results),
        "by command": dict(sorted(counted.items())),
        "points": points,
        "left out": _study.left_out,
        "faults": faults,
    }


def main() -> None:
    """Kill and say what it came to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--first", type=int, default=0, help="the point to begin at")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no kill after so many")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--commands", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    parser.add_argument("--random-training", action="store_true", help="kill a training at random moments")
    args = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if args.random_training:
            from benchmarks.killed.training import kill_training, write_cohort

            report = kill_training(write_cohort(Path(folder)), Path(folder) / "work", kills=args.kills)
            found: dict[str, object] = {
                "kills": report.kills,
                "faults": report.differences + report.half_files,
            }
        else:
            options = {"workers": args.workers, "kills": args.kills, "processes": args.processes}
            options |= {"seconds": args.seconds, "first": args.first}
            found = kill_commands(Path(folder), args.commands, **options)
    found["seconds"] = round(time.monotonic() - begun, 1)
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if found["faults"] else 0)


if __name__ == "__main__":
    main()
