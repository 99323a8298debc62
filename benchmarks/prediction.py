"""Predictions: how exactly accounts of values and risks close, what intervals cost, what a run adds.

python benchmarks/prediction.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

import xmil
from xmil.evaluate import class_metrics, risk_metrics
from xmil.methods import risk_slopes, survival_risk

TASKS = {
    "regression": {"n_classes": 1, "reference": 0.7},
    "survival": {"n_classes": 4},
    "cox": {"n_classes": 1},
}


def accounts(n: int, width: int, seeds: int) -> None:
    """The largest unexplained share over models and tasks, of the output and the largest logit."""
    for task, settings in TASKS.items():
        worst = 0.0
        for name in xmil.list_models():
            for seed in range(seeds):
                model = xmil.create_model(name, in_dim=width, task=task, seed=seed, **settings)
                bag = np.random.default_rng(seed).normal(size=(n, width)).astype(np.float32)
                e = xmil.explain(model, bag, method="lrp")
                assert e.audit is not None
                scale = max(abs(e.output), float(np.abs(e.logits).max()))
                worst = max(worst, abs(e.audit.other) / scale)
        print(f"account of a {task:<11} {worst:.1e} unexplained at most ({n} x {width}, {seeds} seeds)")


def path(draws: int) -> None:
    """How far the shares of time bins are from risk(z) - risk(0), by the size of the logits."""
    for size in (1, 10, 50, 100, 500):
        z = torch.randn(draws, 8, generator=torch.Generator().manual_seed(0)).double() * size
        gap = (risk_slopes(z) * z).sum(-1) - survival_risk(z) + survival_risk(0 * z)
        print(
            f"shares of the risk, logits of deviation {size:>3}: off by {float(gap.abs().max()):.1e} at most"
        )


def intervals(sizes: list[int]) -> None:
    """Eight measures with 1,000 draws, beside scikit-learn's AUROC alone."""
    for n in sizes:
        rng = np.random.default_rng(0)
        y, p = rng.integers(0, 2, n), rng.random(n)
        start = time.perf_counter()
        class_metrics(y, np.stack([1 - p, p], 1), units=range(n))
        ours = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(50):
            roc_auc_score(y, p)
        theirs = (time.perf_counter() - start) * 20
        start = time.perf_counter()
        risk_metrics(rng.random(n), y, p, units=range(n))
        c = time.perf_counter() - start
        print(
            f"n = {n:>5}: 8 measures of classes {ours:.2f} s, C-index {c:.2f} s; "
            f"scikit-learn's AUROC alone, draw by draw, {theirs:.1f} s"
        )


def runs(bags: int, n: int, width: int) -> None:
    """A run over a folder against the sum of bare forward passes on the same bags in memory."""
    from xmil.cli._app import run

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "features").mkdir()
        rng, held = np.random.default_rng(0), []
        for i in range(bags):
            x = rng.normal(size=(n, width)).astype(np.float32)
            xmil.write_bag(xmil.Bag(x, slide_id=f"s{i}"), root / "features" / f"s{i}.h5")
            held.append(torch.from_numpy(x)[None])
        for name in ("attnmil", "transmil"):
            model = xmil.create_model(name, in_dim=width, n_classes=2, seed=0)
            xmil.save_model(model, root / f"{name}.safetensors")
            start = time.perf_counter()
            with torch.no_grad():
                for x in held:
                    model(x)
            bare = time.perf_counter() - start
            where = ["--features", f"{root}/features", "--out", f"{root}/{name}"]
            start = time.perf_counter()
            run(["predict", "--model", f"{root}/{name}.safetensors", *where])
            whole = time.perf_counter() - start
            print(f"{name}: {bags} bags of {n} x {width}: bare {bare:.1f} s, run {whole:.1f} s")


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bags", type=int, default=100)
    parser.add_argument("--instances", type=int, default=2000)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    accounts(3000, 64, 3)
    path(2000)
    intervals([200, 1000, 5000])
    runs(options.bags, options.instances, options.width)


if __name__ == "__main__":
    main()
