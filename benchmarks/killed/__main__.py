"""Kill every command at every point of writing, go on, and compare with an unbroken run.

    python -m benchmarks.killed --kills 1000 [--processes 16] [--commands tile explain] [--workers 1 4 ray]
    XMIL_SYNC=1 python -m benchmarks.killed --seconds 600 --ledger build/killed    goes on where it stopped

A point is a file made, half written, about to be renamed, renamed, a folder made, or a line of the ledger
half written or written. The process that
reaches it dies by kill -9, alone or with all others of the command, by turns. Then nothing under a final name
may be half a file, and the same command must end as the unbroken run does. Commands whose packages are not
installed are named and left out. With --full-disk the disk is full from the point on, and the command must
end by itself with a line that says so. `ray` means two workers on a Ray that the command starts. Servers are
killed while a client draws or answers: what they acknowledged must be there when they are back. A ledger
remembers every kill, so that slices add up: no point is struck twice in the same way, and `ever` counts all.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from math import gcd
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from benchmarks.killed.commands import COMMANDS, IN_PROCESSES, STARTS, contents, prepare, run
from benchmarks.killed.points import COUNTER, install, struck
from benchmarks.killed.servers import SERVERS, serve, talk
from benchmarks.killed.warm_workers import start_server
from xmil.storage import Run, compare_files, read_ledger

STAYING = 60.0  # seconds after the end of a command until its processes must be gone, on a busy machine too
LIMIT = 300.0  # seconds for one attempt, on a busy machine too; beyond is a hang, and a fault


@dataclass(frozen=True)
class Trial:
    """One command, with so many workers, killed at one point."""

    command: str
    workers: str
    at: int
    everyone: bool
    full: bool = False


@dataclass(frozen=True)
class Result:
    """Whether the kill happened, and what was wrong."""

    trial: Trial
    killed: bool
    faults: list[str]


class Study:
    """The inputs, the unbroken runs, and the number of points of each."""

    acknowledged: list[str]  # by the server of the trial that is judged
    lost: list[str]

    def __init__(self, folder: Path, commands: list[str], workers: list[str]) -> None:
        self.folder, self.points = folder, dict[tuple[str, str], int]()
        self.whole = dict[tuple[str, str], dict[str, str]]()
        self.left_out = dict[str, str]()
        _forked(partial(prepare, folder / "data"))  # computing starts threads, which no fork survives
        for number in workers:
            for command in commands:
                if command in IN_PROCESSES or number == workers[0]:
                    self._unbroken(command, number)
        gc.freeze()

    def _unbroken(self, command: str, number: str) -> None:
        out = self.folder / "whole" / f"{command}{number}"
        self.acknowledged, self.lost = [], []
        code = self.attempt(Trial(command, number, 0, False), out)
        _import_listed(self.folder / "modules")
        if code or self.lost:
            self.said += "\n".join(self.lost)
            last = (self.said.strip().splitlines() or ["no word"])[-1]
            self.left_out[command] = f"exit code {code}: {last[:150]}"
            return
        self.points[command, number] = out.with_suffix(".points").stat().st_size
        self.whole[command, number] = contents(out)

    def attempt(self, trial: Trial, out: Path, *, goes_on: bool = False) -> int:
        """Run the command in a forked process, which may be killed; its exit code, negative for a signal.

        With `goes_on` it does not start over. What it says is in `said`, through a pipe: a full disk takes no
        log.
        """
        counter, client = out.with_suffix(".points"), None
        out.parent.mkdir(parents=True, exist_ok=True)
        words = [word for word in self._words(trial, out) if not (goes_on and word == "--restart")]
        counter.unlink(missing_ok=True)
        struck(counter).unlink(missing_ok=True)
        ours, theirs = os.pipe()
        if (child := os.fork()) == 0:
            self._run_and_leave(trial, words, counter, theirs)
        os.close(theirs)
        os.set_blocking(ours, False)
        self.said, self.hung = "", False
        until = time.monotonic() + (3 if trial.workers == "ray" else 1) * LIMIT  # starting a Ray takes long
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            with suppress(BlockingIOError):
                self.said += os.read(ours, 1 << 16).decode(errors="replace")
            if pid:
                os.close(ours)
                if client:
                    client.join()
                self.lost += _stragglers(child, counter)
                return os.waitstatus_to_exitcode(status)
            if trial.command in SERVERS and client is None and "\n" in self.said:
                client = Thread(target=self._talk, args=(trial, out, child))
                client.start()
            if time.monotonic() > until:
                self.hung = True
                os.killpg(child, 9)
            time.sleep(0.005)

    def _words(self, trial: Trial, out: Path) -> list[str]:
        """The command line of an attempt."""
        if trial.command in SERVERS:
            return serve(trial.command, self.folder / "data", out)
        if trial.command in STARTS and not out.exists():
            shutil.copytree(self.folder / "data" / STARTS[trial.command], out)
        return [*COMMANDS[trial.command](self.folder / "data"), "--out", str(out), *_engine(trial)]

    def _talk(self, trial: Trial, out: Path, server: int) -> None:
        """What a client does; then the server is ended as by Ctrl-C."""
        try:
            self.lost += talk(trial.command, self.said, out, self.acknowledged)
        except Exception as error:
            self.lost.append(f"the client failed: {error!r}")
        finally:
            with suppress(ProcessLookupError):
                os.kill(server, signal.SIGINT)

    def _run_and_leave(self, trial: Trial, words: list[str], counter: Path, pipe: int) -> None:
        code = 1
        try:
            os.dup2(pipe, 1)
            os.dup2(pipe, 2)
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
            code = self._run(trial, words, counter)
        except BaseException:  # nothing of the process that was forked may go on in this one
            traceback.print_exc()
        finally:
            os._exit(code)

    def _run(self, trial: Trial, words: list[str], counter: Path) -> int:
        os.setpgid(0, 0)
        site = Path(__file__).parent / "site"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *sys.path])
        install(trial.at, counter, everyone=trial.everyone, full=trial.full)
        if "--engine" not in words and trial.workers != "1":
            start_server()
        try:
            return run(words)
        except SystemExit as end:
            return int(end.code or 0)
        finally:
            if not trial.at:
                (self.folder / "modules").write_text("\n".join(set(sys.modules)))

    def judge(self, trial: Trial) -> Result:
        """Kill, look for half files, go on, compare."""
        out = Path(tempfile.mkdtemp(dir=self.folder)) / "out"
        key, faults = (trial.command, trial.workers), []
        self.acknowledged, self.lost = [], []
        try:
            code = self.attempt(trial, out)
            faults += [f"hung: {self.said[-300:]}"] * self.hung
            killed = struck(out.with_suffix(".points")).exists()
            faults += _half_files(out)
            faults += _unclear(code, self.said) if trial.full and code else []
            faults += [f"a slide failed: {self.said[-300:]}"] if code == 1 and not trial.full else []
            if code:
                code = self.attempt(Trial(trial.command, trial.workers, 0, False), out, goes_on=True)
                faults += [f"ended with {code}{', hung' * self.hung}: {self.said[-300:]}"] if code else []
            faults += self.lost + _differences(self.whole[key], out)
        finally:
            shutil.rmtree(out.parent, ignore_errors=True)
        return Result(trial, killed, faults)


def _forked(work: Callable[[], None]) -> None:
    if (child := os.fork()) == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("the inputs could not be made")


def _stragglers(group: int, counter: Path) -> list[str]:
    """Processes of an attempt that stay after its end, by their group or by the counter they know; ended."""
    until = time.monotonic() + STAYING
    while left := list(_processes(group, str(counter))):
        if time.monotonic() > until:
            for pid, _ in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return [f"still running: {words}" for _, words in left]
        time.sleep(0.05)
    return []


def _processes(group: int, mark: str) -> Iterator[tuple[int, str]]:
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            state, _, own = (place / "stat").read_text().rpartition(")")[2].split()[:3]
            known = f"{COUNTER}={mark}".encode() in (place / "environ").read_bytes().split(b"\0")
            if state != "Z" and (int(own) == group or known):
                yield int(place.name), (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]


def _engine(trial: Trial) -> list[str]:
    """The words that say who computes."""
    if trial.command not in IN_PROCESSES:
        return []
    return ["--engine", "ray", "--workers", "2"] if trial.workers == "ray" else ["--workers", trial.workers]


def _import_listed(listed: Path) -> None:
    """Import what an unbroken run has imported on the way, so that attempts, which are forked, need not."""
    names = set(listed.read_text().split()) if listed.exists() else set()
    for name in sorted(names - set(sys.modules)):
        with suppress(Exception):
            import_module(name)


def _unclear(code: int, said: str) -> list[str]:
    """A command on a full disk ends by itself, with a line that says so."""
    clear = code == 2 and "Traceback" not in said and ("No space" in said or "too large" in said)
    return [] if clear else [f"exit code {code} without a clear line: {said[-300:]}"]


def _half_files(out: Path) -> list[str]:
    try:
        contents(out)
    except Exception as error:  # whatever reading half a file raises
        return [f"half a file: {error!r}"]
    return _alarms(out)


def _alarms(out: Path) -> list[str]:
    """What the ledger of the run finds wrong with a folder in which nothing was damaged."""
    ledger = read_ledger(out) if out.is_dir() else None
    return [] if ledger is None else [f"{name}: {why}" for name, why in compare_files(out, ledger)]


def _differences(whole: dict[str, str], out: Path) -> list[str]:
    found = contents(out)
    names = sorted(whole.keys() ^ found.keys())
    left = [f"left behind: {path.relative_to(out)}" for path in out.rglob(".*.part")]
    others = [name for name in whole.keys() & found.keys() if whole[name] != found[name]]
    unfinished = ["unfinished by its ledger"] * (not Run(out).is_finished)
    faults = [f"missing or too many: {names}"] * bool(names) + [f"differs: {n}" for n in others]
    return faults + left + unfinished + _alarms(out)


class Ledger:
    """A folder that remembers what was struck: a line for each trial, with the day and its faults."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "kills.jsonl"

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Everything that was noted."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    @property
    def last(self) -> dict[Trial, dict[str, Any]]:
        """What came of each trial when it was last made."""
        return {Trial(**line["trial"]): line for line in self.lines}

    @property
    def trials(self) -> set[Trial]:
        """The trials that need no repeating."""
        return {trial for trial, line in self.last.items() if line["killed"] and not line["faults"]}

    def note(self, result: Result) -> None:
        """Add a trial; whoever ends this process loses the one it was at, and no more."""
        about = {"day": time.strftime("%Y-%m-%d"), "synced": os.environ.get("XMIL_SYNC", "1") != "0"}
        with self.path.open("a") as stream:
            stream.write(json.dumps({**about, **asdict(result)}) + "\n")

    def summary(self) -> dict[str, Any]:
        """Kills with syncing and without, by command and workers, the days, and the faults."""
        struck = [line for line in self.lines if line["killed"]]
        names = (f"{line['trial']['command']}, {line['trial']['workers']} workers" for line in struck)
        return {
            "kills": len(struck),
            "with syncing": sum(line["synced"] for line in struck),
            "by command": dict(sorted(Counter(names).items())),
            "days": sorted({line["day"] for line in struck}),
            "faults": [f"{trial}: {why}" for trial, line in self.last.items() for why in line["faults"]],
            "mended": sum(bool(line["faults"]) for line in self.lines)
            - sum(bool(line["faults"]) for line in self.last.values()),
        }


