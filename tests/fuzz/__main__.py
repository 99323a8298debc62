"""Send damaged inputs to everything that reads, in sacrificial processes.

    python -m tests.fuzz --inputs 1000000 [--processes 16] [--seconds 120] [--entries config cohort]
    make fuzz MINUTES=60    goes on where it stopped, and counts all that was ever tried

Each input must be read, or refused by an error of ours in one line: within ten seconds, within 1.5 GB of
memory, without a crash, and without starting a program or a connection. Inputs follow from their entry and
number alone, so that another --first gives others; `distinct` counts those of a run by what they hold, since
small inputs come again. With --ledger FOLDER a run goes on after the last input of those before, and counts
theirs too, once it has tried those at fault again; with --each N an entry that has so many distinct inputs
rests. Those at fault are kept under --keep, to be put into tests/fuzz/corpus, which the tests replay.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import xmil
from tests.fuzz.entries import ENTRIES
from tests.fuzz.hostile import Watch
from tests.fuzz.mutations import spoil

SECONDS, PEAK, CHUNK = 10, int(1.5e9), 500
FASTEST = 1000  # inputs a second that one process may come to
MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own is made there: no disk needs to see the inputs
WORD = 8  # bytes of the digest of an input
Job = tuple[str, int, int, Path, Path]  # entry, first input, how many, folder to work in, the sound input


def made(name: str, number: int, golden: Path, place: Path) -> Path:
    """One input: it follows from its entry and number."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), number])
    return spoil(golden, place / golden.name, rng)


def digest(path: Path) -> bytes:
    """A word for what an input holds: a file, or a folder's files with their names."""
    found = hashlib.blake2b(digest_size=WORD)
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        found.update(str(file.relative_to(path.parent)).encode("utf-8", "surrogateescape") + b"\0")
        found.update(file.read_bytes())
    return found.digest()


def judged(name: str, path: Path) -> tuple[str, str]:
    """Read an input: "read", "refused", or "fault" with the reason."""
    _alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ENTRIES[name].read(path)
        return "read", ""
    except xmil.XmilError as error:
        return ("fault", f"several lines: {error}"[:300]) if "\n" in str(error) else ("refused", "")
    except Exception as error:
        return "fault", f"{type(error).__name__}: {error}"[:300]
    finally:
        _alarm(0)


