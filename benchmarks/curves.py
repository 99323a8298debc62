"""All curves of a slide together against one after another, as a ratio in one run.

    python -m benchmarks.curves [--device cuda] [--models transmil dsmil]

A certificate takes 34 curves: seven methods in two orders, and twenty random ones. Both ways give the same
curves; the largest difference is in the table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

import xmil
from xmil.evaluate import random_draws
from xmil.evaluate.curves import Curve, Flips, Scores

METHODS, DRAWS = 7, 20


def main() -> None:
    """Print a table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["transmil", "dsmil", "addmil", "attnmil"])
    parser.add_argument("--modes", nargs="+", default=["remove", "mask"])
    parser.add_argument("--patches", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    print(f"{2 * METHODS + DRAWS} curves of {args.steps} steps, {args.patches} patches, {args.device}")
    print("| model | mode | singly (ms) | together (ms) | together / singly | largest difference |")
    print("|---|---|---|---|---|---|")
    for name in args.models:
        for mode in args.modes:
            print(_row(name, mode, args), flush=True)


def _row(name: str, mode: str, args: argparse.Namespace) -> str:
    params = {"dim": 256} if name == "transmil" else {}
    model = xmil.create_model(name, in_dim=args.width, n_classes=2, seed=0, **params).to(args.device)
    x = torch.randn(args.patches, args.width, generator=torch.Generator().manual_seed(0)).to(args.device)
    flips = Flips(model, x, target=1, mode=mode)
    asked = _asked(args.patches)

    def singly() -> list[Curve]:
        return [flips.curve(scores, order=order, steps=args.steps) for scores, order in asked]

    one, slow = _median(singly, args)
    two, quick = _median(lambda: flips.curves(asked, steps=args.steps), args)
    apart = max(float(np.abs(a.values - b.values).max()) for a, b in zip(slow, quick, strict=True))
    return f"| {name} | {mode} | {1e3 * one:.0f} | {1e3 * two:.0f} | {two / one:.3f} | {apart:.1e} |"


def _asked(n: int) -> list[tuple[Scores, str]]:
    rng = np.random.default_rng(0)
    scored = [rng.normal(size=n) for _ in range(METHODS)]
    both: list[tuple[Scores, str]] = [(scores, order) for scores in scored for order in ("morf", "lerf")]
    return both + list(random_draws(n, orders=DRAWS, seed=1))


def _median(call: Callable[[], list[Curve]], args: argparse.Namespace) -> tuple[float, list[Curve]]:
    found = call() if args.device != "cpu" else []  # a GPU is warmed up first
    spent = []
    for _ in range(args.times):
        _wait(args.device)
        begun = time.perf_counter()
        found = call()
        _wait(args.device)
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent), found


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
