"""Training in each precision on a device: `python -m benchmarks.precision [--device cuda]`.

Random bags of 2,048 x 768 in two classes; AUROC of the test bags, seconds an epoch, and whether a run that
was stopped half-way ends where the unbroken one does.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import xmil
from xmil.training.config import make_config

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
MODELS: dict[str, dict[str, Any]] = {"attnmil": {}, "transmil": {"dim": 256}}
N, WIDTH = 2048, 768


def write_bags(folder: Path, n: int) -> None:
    """Bags whose class is in a twentieth of their instances."""
    rng = np.random.default_rng(0)
    (folder / "features").mkdir()
    lines = ["slide_id,label,split"]
    for i in range(n):
        x = rng.normal(size=(N, WIDTH)).astype(np.float32)
        x[: N // 20, i % 2] += 3
        np.save(folder / "features" / f"s{i}.npy", x)
        lines.append(f"s{i},{i % 2},{('train', 'train', 'train', 'val', 'test')[i // 2 % 5]}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")


def settings(folder: Path, out: str, model: str, precision: str, args: argparse.Namespace) -> dict[str, Any]:
    """A short training."""
    return {
        "out": str(folder / out),
        "data": {
            "features": str(folder / "features"),
            "cohort": str(folder / "cohort.csv"),
            "instances": N // 2,
        },
        "model": {"name": model, "dropout": 0.1, **MODELS[model]},
        "optim": {"name": "adamw", "lr": 3e-4},
        "train": {
            "epochs": args.epochs,
            "batch": 8,
            "precision": precision,
            "device": args.device,
            "deterministic": args.deterministic,
            "tensorboard": False,
        },
    }


def interrupted(content: dict[str, Any], epoch: int) -> None:
    """Train until the middle of an epoch."""

    def watch(*_: Any) -> Any:
        def hear(step: Any) -> None:
            if step.epoch == epoch and step.batch == 2:
                raise KeyboardInterrupt

        return hear

    try:
        xmil.train(make_config(content), on_job=watch)
    except KeyboardInterrupt:
        return


def row(folder: Path, model: str, precision: str, args: argparse.Namespace) -> str:
    """One line of the table."""
    name = f"{model}-{precision}"
    whole = xmil.train(make_config(settings(folder, name, model, precision, args)))
    with (folder / name / "model" / "log.csv").open(newline="") as stream:
        times = [float(line["seconds"]) for line in csv.DictReader(stream)]
    again = settings(folder, f"{name}-again", model, precision, args)
    interrupted(again, args.epochs // 2)
    xmil.train(make_config(again))
    states = [
        torch.load(folder / out / "model" / "last.ckpt", weights_only=True)["model"]
        for out in (name, f"{name}-again")
    ]
    gap = max(float((states[0][key] - states[1][key]).abs().max()) for key in states[0])
    auc = whole.best["test"]["auc"]["mean"]
    return f"| {model} | {precision} | {auc:.3f} | {np.median(times):.3f} | {gap:.2g} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--bags", type=int, default=80)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS))
    args = parser.parse_args()
    print("| model | precision | test AUROC | s per epoch | largest gap of weights after a stop |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_bags(Path(folder), args.bags)
        for model in args.models:
            for precision in args.precisions:
                print(row(Path(folder), model, precision, args), flush=True)
    print(json.dumps({"device": args.device, "torch": torch.__version__, "bags": args.bags}))


if __name__ == "__main__":
    main()