def _alarm(seconds: int) -> None:
    """End the process, in a library too, after so many seconds of work, or ten times as many of the clock.

    On a busy machine ten seconds of the clock may be one of work, and no hang.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)


def work(job: Job, until: float) -> None:
    """A sacrificial process: some inputs of one entry; it notes where it is, so that a death can be told."""
    name, first, count, scratch, golden = job
    limit = _mapped() + 4 * PEAK
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    scratch.mkdir(parents=True)
    watch = Watch()
    at = os.open(scratch / "at", os.O_WRONLY | os.O_CREAT)
    seen = os.open(scratch / "seen", os.O_WRONLY | os.O_CREAT)
    os.write(seen, digest(golden))
    tally, faults = Counter[str](), []
    for number in range(first, first + count):
        if time.monotonic() > until:
            break
        os.pwrite(at, str(number).encode(), 0)
        place = scratch / "input"
        place.mkdir()
        path = made(name, number, golden, place)
        os.write(seen, digest(path))
        watch.taken()
        verdict, why = judged(name, path)
        if ran := watch.taken():
            verdict, why = "fault", f"it ran {', '.join(ran)}"
        tally[verdict] += 1
        if why:
            faults.append([number, why])
        shutil.rmtree(place)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if peak > PEAK:
        faults.append([first, f"{peak / 1e9:.1f} GB of memory for {count} inputs"])
    (scratch / "result.json").write_text(json.dumps({"tally": tally, "faults": faults, "peak": peak}))


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def sacrifice(job: Job, until: float) -> list[dict[str, Any]]:
    """Run `work` in forked processes: where one dies, the next goes on after the input it was at."""
    name, first, count, scratch, golden = job
    found = []
    while count and time.monotonic() < until:
        status = _forked((name, first, count, scratch, golden), until)
        seen = _words(scratch / "seen")
        if (scratch / "result.json").exists():
            found.append(json.loads((scratch / "result.json").read_text()))
            found[-1] |= {"first": first, "next": first + sum(found[-1]["tally"].values())}
            count = 0
        else:
            at = int((scratch / "at").read_text()) if (scratch / "at").exists() else first
            faults = [[at, f"the process died ({status})"]]
            tally = {"survived": at - first, "fault": 1}
            found.append({"tally": tally, "faults": faults, "peak": 0, "first": first, "next": at + 1})
            first, count = at + 1, first + count - at - 1
        found[-1]["seen"] = seen
        shutil.rmtree(scratch, ignore_errors=True)
    return [{"entry": name, **part} for part in found]


def _words(path: Path) -> set[bytes]:
    """The digests of the inputs of a process, and first that of the sound one, which is none."""
    held = path.read_bytes() if path.exists() else b""
    words = [held[i : i + WORD] for i in range(0, len(held), WORD)]
    return set(words) - set(words[:1])


def _forked(job: Job, until: float) -> int:
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            work(job, until)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fuzz(
    names: list[str],
    *,
    inputs: int,
    processes: int,
    seconds: float,
    first: int = 0,
    each: int | None = None,
    ledger: Ledger | None = None,
) -> Iterator[dict[str, Any]]:
    """Inputs of every entry by turns, until there are enough or the time is up: the counts as they grow."""
    until = time.monotonic() + seconds
    torch.set_num_threads(1)
    counts: dict[str, Any] = {"inputs": 0, "distinct": 0, "by entry": {name: Counter() for name in names}}
    counts |= {"distinct by entry": dict.fromkeys(names, 0), "peak": 0, "faults": []}
    seen: dict[str, set[bytes]] = {name: ledger.words(name) if ledger else set() for name in names}
    starts = ledger.next if ledger else dict.fromkeys(names, first)
    if seconds < float("inf"):  # more are not reached, and would wait in memory
        inputs = min(inputs, int(FASTEST * seconds * processes) + len(names))
    share = -(-inputs // len(names))
    todo = {name: min(share, each - len(seen[name])) if each else share for name in names}
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        goldens = _prepared(names, Path(folder))
        again = [at for at in ledger.faults if at[0] in goldens] if ledger else []
        jobs = [(name, at, 1, Path(folder) / f"{name}-{at}", goldens[name]) for name, at in again]
        jobs += _jobs(goldens, todo, starts, Path(folder))
        with get_context("fork").Pool(processes) as pool:
            for parts in pool.imap_unordered(partial(sacrifice, until=until), jobs, chunksize=1):
                for part in parts:
                    if ledger:
                        ledger.note(part, part["seen"] - seen[part["entry"]])
                    seen[part["entry"]] |= part["seen"]
                    _add(counts, part, len(seen[part["entry"]]))
                yield counts


class Ledger:
    """A folder that remembers which inputs were tried: digests by entry, and a line for each part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def parts(self) -> list[dict[str, Any]]:
        """What was noted: entry, day, first input not tried yet, counts, faults."""
        path = self.folder / "parts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def faults(self) -> dict[tuple[str, int], str]:
        """The inputs at fault by entry and number; one that was tried again and passed is none."""
        found: dict[tuple[str, int], str] = {}
        for part in self.parts:
            name, first = part["entry"], part.get("first", part["next"] - sum(part["tally"].values()))
            found = {k: w for k, w in found.items() if k[0] != name or not first <= k[1] < part["next"]}
            found |= {(name, number): why for number, why in part["faults"]}
        return found

    @property
    def next(self) -> dict[str, int]:
        """The number of the first input of each entry that it has not tried."""
        numbers: dict[str, int] = dict.fromkeys(ENTRIES, 0)
        for part in self.parts:
            numbers[part["entry"]] = max(part["next"], numbers.get(part["entry"], 0))
        return numbers

    def words(self, entry: str) -> set[bytes]:
        """The digests of an entry's inputs so far."""
        path = self.folder / f"{entry.replace(' ', '_')}.digests"
        held = path.read_bytes() if path.exists() else b""
        return {held[i : i + WORD] for i in range(0, len(held) // WORD * WORD, WORD)}

    def note(self, part: dict[str, Any], new: set[bytes]) -> None:
        """Add what a part tried; a process that is killed loses the part it was at, and no more."""
        with (self.folder / f"{part['entry'].replace(' ', '_')}.digests").open("ab") as stream:
            stream.write(b"".join(new))
        about = {key: part[key] for key in ("entry", "first", "next", "tally", "faults")}
        with (self.folder / "parts.jsonl").open("a") as stream:
            stream.write(json.dumps({"day": time.strftime("%Y-%m-%d"), **about}) + "\n")

    def summary(self) -> dict[str, Any]:
        """All that was ever tried: inputs, distinct ones, by entry, the days, and the faults."""
        parts, names = self.parts, sorted({part["entry"] for part in self.parts})
        distinct = {name: len(self.words(name)) for name in names}
        days = sorted({part["day"] for part in parts})
        return {
            "inputs": sum(sum(part["tally"].values()) for part in parts),
            "distinct": sum(distinct.values()),
            "fewest": min(distinct.values(), default=0),
            "distinct by entry": distinct,
            "days": days,
            "faults": [f"{name} {number}: {why}" for (name, number), why in self.faults.items()],
        }


def _add(counts: dict[str, Any], part: dict[str, Any], distinct: int) -> None:
    counts["distinct by entry"][part["entry"]] = distinct
    counts["distinct"] = sum(counts["distinct by entry"].values())
    counts["by entry"][part["entry"]].update(part["tally"])
    counts["inputs"] += sum(part["tally"].values())
    counts["peak"] = max(counts["peak"], part["peak"])
    counts["faults"] += [f"{part['entry']} {number}: {why}" for number, why in part["faults"]]


def _prepared(names: list[str], folder: Path) -> dict[str, Path]:
    """The sound input of each entry, once for all: some hold the time, and would differ from job to job.

    What reading and writing them imports is imported here, so that forked processes need not. A process of
    its own makes them, since libraries may start threads, which forks do not survive.
    """
    told = folder / "prepared.json"
    if (child := os.fork()) == 0:
        try:
            goldens = {name: _sound(name, folder / f"golden{i}") for i, name in enumerate(names)}
            told.write_text(json.dumps([goldens, list(sys.modules)], default=str))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    if not told.exists():
        raise SystemExit("the sound inputs cannot be made; tests/fuzz/test_corpus.py says why")
    goldens, modules = json.loads(told.read_text())
    for module in sorted(set(modules) - set(sys.modules)):
        with suppress(Exception):
            import_module(module)
    gc.freeze()
    return {name: Path(path) for name, path in goldens.items()}


def _sound(name: str, place: Path) -> Path:
    place.mkdir()
    path = ENTRIES[name].make(place)
    judged(name, path)
    return path


def _jobs(
    goldens: dict[str, Path], todo: dict[str, int], starts: dict[str, int], folder: Path
) -> Iterator[Job]:
    """So many inputs of each entry, a chunk of each by turns."""
    for done in range(0, max(todo.values()), CHUNK):
        for i, (name, golden) in enumerate(goldens.items()):
            if (count := min(CHUNK, todo[name] - done)) > 0:
                yield name, starts[name] + done, count, folder / f"{i}-{done}", golden


def main() -> None:
    """Fuzz and say what it came to."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--each", type=int, help="enough distinct inputs of an entry")
    parser.add_argument("--entries", nargs="+", default=list(ENTRIES), choices=list(ENTRIES))
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    parser.add_argument("--ledger", type=Path, help="a folder that remembers what was tried before")
    parser.add_argument("--report", action="store_true", help="say what the ledger has, and try nothing")
    parser.add_argument("--keep", type=Path, help="a folder for the inputs at fault")
    args = parser.parse_args()
    left_out = {name: ENTRIES[name].lacks for name in args.entries if ENTRIES[name].lacks}
    names = [name for name in args.entries if name not in left_out]
    begun = time.monotonic()
    ledger = Ledger(args.ledger) if args.ledger else None
    if ledger and args.report:
        print(json.dumps(ledger.summary(), indent=1))
        return
    options = {"inputs": args.inputs, "processes": args.processes, "first": args.first, "each": args.each}
    options |= {"ledger": ledger}
    found: dict[str, Any] = {"faults": []}
    for found in fuzz(names, seconds=args.seconds, **options):
        found |= {"left out": left_out, "seconds": round(time.monotonic() - begun, 1)}
        if args.out:  # as it goes: whoever ends this process still has the counts
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.keep:
        keep(found["faults"], args.keep)
    print(json.dumps({**found, "ever": ledger.summary()} if ledger else found, indent=1))
    sys.exit(1 if found["faults"] else 0)


def keep(faults: list[str], folder: Path) -> None:
    """Make the inputs at fault again, from their entry and number, without reading them."""
    for fault in faults:
        name, number = fault.partition(":")[0].rsplit(" ", 1)
        place = folder / f"{name.replace(' ', '_')}-{number}"
        if (child := os.fork()) == 0:  # libraries may crash while they write the like
            try:
                _remake(name, int(number), place)
            finally:
                os._exit(0)
        os.waitpid(child, 0)


def _remake(name: str, number: int, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    (place / "golden").mkdir(parents=True)
    golden = ENTRIES[name].make(place / "golden")
    made(name, number, golden, place)
    shutil.rmtree(place / "golden")


if __name__ == "__main__":
    main()
