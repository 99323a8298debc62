"""The picture of docs/studies/better-rule.md, from a study's rows and one trained model.

python docs/draw_better_rule.py --rows DIR... --models DIR --data FEATURES
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from benchmarks.better_rule.__main__ import MAIN_TASKS, _mean, default_of, group, read
from benchmarks.better_rule.study import _stacked, mean_patch
from benchmarks.better_rule.suite import Job

from xmil.bench import load_instances
from xmil.lrp import trace
from xmil.network import frozen

TARGET = Path(__file__).parent / "images" / "better-rule.png"
SHARE, REST, BEFORE, AFTER = "#9aa5b1", "#c0392b", "#9aa5b1", "#1f4e79"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", required=True)
    args = parser.parse_args()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 3.8), width_ratios=(1.25, 1), layout="constrained"
    )
    draw_bag(left, args)
    draw_gains(right, read(args.rows))
    figure.savefig(TARGET, dpi=110)


def draw_bag(axes, args: argparse.Namespace) -> None:
    """Each patch of one bag: the share of the mean patch in its exact score, and what is its own."""
    job = Job("small", "vit_pre", "standard", args.data, 0)
    c = job.configuration(load_instances(args.data), "cpu")
    model = _stacked(c, job.folder(args.models) / "models" / "standard-vit_pre.safetensors", "cpu").model(0)
    table, test = c.table(), c.splits(0).test
    counts = (test.codes == 8).sum(axis=1)
    bag = int(np.flatnonzero((counts >= 4) & (counts <= 6))[0])
    x = table.bags(table.to_rows(test.rows[bag : bag + 1]))
    with frozen(model):
        flow = trace(model, x, module=model).relevance(lambda z: z[:, 1]).input
        share = flow.against(mean_patch(c, table))[0].numpy()
        own = flow.instances[0].numpy() - share
    eights = test.codes[bag] == 8
    order = np.argsort(-(share + own))
    places = np.arange(len(order))
    axes.bar(places, share[order], color=SHARE, label="the mean patch's share, mu . g")
    base = np.where(np.sign(own) == np.sign(share), share, 0)[order]
    axes.bar(places, own[order], bottom=base, color=REST, width=0.5, label="the patch's own, (x - mu) . g")
    axes.plot(
        places[eights[order]],
        np.full(eights.sum(), axes.get_ylim()[1] * 1.05),
        "v",
        color="black",
        label="an 8",
    )
    axes.set(
        xlabel="patches, by their exact score",
        ylabel="relevance for 'has an 8'",
        title="A bag under the exact rules (ViT)",
    )
    axes.legend(fontsize=8)


def draw_gains(axes, rows) -> None:
    """AUPRC-2 of each architecture, exact and default."""
    small = [
        r
        for r in rows
        if r["suite"] == "small" and r["seed"] == 0 and r["data"] == "mnist" and r["task"] in MAIN_TASKS
    ]
    found = {
        m: (_mean(p, "exact", "auprc2"), _mean(p, default_of(m), "auprc2"))
        for m, p in group(small, lambda r: r["model"]).items()
    }
    names = sorted(found, key=lambda m: found[m][1])
    for i, name in enumerate(names):
        before, after = found[name]
        axes.plot([before, after], [i, i], color=BEFORE, zorder=1)
        axes.scatter([before], [i], color=BEFORE, s=22, label="exact" if i == 0 else None)
        axes.scatter([after], [i], color=AFTER, s=22, label="default" if i == 0 else None)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xlabel="AUPRC-2, mean of four tasks, test bags", title="Fifteen architectures")
    axes.legend(fontsize=8, loc="lower right")


if __name__ == "__main__":
    main()
