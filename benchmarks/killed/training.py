"""Kill -9 at random moments of a training: `python -m benchmarks.killed --random-training [--kills 20]`.

The same config is trained once unbroken and once under kills; weights, logs and predictions must agree to the
bit.
"""

from __future__ import annotations

import csv
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch

import xmil
from xmil.cli._app import run
from xmil.models.checkpoints.files import read_weights

SETTINGS = """
[data]
features = "{0}/features"
cohort = "{0}/cohort.csv"
instances = 64
[model]
name = "attnmil"
dim = 64
dropout = 0.2
[optim]
lr = 1e-3
schedule = "cosine"
[train]
epochs = 300
batch = 4
repeats = 2
device = "cpu"
"""


@dataclass
class Report:
    """What a run under kills came to."""

    kills: int = 0
    starts: int = 0
    differences: list[str] = field(default_factory=list)
    half_files: list[str] = field(default_factory=list)


def kill_training(config: Path, work: Path, *, kills: int, seed: int = 0, start: str = "spawn") -> Report:
    """Train `config` unbroken and under kills, and compare the folders; `start` is multiprocessing's word."""
    rng, report = np.random.default_rng(seed), Report()
    whole, broken = work / "whole", work / "broken"
    begun = time.monotonic()
    _finish(_started(config, whole, start))
    length = time.monotonic() - begun
    first = 0.0 if start == "fork" else min(2.0, 0.5 * length)  # importing: a kill there teaches nothing
    while report.kills < kills:
        report.starts += 1
        process = _started(config, broken, start)
        process.join(timeout=rng.uniform(first, first + (length - first) / (0.25 * kills + 1)))
        if process.is_alive():
            process.kill()
            process.join()
            report.kills += 1
            report.half_files += _unreadable(broken)
        else:  # it was done before the kill: begin anew for the kills that are left
            report.differences += _differences(whole, broken)
            shutil.rmtree(broken)
    _finish(_started(config, broken, start))
    report.differences += _differences(whole, broken)
    report.half_files += [str(path) for path in broken.rglob(".*.part")]
    return report


def _started(config: Path, out: Path, start: str) -> BaseProcess:
    process = get_context(start).Process(target=_train, args=(str(config), str(out)))  # type: ignore[attr-defined]
    process.start()
    return process


def _finish(process: BaseProcess) -> None:
    process.join()
    if process.exitcode:
        raise SystemExit(f"the training ended with exit code {process.exitcode}")


def _train(config: str, out: str) -> None:
    """The command itself, silently."""
    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.exit(run(["train", config, "--out", out]))


def _differences(whole: Path, broken: Path) -> list[str]:
    """Files of the unbroken run that the other lacks or has otherwise; times do not count."""
    found = []
    for path in sorted(whole.rglob("*")):
        other = broken / path.relative_to(whole)
        if path.suffix == ".safetensors" and not _same_weights(path, other):
            found.append(f"{other}: other weights")
        if path.name in ("log.csv", "results.csv") and _rows(path) != _rows(other):
            found.append(f"{other}: other rows")
        if path.name == "predictions.csv" and path.read_bytes() != other.read_bytes():
            found.append(f"{other}: other predictions")
    return found


def _same_weights(a: Path, b: Path) -> bool:
    one, two = read_weights(a).state, read_weights(b).state
    return one.keys() == two.keys() and all(one[key].equal(two[key]) for key in one)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(stream)]


def _unreadable(folder: Path) -> list[str]:
    """Files under their final names that are not whole."""
    bad = []
    for path in folder.rglob("*.safetensors"):
        try:
            xmil.load_model(path)
        except xmil.XmilError as error:
            bad.append(str(error))
    for path in folder.rglob("log.csv"):
        epochs = [int(row["epoch"]) for row in _rows(path)]
        if epochs != list(range(1, len(epochs) + 1)):
            bad.append(f"{path}: epochs {epochs}")
    return bad


def write_cohort(folder: Path, n: int = 60) -> Path:
    """Random bags of two classes, and a config for them."""
    rng = np.random.default_rng(0)
    (folder / "features").mkdir(parents=True, exist_ok=True)
    lines = ["slide_id,label,split"]
    for i in range(n):
        x = rng.normal(size=(100, 64)).astype(np.float32)
        x[:10, i % 2] += 1
        np.save(folder / "features" / f"s{i}.npy", x)
        lines.append(f"s{i},{i % 2},{('train', 'train', 'val', 'test')[i // 2 % 4]}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    (folder / "config.toml").write_text(SETTINGS.format(folder))
    return folder / "config.toml"
