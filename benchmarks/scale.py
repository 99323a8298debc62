"""What a slide costs, and what ten thousand and a million of them would: `python -m benchmarks.scale`.

python -m benchmarks.scale [--device cuda] [--sizes 2000 10000 50000] [--width 1024]    cost of a slide, plan
python -m benchmarks.scale --simulate 5000 [--workers 2] [--engine ray]                 a run of tiny bags

The cost is the median over several slides of reading features, explaining (`lrp`, the predicted class) and
writing Parquet, one after another; in a run, reading overlaps with explaining. On a CPU they are seconds of
CPU, which other programs do not change; on a GPU seconds on the clock. Files come from the page cache.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import xmil
from benchmarks.cohort import make_features, make_model
from xmil.data.bags import Case
from xmil.execute import Workers
from xmil.runs.explain import slide_file
from xmil.runs.summary import summarise_run
from xmil.storage import write_explanations

SLIDES = 5  # measured of each size
COHORTS = (10_000, 1_000_000)
NODE = {"cpu": 32, "cuda": 4}  # workers of a node: cores, or workers that share a GPU


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of one slide."""

    model: str
    n: int
    read: float
    explain: float
    write: float
    bytes_in: int
    bytes_out: int

    @property
    def seconds(self) -> float:
        """Of a worker that reads ahead: the longer of reading and explaining, then writing."""
        return max(self.read, self.explain) + self.write


def measure(name: str, n: int, *, width: int, device: str, folder: Path) -> Cost:
    cases = make_features(folder / f"{name}-{n}", bags=SLIDES, instances=n, width=width)
    model = make_model(folder / f"{name}.safetensors", name, width)
    net = xmil.load_model(model).to(device)
    out = folder / "out.parquet"
    xmil.explain(net, xmil.read_bag(cases[0].paths[0]))  # the first call pays for loading libraries
    taken: list[tuple[float, float, float]] = []
    clock = time.process_time if device == "cpu" else time.perf_counter
    for case in cases:
        bag, read = _timed(lambda path=case.paths[0]: xmil.read_bag(path), clock)
        e, explain = _timed(lambda b=bag: xmil.explain(net, b), clock)
        _, write = _timed(lambda one=e: write_explanations([one], out), clock)
        taken.append((read, explain, write))
    read, explain, write = (median(times) for times in zip(*taken, strict=True))
    return Cost(name, n, read, explain, write, cases[0].paths[0].stat().st_size, out.stat().st_size)


def _timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> tuple[Any, float]:
    start = clock()
    found = run()
    return found, clock() - start


def print_costs(costs: Sequence[Cost]) -> None:
    print("| model | patches | read | explain | write | features | explanation |")
    print("|---|---|---|---|---|---|---|")
    for c in costs:
        times = " | ".join(f"{1e3 * s:.1f} ms" for s in (c.read, c.explain, c.write))
        print(f"| {c.model} | {c.n:,} | {times} | {c.bytes_in / 1e6:.1f} MB | {c.bytes_out / 1e3:.0f} kB |")


def print_plan(costs: Sequence[Cost], device: str, n: int) -> None:
    workers = NODE[device]
    print(f"\n{n:,} patches per slide, nodes of {workers} workers:\n")
    print("| model | slides | worker hours | nodes | hours | read | from storage | written |")
    print("|---|---|---|---|---|---|---|---|")
    for c in (c for c in costs if c.n == n):
        for slides in COHORTS:
            work = slides * c.seconds / 3600
            nodes = max(1, round(work / workers / 12))  # about a night
            hours, read = work / workers / nodes, slides * c.bytes_in
            print(
                f"| {c.model} | {slides:,} | {work:,.1f} | {nodes} | {hours:,.2f} | {read / 1e12:,.2f} TB | "
                f"{read / hours / 3.6e12:.1f} GB/s | {slides * c.bytes_out / 1e9:,.1f} GB |"
            )


def tiny_bags(folder: Path, n: int) -> list[Case]:
    """Bags of four instances."""
    folder.mkdir()
    rng, cases = np.random.default_rng(0), []
    for i in range(n):
        path = folder / f"s{i:06}.npy"
        np.save(path, rng.standard_normal((4, 8), dtype=np.float32))
        cases.append(Case(path.stem, (path.stem,), (path,), case_id=path.stem))
    return cases


def simulate(options: argparse.Namespace, folder: Path) -> None:
    """A run of many tiny bags: what is left is the cost of the machinery for each slide."""
    start = time.perf_counter()
    cases = tiny_bags(folder / "features", options.simulate)
    model = make_model(folder / "m.safetensors", "meanpool", 8)
    print(f"made {len(cases):,} bags in {time.perf_counter() - start:.1f} s", flush=True)
    engine = Workers(options.engine, workers=options.workers)
    who = {"engine": options.engine, "workers": options.workers}
    for what in ("done", "found"):  # with the summary
        cpu = time.process_time()
        run, seconds = _timed(
            lambda: xmil.explain_slides(model, folder / "features", out=folder / "run", **who)
        )
        assert len(run) == len(cases)
        _print_share(what, len(cases), seconds, time.process_time() - cpu)
    files = [slide_file(folder / "run", case.name) for case in cases]
    cpu = time.process_time()
    _, seconds = _timed(lambda: summarise_run(folder / "run", files, workers=engine))
    _print_share("summary", len(cases), seconds, time.process_time() - cpu)
    print(f"peak memory of the driver: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


def _print_share(what: str, n: int, seconds: float, cpu: float) -> None:
    each = f"{1e3 * seconds / n:.2f} ms per slide, {1e3 * cpu / n:.2f} ms of the driver's CPU"
    print(f"{what}: {seconds:.1f} s, {each}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2_000, 10_000, 50_000])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--models", nargs="+", default=["attnmil", "transmil"])
    parser.add_argument("--simulate", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--engine", default="local")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="xmil-scale-") as folder:
        if options.simulate:
            simulate(options, Path(folder))
            return
        place = {"width": options.width, "device": options.device, "folder": Path(folder)}
        costs = [measure(name, n, **place) for name in options.models for n in options.sizes]
        print(
            f"{options.device}, {torch.get_num_threads()} threads, features {options.width} wide, float32\n"
        )
        print_costs(costs)
        print_plan(costs, options.device.split(":")[0], options.sizes[min(1, len(options.sizes) - 1)])


if __name__ == "__main__":
    main()
