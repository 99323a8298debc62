"""`xmil insight` at scale: `python -m benchmarks.insight_scale --out DIR --slides 500 1000 2000`.

Random features of 5,000 patches x 512. Forty files are written and linked under as many names as there are
slides, so that the disk holds 0.4 GB and not 20; every name is read, explained and looked at. The longest
cohort is explained once; shorter ones are its first slides. Memory is the highest sum over the command's
processes of what each has for itself and its share of what they share (PSS).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import xmil

DIM, FILES = 512, 40


def write_features(folder: Path, *, slides: int, patches: int) -> None:
    """Feature files, never negative, around thirty centres; hard links beyond the first forty."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    centres = np.abs(rng.normal(size=(30, DIM)))
    for i in range(slides):
        path = folder / f"s{i:05}.h5"
        if i >= FILES:
            os.link(folder / f"s{i % FILES:05}.h5", path)
            continue
        x = np.abs(centres[rng.integers(30, size=patches)] + 0.3 * rng.normal(size=(patches, DIM)))
        places = np.stack([np.arange(patches) % 100, np.arange(patches) // 100], axis=1) * 256
        bag = xmil.Bag(x.astype(np.float32), coords=places, patch_size=256, mpp=0.5)
        xmil.write_bag(bag, path)


def first_slides(folder: Path, n: int) -> Path:
    """A folder with the first slides of the cohort."""
    out = folder / f"features{n}"
    if not out.is_dir():
        out.mkdir()
        for path in sorted((folder / "features").iterdir())[:n]:
            os.link(path, out / path.name)
    return out


def command(run: Path, features: Path, model: Path, *, out: Path, workers: int) -> subprocess.Popen[bytes]:
    """`xmil.insight` in a session of its own."""
    where = [str(path) for path in (run, features, model, out)]
    line = [sys.executable, "-m", "benchmarks.insight_scale", "--one", *where, "--workers", str(workers)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(  # noqa: S603 - our own command
        line, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet
    )


def watched(process: subprocess.Popen[bytes], *, done: Path, kill_at: int | None = None) -> dict[str, float]:
    """Wait for the end; at `kill_at` slides kill all of it. Seconds and highest memory in GB."""
    start, peak = time.monotonic(), 0.0
    while process.poll() is None:
        time.sleep(0.25)
        peak = max(peak, memory(process.pid))
        if kill_at is not None and done.is_dir() and sum(1 for _ in done.iterdir()) >= kill_at:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {"seconds": time.monotonic() - start, "gb": peak, "code": float(process.returncode)}


def memory(pid: int) -> float:
    """Memory in GB of a session's processes, shared pages counted once."""
    total = 0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(place.name)) == pid:
                lines = (place / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue  # it ended meanwhile
    return total / 1e6


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tables and the same findings per slide."""
    names = sorted(path.relative_to(one) for path in one.rglob("*.csv") if path.name != "failures.csv")
    return bool(names) and all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def measure(
    folder: Path, *, slides: list[int], patches: int, workers: int, explainers: int, kill: bool
) -> dict[str, Any]:
    """Times and memory at each number of slides, and whether a killed run comes to the same."""
    model = folder / "model.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    xmil.save_model(xmil.create_model("attnmil", in_dim=DIM, n_classes=2, dim=64, seed=0), model)
    run = folder / "run"
    write_features(folder / "features", slides=max(slides), patches=patches)
    start = time.monotonic()
    xmil.explain_slides(model, folder / "features", out=run, target="1", workers=explainers)
    print(json.dumps({"explain_s": time.monotonic() - start}), flush=True)
    rows = []
    for n in slides:
        features, out = first_slides(folder, n), folder / f"insight{n}"
        told = watched(command(run, features, model, out=out, workers=workers), done=out / "slides")
        rows.append({"slides": n, **told})
        print(json.dumps(rows[-1]), flush=True)
    found = {"patches": patches, "workers": workers, "rows": rows}
    return {**found, **killed_and_resumed(folder, slides[0], model, workers=workers)} if kill else found


def killed_and_resumed(folder: Path, n: int, model: Path, *, workers: int) -> dict[str, Any]:
    """Whether a run that is killed half-way comes to the same as the one that was not."""
    run = folder / "run"
    paths = (run, first_slides(folder, n), model)
    out = folder / "killed"
    first = watched(command(*paths, out=out, workers=workers), done=out / "slides", kill_at=n // 2)
    left = sum(1 for _ in (out / "slides").iterdir())
    watched(command(*paths, out=out, workers=workers), done=out / "slides")
    killed = {"killed": first["code"] < 0, "after": left, "same": same(folder / f"insight{n}", out)}
    print(json.dumps(killed), flush=True)
    return killed


def main() -> None:
    """Measure and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=4, help="run, features, model and folder: look at them, and stop")
    parser.add_argument("--work", type=Path, help="for the data; --out by default")
    parser.add_argument("--slides", type=int, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--patches", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--explainers", type=int, default=3)
    parser.add_argument("--no-kill", dest="kill", action="store_false", help="leave the killed run out")
    args = parser.parse_args()
    if args.one:
        run, features, model, out = args.one
        xmil.insight(run, features=features, model=model, out=out, workers=args.workers)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    found = measure(
        args.work or args.out,
        slides=args.slides,
        patches=args.patches,
        workers=args.workers,
        explainers=args.explainers,
        kill=args.kill,
    )
    (args.out / "scale.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
