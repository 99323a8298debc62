"""`xmil explain` over a cohort: its cost beside bare `explain` calls, and what kills leave behind.

python -m benchmarks.cohort [--bags 200 --instances 2000 --width 768]   throughput
python -m benchmarks.cohort --kills 20 [--workers 2]                    kill -9 at random moments
python -m benchmarks.cohort --reading [--device cuda]                   against only reading

The bare calls are on bags in memory; the run reads files, explains, writes Parquet, tables and summary.
Both take turns in one process, `--block` bags a run (all of them); the best of several rounds counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import xmil
from benchmarks.cohort_reading import measure_reading, reading_options
from xmil.core.durable import write_text
from xmil.data.bags import Case
from xmil.execute import Workers
from xmil.storage import read_explanations


def make_features(folder: Path, *, bags: int, instances: int, width: int) -> list[Case]:
    """Feature files in TRIDENT's layout, on a grid."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    xy = np.stack(np.divmod(np.arange(instances), 100), axis=1) * 512
    cases = []
    for i in range(bags):
        name, path = f"s{i:06}", folder / f"s{i:06}.h5"
        features = rng.standard_normal((instances, width), dtype=np.float32)
        xmil.write_bag(xmil.Bag(features, coords=xy, patch_size=512), path)
        cases.append(Case(name, (name,), (path,), case_id=name))
    return cases


def make_model(path: Path, name: str, width: int) -> Path:
    xmil.save_model(xmil.create_model(name, in_dim=width, n_classes=2, seed=0), path)
    return path


Times = tuple[float, float]  # seconds on the clock, seconds of CPU


def bare(model: Path, cases: Sequence[Case]) -> Times:
    """The bare calls; reading is not counted."""
    net, total = xmil.load_model(model), np.zeros(2)
    for case in cases:
        bag = xmil.read_bag(case.paths[0])
        start = _now()
        xmil.explain(net, bag, method="lrp")
        total += _now() - start
    return float(total[0]), float(total[1])


def cohort(model: Path, cases: Sequence[Case], out: Path, engine: Workers) -> Times:
    """The run over these cases of the folder, from the first look at it to the summary."""
    table = out.with_suffix(".csv")
    write_text(table, "\n".join(["slide_id", *(case.name for case in cases)]) + "\n")
    who = {"engine": engine.kind, "workers": engine.workers}
    start = _now()
    run = xmil.explain_slides(model, cases[0].paths[0].parent, out=out, cohort=table, **who)
    wall, cpu = _now() - start
    assert len(run) == len(cases), run.failed
    return float(wall), float(cpu)


def _now() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def throughput(folder: Path, options: argparse.Namespace) -> None:
    size = {"bags": options.bags, "instances": options.instances, "width": options.width}
    cases = make_features(folder / "features", **size)
    print(f"{size}, lrp, best of {options.rounds}")
    for name in options.models:
        model = make_model(folder / f"{name}.safetensors", name, options.width)
        bare(model, cases[:3])
        cohort(model, cases[:3], folder / f"{name}-warm", Workers(workers=options.workers))
        alone, whole = np.zeros((options.rounds, 2)), np.zeros((options.rounds, 2))
        for i in range(options.rounds):
            for start in range(0, len(cases), options.block):  # in turns, so that drift hits both alike
                block, out = cases[start : start + options.block], folder / f"{name}-{i}-{start}"
                alone[i] += bare(model, block)
                whole[i] += cohort(model, block, out, Workers(workers=options.workers))
        for what, a, w in zip(("clock", "CPU"), alone.min(axis=0), whole.min(axis=0), strict=True):
            per = 1e3 / len(cases)
            print(
                f"{name:<9} {what:<5} bare {a * per:6.1f}, cohort {w * per:6.1f} ms per slide: {w / a:.2f} x"
            )


def kills(folder: Path, options: argparse.Namespace) -> None:
    """Kill the command at random moments, then let it end; compare with an unbroken run."""
    cases = make_features(
        folder / "features", bags=options.bags, instances=options.instances, width=options.width
    )
    model = make_model(folder / "model.safetensors", "attnmil", options.width)
    rng = np.random.default_rng(options.seed)
    words = ["--model", str(model), "--features", str(folder / "features"), "--methods", "lrp,gxi"]
    words += ["--target", "all", "--workers", str(options.workers)]
    _run(words, folder / "unbroken").wait()
    halves, done = 0, []
    for _ in range(options.kills):
        process = _run(words, folder / "broken")
        _wait_a_while(process, folder / "broken" / "slides", rng)
        process.kill()
        process.wait()
        files = list((folder / "broken" / "slides").glob("*.parquet"))
        halves += sum(len(read_explanations(path)) != 4 for path in files)
        done.append(len(files))
        if len(files) == len(cases):  # all done: take some away, so that the next kill meets work
            for path in rng.choice(files, len(files) // 2, replace=False):
                Path(path).unlink()
    code = _run(words, folder / "broken").wait()
    same = _bytes(folder / "unbroken") == _bytes(folder / "broken")
    rows = (folder / "broken" / "slides.csv").read_text().splitlines()[1:]
    names = [row.split(",")[0] for row in rows]
    print(
        f"{options.kills} kills, {options.workers} workers: done after each {done}; half files {halves}; "
        f"exit {code}; rows {len(names)}, different {len(set(names))} of {len(cases)}; bytes equal to an "
        f"unbroken run: {same}; leftovers {len(list((folder / 'broken').rglob('*.part')))}"
    )
    assert halves == 0 and same and len(names) == len(set(names)) == len(cases)  # noqa: PT018


def _wait_a_while(process: subprocess.Popen[bytes], slides: Path, rng: np.random.Generator) -> None:
    """Until some more slides are done and a moment longer; now and then only for seconds after the start."""
    enough = len(list(slides.glob("*.parquet"))) + int(rng.integers(1, 5))
    deadline = time.monotonic() + (float(rng.uniform(0, 5)) if rng.random() < 0.2 else 300.0)
    while process.poll() is None and time.monotonic() < deadline:
        if len(list(slides.glob("*.parquet"))) >= enough:
            break
        time.sleep(0.002)
    time.sleep(float(rng.uniform(0, 0.1)))


def _run(words: list[str], out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "xmil.cli", "explain", *words, "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(xmil.__file__).parents[1])}
    return subprocess.Popen(  # noqa: S603  # our own interpreter on our own files
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _bytes(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "slides").iterdir())}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in {
        "bags": 200,
        "instances": 2000,
        "width": 768,
        "block": 200,
        "workers": 1,
        "rounds": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--models", nargs="+", default=["attnmil", "transmil"])
    for name in ("kills", "seed"):
        parser.add_argument(f"--{name}", type=int, default=0)
    reading_options(parser)
    options = parser.parse_args(arguments)
    if options.reading:
        measure_reading(options)
        return
    with tempfile.TemporaryDirectory(prefix="xmil-cohort-") as folder:
        (kills if options.kills else throughput)(Path(folder), options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
