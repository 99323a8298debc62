"""CPU seconds of `xmil explain`, of the same command with nothing left to do, and of `xmil verify`.

    git archive d0c3c6a4 src | tar x -C /tmp/xmil-0.2.0
    python -m benchmarks.resuming --old /tmp/xmil-0.2.0/src --new src [--slides 2000] [--repetitions 5]

It compares two versions over many small slides, so that the run folder counts and not the model. A time is
user plus system of a process and of those that it starts. Both versions take turns, and go first by turns.
Files are not synced (XMIL_SYNC=0).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.cohort import make_features, make_model

INSTANCES, WIDTH = 20, 12
ROWS = ("explain", "again", "verify")


def measure(tree: Path, folder: Path) -> dict[str, float]:
    """CPU seconds of each command with the code of a tree, over the inputs in a folder."""
    out = folder / "run"
    inputs = ["--model", str(folder / "model.safetensors"), "--features", str(folder / "features")]
    explain = ["explain", *inputs, "--methods", "lrp", "--out", str(out)]
    try:
        times = [run_command(tree, words) for words in (explain, explain, ["verify", str(out)])]
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return dict(zip(ROWS, times, strict=True))


def run_command(tree: Path, words: Sequence[str]) -> float:
    """Run a command in a process of its own; its CPU seconds, with those of its children."""
    settings = {"PYTHONPATH": str(tree), "XMIL_SYNC": "0", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(  # noqa: S603  # our own interpreter on our own files
        [sys.executable, "-m", "xmil.cli", *words],
        env={**os.environ, **settings},
        cwd=tree,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    text = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode:
        raise SystemExit(f"{tree}: xmil {words[0]} ended with {process.returncode}: {text[-500:]}")
    return usage.ru_utime + usage.ru_stime


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("old", "new"):
        parser.add_argument(f"--{name}", type=Path, required=True, help="folder that holds the package xmil")
    parser.add_argument("--slides", type=int, default=2000)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)
    trees = {"old": options.old.absolute(), "new": options.new.absolute()}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory(prefix="xmil-resuming-") as place:
        folder = Path(place)
        make_features(folder / "features", bags=options.slides, instances=INSTANCES, width=WIDTH)
        make_model(folder / "model.safetensors", "attnmil", WIDTH)
        for repetition in range(options.repetitions):
            for name in sorted(trees, reverse=bool(repetition % 2)):
                times[name].append(measure(trees[name], folder))
    print_table(times, options.slides)


def print_table(times: dict[str, list[dict[str, float]]], slides: int) -> None:
    print(
        f"{slides} slides of {INSTANCES} patches and {WIDTH} features, AttnMIL, lrp, XMIL_SYNC=0: "
        f"CPU seconds, medians of {len(times['old'])}"
    )
    print(f"{'':<8} {'old':>8} {'new':>8} {'new/old':>8}")
    for row in ROWS:
        old, new = (median(one[row] for one in times[name]) for name in ("old", "new"))
        print(f"{row:<8} {old:>8.2f} {new:>8.2f} {new / old:>8.2f}")


if __name__ == "__main__":
    main()
