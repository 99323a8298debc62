"""Small cohorts with models, and what a run of `xmil explain` over them left behind."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import xmil
from xmil.storage import read_explanations

WIDTH = 12
NAMES = ("neg", "pos")


def make_cohort(
    folder: Path, n: int, *, instances: int = 20, model: str = "attnmil", models: int = 1
) -> Path:
    """Feature files s000.h5, ..., two slides to a case, a cohort.csv, and models m0.safetensors, ..."""
    features = folder / "features"
    features.mkdir(parents=True)
    rng = np.random.default_rng(0)
    lines = ["slide_id,case_id,label"]
    for i in range(n):
        write_slide(features / f"s{i:03}.h5", rng, instances)
        lines.append(f"s{i:03},c{i // 2},{NAMES[i // 2 % 2]}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    for seed in range(models):
        make_model(folder / f"m{seed}.safetensors", seed=seed, model=model)
    return folder


def write_slide(path: Path, rng: np.random.Generator, n: int, *, width: int = WIDTH) -> None:
    """A slide's features on a grid."""
    xy = np.stack(np.divmod(np.arange(n), 10), axis=1) * 256
    features = rng.normal(size=(n, width)).astype(np.float32)
    xmil.write_bag(xmil.Bag(features, coords=xy, patch_size=256, mpp=0.5, encoder="uni_v2"), path)


def make_model(path: Path, *, seed: int = 0, model: str = "attnmil", **spec: Any) -> Path:
    """A model with fresh weights."""
    known = {"n_classes": 2, "class_names": NAMES, "encoder": "uni_v2"} if "task" not in spec else {}
    xmil.save_model(xmil.create_model(model, in_dim=WIDTH, seed=seed, dim=16, **{**known, **spec}), path)
    return path


def command(folder: Path, *more: str, out: str = "run", models: int = 1) -> list[str]:
    """The arguments of `xmil explain` over a cohort."""
    names = [word for i in range(models) for word in ("--model", str(folder / f"m{i}.safetensors"))]
    paths = ["--features", str(folder / "features"), "--cohort", str(folder / "cohort.csv")]
    return ["explain", *names, *paths, "--out", str(folder / out), *more]


def script(arguments: list[str]) -> list[str]:
    """The command line of a process of its own."""
    return [sys.executable, "-m", "xmil.cli", *arguments]


def environment() -> dict[str, str]:
    """What such a process needs to find this package."""
    return {**os.environ, "PYTHONPATH": str(Path(xmil.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV."""
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def scores(out: Path) -> dict[tuple[str, str], np.ndarray]:
    """Every score of a run, by slide and column."""
    return {
        (path.name, e.column): e.scores
        for path in sorted((out / "slides").glob("*.parquet"))  # a kill may leave half a file beside them
        for e in read_explanations(path)
    }


def bytes_of(out: Path) -> dict[str, bytes]:
    """The files of a run's slides, whatever they are called."""
    return {path.name: path.read_bytes() for path in sorted((out / "slides").iterdir())}


TRAP = """
import os, signal
from pathlib import Path
import torch, xmil

ARMED = Path(__file__).with_name("armed")  # what befalls the process that meets slide {slide}, once


class Trap(torch.nn.Module):
    def forward(self, x):
        if x.shape[-2] == {instances} and ARMED.exists():
            name, whom = ARMED.read_text().split()
            ARMED.unlink()
            os.kill(os.getppid() if whom == "parent" else os.getpid(), getattr(signal, name))
            signal.pause()  # until the parent's end ends this process, too
        return x


def build():
    model = xmil.create_model("attnmil", in_dim={width}, n_classes=2, class_names={names}, seed=0, dim=16)
    model.instance.insert(0, Trap())
    return model
"""


def make_trap(folder: Path, n: int, *, slide: int, instances: int = 20) -> Path:
    """A cohort whose model `trap.py:build` stops a process at one of the slides, once it is armed."""
    make_cohort(folder, n, instances=instances, models=0)
    write_slide(folder / "features" / f"s{slide:03}.h5", np.random.default_rng(1), instances + 1)
    code = TRAP.format(slide=slide, instances=instances + 1, width=WIDTH, names=NAMES)
    (folder / "trap.py").write_text(code)
    return folder


def arm(folder: Path, name: str, whom: str) -> None:
    """Let the process that meets the slide send a signal to itself ("self") or to its parent ("parent")."""
    (folder / "armed").write_text(f"{name} {whom}")


def trap_command(folder: Path, *more: str, out: str = "run") -> list[str]:
    """The arguments of `xmil explain` with the model that stops."""
    return [
        *("explain", "--model", f"{folder / 'trap.py'}:build", "--features", str(folder / "features")),
        *("--cohort", str(folder / "cohort.csv"), "--out", str(folder / out), *more),
    ]
