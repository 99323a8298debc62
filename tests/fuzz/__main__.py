"""Send damaged inputs to everything that reads, in sacrificial processes.

    python -m tests.fuzz --inputs 1000000 [--processes 16] [--seconds 120] [--entries config cohort]

Each input must be read, or refused by an error of ours in one line: within ten seconds, within 1.5 GB of
memory, without a crash. Inputs follow from their entry and number alone; those at fault are kept under
--keep, to be put into tests/fuzz/corpus, which the tests replay.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import xmil
from tests.fuzz.entries import ENTRIES
from tests.fuzz.mutations import spoil

SECONDS, PEAK, CHUNK = 10, int(1.5e9), 200


def try_one(name: str, number: int, golden: Path, place: Path) -> tuple[str, str]:
    """The verdict on one input, and what is wrong with it."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), number])
    path = spoil(golden, place / golden.name, rng)
    return judged(name, path)


def judged(name: str, path: Path) -> tuple[str, str]:
    """Read an input: "read", "refused", or "fault" with the reason."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
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
        faulthandler.cancel_dump_traceback_later()


def work(name: str, first: int, count: int, scratch: Path) -> None:
    """A sacrificial process: some inputs of one entry; it notes where it is, so that a death can be told."""
    torch.set_num_threads(1)
    limit = _mapped() + 4 * PEAK
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    scratch.mkdir(parents=True)
    (scratch / "golden").mkdir()
    golden = ENTRIES[name].make(scratch / "golden")
    note, tally, faults = scratch / "at", Counter[str](), []
    for number in range(first, first + count):
        note.write_text(str(number))
        place = scratch / "input"
        place.mkdir()
        verdict, why = try_one(name, number, golden, place)
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


def sacrifice(job: tuple[str, int, int, Path], until: float) -> dict[str, Any]:
    """Run `work` in a forked process; what is left of a death is the input it was at."""
    name, first, _, scratch = job
    if time.monotonic() > until:
        return {"entry": name, "tally": {}, "faults": [], "peak": 0}
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            work(*job)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    found: dict[str, Any] = {"tally": {}, "faults": [], "peak": 0}
    if (scratch / "result.json").exists():
        found = json.loads((scratch / "result.json").read_text())
    else:
        at = int((scratch / "at").read_text() or first) if (scratch / "at").exists() else first
        found["faults"] = [[at, f"the process died ({os.waitstatus_to_exitcode(status)})"]]
        found["tally"] = {"refused": at - first, "fault": 1}
    shutil.rmtree(scratch, ignore_errors=True)
    return {"entry": name, **found}


def fuzz(names: list[str], *, inputs: int, processes: int, seconds: float, first: int = 0) -> dict[str, Any]:
    """Inputs of every entry by turns, until there are enough or the time is up."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = _jobs(names, inputs, Path(folder), first)
        with get_context("fork").Pool(processes) as pool:
            one = partial(sacrifice, until=time.monotonic() + seconds)
            results = list(pool.imap_unordered(one, jobs, chunksize=1))
    tally: dict[str, Counter[str]] = {name: Counter() for name in names}
    for result in results:
        tally[result["entry"]].update(result["tally"])
    return {
        "inputs": sum(sum(counts.values()) for counts in tally.values()),
        "by entry": {name: dict(counts) for name, counts in tally.items()},
        "peak": max((result["peak"] for result in results), default=0),
        "faults": [f"{r['entry']} {number}: {why}" for r in results for number, why in r["faults"]],
    }


def _jobs(names: list[str], inputs: int, folder: Path, first: int) -> list[tuple[str, int, int, Path]]:
    each = -(-inputs // len(names))
    chunk = min(CHUNK, each)
    starts = range(first, first + each, chunk)
    return [(n, start, chunk, folder / f"{i}-{start}") for start in starts for i, n in enumerate(names)]


def main() -> None:
    """Fuzz and say what it came to."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--entries", nargs="+", default=list(ENTRIES), choices=list(ENTRIES))
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    parser.add_argument("--keep", type=Path, help="a folder for the inputs at fault")
    args = parser.parse_args()
    left_out = {name: ENTRIES[name].lacks for name in args.entries if ENTRIES[name].lacks}
    names = [name for name in args.entries if name not in left_out]
    begun = time.monotonic()
    options = {"inputs": args.inputs, "processes": args.processes, "first": args.first}
    found = fuzz(names, seconds=args.seconds, **options)
    found |= {"left out": left_out, "seconds": round(time.monotonic() - begun, 1)}
    if args.keep:
        keep(found["faults"], args.keep)
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
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
    rng = np.random.default_rng([zlib.crc32(name.encode()), number])
    spoil(golden, place / golden.name, rng)
    shutil.rmtree(place / "golden")


if __name__ == "__main__":
    main()
