"""Explaining a cohort against only reading it, with the same processes.

python -m benchmarks.cohort --reading --device cuda --bags 500 --instances 10000 --width 1024 --dtype float16

Reading is the run's own: file to memory, with the checks and digests, nothing explained. "cold" files are
dropped from the page cache beforehand, "warm" ones lie in it. The whole run counts: tables and summary too.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import xmil
from xmil.data.bags import Case
from xmil.execute import Stages, Workers, identify_inputs, process
from xmil.runs.ensemble import Ensemble, open_models, worker_with
from xmil.runs.explain import Explaining, Questions, make_explainer
from xmil.runs.requests import ExplainRequest
from xmil.storage import Item


def reading_options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--reading", action="store_true", help="explaining against only reading")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")


def measure_reading(options: argparse.Namespace) -> None:
    """Print seconds of both, cold and warm, for each number of processes."""
    with tempfile.TemporaryDirectory(prefix="xmil-reading-") as name:
        folder, rows = Path(name), []
        cases = write_cases(folder / "features", options)
        for model in options.models:
            path = folder / f"{model}.safetensors"
            xmil.save_model(xmil.create_model(model, in_dim=options.width, n_classes=2, seed=0), path)
            first = options_of(path, cases, folder / f"{model}-first", Workers(), options.device)
            xmil.explain_slides(**{**first, "features": cases[0].paths[0]})  # pays for loading libraries
            for workers in options.processes:
                for state in ("warm", "cold"):
                    rows.append(_row(options, model, path, cases, folder, workers, state))
                    print(json.dumps(rows[-1]), flush=True)
                    if options.out is not None:
                        options.out.write_text(json.dumps(rows, indent=1))


def write_cases(folder: Path, options: argparse.Namespace) -> list[Case]:
    """Feature files in TRIDENT's layout; each begins a row further in the same random numbers."""
    folder.mkdir()
    n = options.instances
    rng = np.random.default_rng(0)
    base = rng.standard_normal((n + options.bags, options.width), dtype=np.float32).astype(options.dtype)
    xy = np.stack(np.divmod(np.arange(n), 100), axis=1) * 512
    cases = []
    for i in range(options.bags):
        name, path = f"s{i:06}", folder / f"s{i:06}.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("features", data=base[i : i + n])
            file.create_dataset("coords", data=xy).attrs["patch_size_level0"] = 512
        cases.append(Case(name, (name,), (path,), case_id=name))
    os.sync()
    return cases


def _row(
    options: argparse.Namespace,
    model: str,
    path: Path,
    cases: Sequence[Case],
    folder: Path,
    workers: int,
    state: str,
) -> dict[str, Any]:
    engine = Workers(workers=workers)
    times = []
    for what in ("read", "explain"):
        place(cases, cold=state == "cold")
        start = time.perf_counter()
        out = folder / f"{model}-{workers}-{state}"
        if what == "read":
            only_read(path, cases, out, engine, options.device)
        else:
            explained(path, cases, out, engine, options.device)
        times.append(time.perf_counter() - start)
    size = {"model": model, "slides": len(cases), "n": options.instances, "width": options.width}
    found = {"read s": round(times[0], 2), "explain s": round(times[1], 2)}
    ratio = round(times[1] / times[0], 3)
    return {**size, "dtype": options.dtype, "processes": workers, "state": state, **found, "ratio": ratio}


def place(cases: Sequence[Case], *, cold: bool) -> None:
    """Have the files outside the page cache, or in it."""
    for case in cases:
        with case.paths[0].open("rb") as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass


def explained(model: Path, cases: Sequence[Case], out: Path, workers: Workers, device: str) -> None:
    """The run, from the first look at the folder to the summary."""
    run = xmil.explain_slides(**options_of(model, cases, out, workers, device))
    assert len(run) == len(cases), run.failed


def options_of(
    model: Path, cases: Sequence[Case], out: Path, workers: Workers, device: str
) -> dict[str, Any]:
    """What the run and the reading share; several processes compute on the CPU."""
    features = cases[0].paths[0].parent
    here = device if workers.workers == 1 else "cpu"
    who = {"engine": workers.kind, "workers": workers.workers, "device": here}
    return {"model": model, "features": features, "out": out, **who}


def only_read(model: Path, cases: Sequence[Case], out: Path, workers: Workers, device: str) -> None:
    """The run's reading, and nothing else."""
    request = ExplainRequest.build(**options_of(model, cases, out, workers, device))
    models, place = open_models(request)
    questions = Questions(request, models.settings(), models.digests)
    make = worker_with(
        models, place, partial(make_reader, Explaining(questions, place)), in_process=workers.in_process
    )
    items = [questions.item_of(case) for case in cases]
    count = sum(outcome.error is None for outcome in process(items, make, workers))
    assert count == len(cases)


def make_reader(explaining: Explaining, models: Ensemble) -> Stages[Item[Case], int]:
    """Make a worker that reads as an explainer does, and lets go of what it read."""
    explainer = make_explainer(explaining, models)
    return Stages(lambda item: explainer.read(identify_inputs(item)), _count)


def _count(item: Item[Case], read: Any) -> int:  # noqa: ARG001 - the signature of a stage
    return len(read.bag)