def plan(
    points: dict[tuple[str, str], int],
    kills: int,
    first: int = 0,
    *,
    full: bool = False,
    done: Collection[Trial] = (),
) -> list[Trial]:
    """Points all over each run, each command the same number of times, alone and with all by turns."""
    trials: list[Trial] = []
    for turn in range(first, first + kills + 2 * max(points.values(), default=0)):
        for (command, workers), number in points.items():
            stride = next(step for step in (37, 41, 43, 1) if gcd(step, number) == 1)
            everyone = bool((turn // number + turn) % 2)
            trials.append(Trial(command, workers, 1 + turn * stride % number, everyone, full))
    return [trial for trial in trials if trial not in done][:kills]


_study: Study | None = None


def _judge(trial: Trial, until: float) -> Result:
    assert _study is not None
    return _study.judge(trial) if time.monotonic() < until else Result(trial, False, [])


def kill_commands(
    folder: Path,
    commands: list[str],
    *,
    workers: list[str],
    kills: int,
    processes: int = 1,
    seconds: float = float("inf"),
    first: int = 0,
    full: bool = False,
    ledger: Ledger | None = None,
) -> Iterator[dict[str, Any]]:
    """The counts of a study and every fault, as they grow."""
    global _study
    until = time.monotonic() + seconds
    torch.set_num_threads(1)
    _study = Study(folder, commands, workers)
    faulty = [trial for trial, line in ledger.last.items() if line["faults"]] if ledger else []
    again = [trial for trial in faulty if (trial.command, trial.workers) in _study.points]
    trials = again + plan(_study.points, kills, first, full=full, done=ledger.trials if ledger else ())
    results: list[Result] = []
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        for future in as_completed([pool.submit(_judge, trial, until) for trial in trials]):
            results.append(future.result())
            if ledger and (results[-1].killed or results[-1].faults):
                ledger.note(results[-1])
            yield _counts(_study, results)


def _counts(study: Study, results: list[Result]) -> dict[str, Any]:
    counted = Counter(f"{r.trial.command}, {r.trial.workers} workers" for r in results if r.killed)
    faults = [f"{r.trial}: {fault}" for r in results for fault in r.faults]
    points = {f"{command}, {number} workers": value for (command, number), value in study.points.items()}
    return {
        "kills": sum(r.killed for r in results),
        "by command": dict(sorted(counted.items())),
        "points": points,
        "left out": study.left_out,
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
    parser.add_argument("--workers", nargs="+", default=["1", "4"], help="numbers of workers, or ray")
    every = [*COMMANDS, *SERVERS]
    parser.add_argument("--commands", nargs="+", default=every, choices=every)
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    parser.add_argument("--ledger", type=Path, help="a folder that remembers what was killed before")
    parser.add_argument("--report", action="store_true", help="say what the ledger has, and kill nothing")
    parser.add_argument("--full-disk", action="store_true", help="fill the disk there instead of killing")
    parser.add_argument("--random-training", action="store_true", help="kill a training at random moments")
    args = parser.parse_args()
    begun, found = time.monotonic(), dict[str, Any](faults=[])
    ledger = Ledger(args.ledger) if args.ledger else None
    if ledger and args.report:
        print(json.dumps(ledger.summary(), indent=1))
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.random_training:
            from benchmarks.killed.training import kill_training, write_cohort

            report = kill_training(write_cohort(Path(folder)), Path(folder) / "work", kills=args.kills)
            found = {"kills": report.kills, "faults": report.differences + report.half_files}
        else:
            options = {"workers": args.workers, "kills": args.kills, "processes": args.processes}
            options |= {"seconds": args.seconds, "first": args.first, "full": args.full_disk}
            options |= {"ledger": ledger}
            for found in kill_commands(Path(folder), args.commands, **options):
                found["seconds"] = round(time.monotonic() - begun, 1)
                if args.out:  # as it goes: whoever ends this process still has the counts
                    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({**found, "ever": ledger.summary()} if ledger else found, indent=1))
    sys.exit(1 if found["faults"] else 0)


if __name__ == "__main__":
    main()
