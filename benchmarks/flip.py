"""Speed of flip curves in forward passes of the full bag, fast way against plain way, in one run.

    python -m benchmarks.flip

Each figure is a ratio of medians measured in turn in the same process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

import xmil
from xmil.evaluate import flip_order, step_counts
from xmil.models.base import MILModel

CASES = [
    ("attnmil", 10_000, 1024, {}),
    ("clam_sb", 10_000, 1024, {}),
    ("meanpool", 10_000, 1024, {}),
    ("maxpool", 10_000, 1024, {}),
    ("addmil", 5_000, 1024, {}),
    ("dsmil", 5_000, 1024, {}),
    ("transmil", 5_000, 1024, {}),
]


def main() -> None:
    """Print a table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[name for name, *_ in CASES])
    parser.add_argument("--modes", nargs="+", default=["remove", "mask"])
    parser.add_argument("--plain", action="store_true", help="time the plain way too (minutes)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        "| model | instances | mode | forward (ms) | curve / forward | plain / forward | largest difference |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, n, d, params in CASES:
        for mode in args.modes if name in args.models else ():
            print(_row(name, n, d, params, mode=mode, plain=args.plain), flush=True)


def _row(name: str, n: int, d: int, params: dict[str, object], *, mode: str, plain: bool) -> str:
    model = xmil.create_model(name, in_dim=d, n_classes=2, seed=0, **params)
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    scores = np.random.default_rng(0).normal(size=n)
    forward, _ = _median(lambda: _forward(model, x), 9)
    slow = name in ("transmil", "dsmil", "addmil")
    curve, found = _median(lambda: xmil.flip(model, x, scores, target=1, mode=mode).values, 1 if slow else 5)
    ratio, difference = "-", "-"
    if plain:
        seconds, expected = _median(lambda: plain_curve(model, x, scores, mode=mode), 1)
        ratio, difference = f"{seconds / forward:.0f}", f"{np.abs(found - expected).max():.1e}"
    return f"| {name} | {n} | {mode} | {1e3 * forward:.0f} | {curve / forward:.1f} | {ratio} | {difference} |"


def plain_curve(model: MILModel, x: torch.Tensor, scores: np.ndarray, *, mode: str) -> np.ndarray:
    """The definition: a forward pass over what is left at each of 101 steps."""
    order = torch.from_numpy(flip_order(scores))
    values = []
    for count in step_counts(len(x), 100):
        kept = torch.ones(len(x), dtype=torch.bool)
        kept[order[:count]] = False
        part = x * kept.unsqueeze(1) if mode == "mask" or not kept.any() else x[kept]
        values.append(float(torch.softmax(_forward(model, part), dim=-1)[0, 1]))
    return np.array(values)


@torch.no_grad()
def _forward(model: MILModel, x: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(x.unsqueeze(0))
    return logits


def _median(call: Callable[[], object], times: int) -> tuple[float, np.ndarray]:
    result = call()  # warm up
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        result = call()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent), np.asarray(result)


if __name__ == "__main__":
    main()
