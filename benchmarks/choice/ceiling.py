"""How far any choice could get on nets with a nonlinear head: `python -m benchmarks.choice.ceiling`.

Shapley values stand for the best that is known: sampled by 32 orders and their reverses, of the logit and of
the log-odds. They are too slow for slides and no candidate of `auto`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn

import xmil
from benchmarks.choice.nets import NONLINEAR, SEEDS, TASK_NAMES, trained
from benchmarks.choice.study import TESTED, score
from xmil.evaluate import CANDIDATES

ORDERS = 32
Floats = npt.NDArray[np.float64]


@torch.no_grad()
def shapley(
    net: nn.Module, x: Tensor, cls: npt.NDArray[np.int64], *, log_odds: bool, seed: int = 0
) -> Floats:
    """Shapley values (b, n) of the classes (b,): mean gains over seeded orders, the same for all bags."""
    rows, n = np.arange(len(x)), x.shape[1]

    def outputs(own: npt.NDArray[np.int64]) -> Floats:
        logits = net(x[:, own] if len(own) else torch.zeros_like(x)).double()
        if log_odds:
            return torch.special.logit(logits.softmax(-1), eps=1e-12)[rows, cls].numpy()
        return logits[rows, cls].numpy()

    rng, total = np.random.default_rng(seed), np.zeros(x.shape[:2])
    drawn = [rng.permutation(n) for _ in range(ORDERS)]
    for order in (*drawn, *(order[::-1] for order in drawn)):
        before = outputs(order[:0])
        for j, i in enumerate(order):
            after = outputs(np.sort(order[: j + 1]))
            total[:, i] += after - before
            before = after
    return total / (2 * ORDERS)


def main() -> None:
    """Print the mean AUPRC-2 of each method over the nets, and of the best for each net."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="*", default=["mnist", "tissue"], help="digits, mnist, tissue")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--nets", nargs="*", default=list(NONLINEAR))
    parser.add_argument("--out", type=Path, default=Path("build/choice"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in options.nets:
        for one in (
            trained(name, data, task, seed, cache=options.out / "nets")
            for data in options.data for task in TASK_NAMES for seed in options.seeds
        ):  # fmt: skip
            one.net.background = None
            x = one.test[:TESTED]
            with torch.no_grad():
                cls = one.net(x).argmax(-1).numpy()
            maps = {label: score(one, x, cls, label) for label in CANDIDATES}
            maps["shapley"] = shapley(one.net, x, cls, log_odds=False)
            maps["shapley of log-odds"] = shapley(one.net, x, cls, log_odds=True)
            truth = [one.evidence[i][cls[i]].astype(float) for i in range(len(x))]
            figures = {
                label: np.nanmean(
                    [xmil.auprc2(t, own.astype(float)) for t, own in zip(truth, scores, strict=True)]
                )
                for label, scores in maps.items()
            }
            found.append({"net": name, **figures, "best of all": max(figures.values())})
    table = pd.DataFrame(found).groupby("net").mean()
    print(pd.concat([table, table.mean().to_frame("all").T]).round(3).to_string())


if __name__ == "__main__":
    main()
