"""`xmil insight` at scale: `python -m benchmarks.insight_scale --out DIR --slides 500 1000 2000`.

Random features of 5,000 patches x 512 in half precision, a file for each slide (5 MB); with `--files 40` only
forty are written and linked under as many names as there are slides. The longest cohort is explained once;
shorter ones are its first slides. Memory is the highest sum, over the command's processes, of what each has
for itself, and the libraries they map, counted once. `cpu` are processor seconds of all processes: on a
machine with other work they tell more than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import xmil

DIM, KINDS, NOISE = 512, 30, 20_000  # features, centres, rows of noise that slides draw from


@dataclass(frozen=True)
class Memory:
    """GB that each process has for itself, and the files they map (libraries), counted once."""

    own: tuple[float, ...] = ()
    files: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.own) + self.files


def write_features(folder: Path, *, slides: int, patches: int, files: int) -> None:
    """Feature files, never negative, around thirty centres; hard links beyond the first `files`."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    centres = np.abs(rng.normal(size=(KINDS, DIM))).astype(np.float32)
    noise = (0.3 * rng.standard_normal((NOISE, DIM))).astype(np.float32)
    places = np.stack([np.arange(patches) % 100, np.arange(patches) // 100], axis=1) * 256
    for i in range(slides):
        path = folder / f"s{i:05}.h5"
        if i >= files:
            os.link(folder / f"s{i % files:05}.h5", path)
            continue
        x = centres[rng.integers(KINDS, size=patches)] + noise[rng.integers(NOISE, size=patches)]
        with h5py.File(path, "w") as file:
            file.create_dataset("features", data=np.abs(x).astype(np.float16))
            file.create_dataset("coords", data=places).attrs.update(patch_size_level0=256, mpp=0.5)


def write_cohort(path: Path, *, slides: int) -> None:
    """A table with a label, columns of acquisition and outcomes, all drawn at random."""
    rng = np.random.default_rng(1)
    lines = ["slide_id,label,site,scanner,age,time,event"]
    for i in range(slides):
        where = f"{rng.choice(['north', 'south', 'west'])},{rng.choice(['A', 'B'])},{rng.integers(30, 90)}"
        lines.append(f"s{i:05},{rng.integers(2)},{where},{rng.exponential(5):.2f},{rng.integers(2)}")
    path.write_text("\n".join(lines) + "\n")


def first_slides(folder: Path, n: int) -> Path:
    """A folder with the first slides of the cohort."""
    out = folder / f"features{n}"
    if not out.is_dir():
        out.mkdir()
        for path in sorted((folder / "features").iterdir())[:n]:
            os.link(path, out / path.name)
    return out


def command(folder: Path, slides: int, *, out: Path, workers: int) -> subprocess.Popen[bytes]:
    """`xmil.insight` in a session of its own."""
    given = ("run", first_slides(folder, slides).name, "model.safetensors", "cohort.csv")
    where = [*(str(folder / name) for name in given), str(out)]
    line = [sys.executable, "-m", "benchmarks.insight_scale", "--one", *where, "--workers", str(workers)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(  # noqa: S603 - our own command
        line, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet
    )


def watched(process: subprocess.Popen[bytes], *, done: Path, kill_at: int | None = None) -> dict[str, Any]:
    """Wait for the end; at `kill_at` slides kill all of it. Seconds, and the highest memory in GB."""
    start, peak, before = time.monotonic(), Memory(), processor_seconds()
    while process.poll() is None:
        time.sleep(0.25)
        peak = max(peak, memory(process.pid), key=lambda held: held.total)
        if kill_at is not None and done.is_dir() and sum(1 for _ in done.iterdir()) >= kill_at:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    spent = {"seconds": time.monotonic() - start, "cpu": processor_seconds() - before}
    held = {"gb": peak.total, "own": peak.own, "files": peak.files}
    return {**spent, **held, "code": process.returncode}


def processor_seconds() -> float:
    """What the processes that have ended took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory(pid: int) -> Memory:
    """What the processes of a session hold now."""
    own, shared = [], [0.0]
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(place.name)) == pid:
                lines = (place / "smaps_rollup").read_text().splitlines()[1:]
                held = {line.split(":")[0]: int(line.split()[1]) / 1e6 for line in lines}
                own.append(held["Anonymous"])
                shared.append(held["Rss"] - held["Anonymous"])
        except (OSError, IndexError, KeyError):
            continue  # it ended meanwhile
    return Memory(tuple(sorted(own, reverse=True)), max(shared))


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tables and the same findings per slide."""
    names = sorted(path.relative_to(one) for path in one.rglob("*.csv") if path.name != "failures.csv")
    return bool(names) and all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def measure(
    folder: Path, *, slides: list[int], patches: int, files: int, workers: int, explainers: int, kill: bool
) -> dict[str, Any]:
    """Times and memory at each number of slides, and whether a killed run comes to the same."""
    model = folder / "model.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    xmil.save_model(xmil.create_model("attnmil", in_dim=DIM, n_classes=2, dim=64, seed=0), model)
    run = folder / "run"
    if not (folder / "features").is_dir():
        write_features(folder / "features", slides=max(slides), patches=patches, files=files)
    write_cohort(folder / "cohort.csv", slides=max(slides))
    start = time.monotonic()
    xmil.explain_slides(model, folder / "features", out=run, target="1", workers=explainers)
    print(json.dumps({"explain_s": time.monotonic() - start}), flush=True)
    rows = []
    for n in slides:
        out = folder / f"insight{n}"
        told = watched(command(folder, n, out=out, workers=workers), done=out / "slides")
        rows.append({"slides": n, **told})
        print(json.dumps(rows[-1]), flush=True)
    found = {"patches": patches, "files": min(files, max(slides)), "workers": workers, "rows": rows}
    return {**found, **killed_and_resumed(folder, min(slides), workers=workers)} if kill else found


def killed_and_resumed(folder: Path, n: int, *, workers: int) -> dict[str, Any]:
    """Whether a run that is killed half-way comes to the same as the one that was not."""
    out = folder / "killed"
    first = watched(command(folder, n, out=out, workers=workers), done=out / "slides", kill_at=n // 2)
    left = sum(1 for _ in (out / "slides").iterdir())
    second = watched(command(folder, n, out=out, workers=workers), done=out / "slides")
    told = {"killed": first["code"] < 0, "after": left, "same": same(folder / f"insight{n}", out)}
    killed = {**told, "resumed": second}
    print(json.dumps(killed), flush=True)
    return killed


def main() -> None:
    """Measure and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=5, help="run, features, model, cohort, folder: look at them, and stop")
    parser.add_argument("--work", type=Path, help="for the data; --out by default")
    parser.add_argument("--slides", type=int, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--patches", type=int, default=5000)
    parser.add_argument("--files", type=int, default=1_000_000, help="different files; others are links")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--explainers", type=int, default=2)
    parser.add_argument("--no-kill", dest="kill", action="store_false", help="leave the killed run out")
    args = parser.parse_args()
    if args.one:
        run, features, model, cohort, out = args.one
        xmil.insight(run, features=features, model=model, cohort=cohort, out=out, workers=args.workers)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    found = measure(
        args.work or args.out,
        slides=args.slides,
        patches=args.patches,
        files=args.files,
        workers=args.workers,
        explainers=args.explainers,
        kill=args.kill,
    )
    (args.out / "scale.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
