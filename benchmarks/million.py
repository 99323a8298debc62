"""Many slides, tiny bags: do listing, running, resuming and tables stay linear, and in how much memory?

    python -m benchmarks.million --slides 2000 20000 200000 [--workers 16]

Every slide is a file of its own (4 patches of 8 numbers) and gets an explanation of its own. The figures are
microseconds per slide and the peak memory of the process; linear means that the former do not grow.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import xmil
from xmil.data import feature_files

PATCHES, WIDTH = 4, 8


def make(folder: Path, n: int) -> None:
    """Feature files, a table of them and a model."""
    (folder / "features").mkdir(parents=True)
    x = np.random.default_rng(0).normal(size=(PATCHES, WIDTH)).astype(np.float32)
    np.save(folder / "one.npy", x)
    content = (folder / "one.npy").read_bytes()
    for i in range(n):
        (folder / "features" / f"s{i:07}.npy").write_bytes(content)
    lines = (f"s{i:07},c{i // 2:07},{i % 2}" for i in range(n))
    (folder / "cohort.csv").write_text("slide_id,case_id,label\n" + "\n".join(lines) + "\n")
    model = xmil.create_model("meanpool", in_dim=WIDTH, n_classes=2, dim=4, seed=0)
    xmil.save_model(model, folder / "m.safetensors")


def stages(folder: Path, workers: int) -> dict[str, Callable[[], Any]]:
    """What is timed, in order."""
    out = folder / "run"

    def explain() -> Any:
        paths = {"out": out, "cohort": folder / "cohort.csv"}
        return xmil.explain_slides(folder / "m.safetensors", folder / "features", workers=workers, **paths)

    return {
        "list": lambda: feature_files(folder / "features"),
        "cohort": lambda: xmil.read_cohort(folder / "cohort.csv"),
        "explain": explain,
        "resume": explain,
        "open": lambda: len(xmil.open_run(out)),
        "table": lambda: xmil.open_run(out).table(),
    }


def measure(folder: str, workers: int, pipe: Any) -> None:
    """One size in a process of its own, so that the peak is its own."""
    torch.set_num_threads(1)
    found = {}
    for name, stage in stages(Path(folder), workers).items():
        begun = time.monotonic()
        stage()
        found[name] = time.monotonic() - begun
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["worker's peak"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    pipe.send(found)


def main() -> None:
    """Print a table, one row for each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slides", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--place", type=Path, help="folder on the disk to be used")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    results = {}
    for n in args.slides:
        folder = Path(tempfile.mkdtemp(dir=args.place))
        make(folder / "data", n)
        ours, theirs = get_context("spawn").Pipe(duplex=False)
        child = get_context("spawn").Process(
            target=measure, args=(str(folder / "data"), args.workers, theirs)
        )
        child.start()
        theirs.close()
        results[n] = ours.recv()
        child.join()
        shutil.rmtree(folder)
        row = {k: f"{1e6 * v / n:.0f} us" for k, v in results[n].items() if "peak" not in k}
        peaks = ", ".join(f"{k} {v / 1e9:.2f} GB" for k, v in results[n].items() if "peak" in k)
        print(n, row, peaks, flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
