"""The rule without a background, and the strength with one, on nets of many kinds.

    python -m benchmarks.better_rule.foreign --nets DIR --out ROWS.csv --data digits --seeds 0
    python -m benchmarks.better_rule.foreign --out ROWS.csv --report

The nets are those of `benchmarks.choice.nets`, on bags of digits and of nuclei (`tissue`, XMIL_DATA, images
apart). Choose on digits as pixels and on seed 0 of tissue; report encoded digits (`mnist`) and other seeds. A
stopped call goes on where it stopped.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from benchmarks.better_rule.measures import evidence_measures, faithfulness
from benchmarks.choice.nets import DATA, NONLINEAR, STANDARD, TASK_NAMES, Trained, trained
from xmil.core.errors import UnsupportedError
from xmil.core.task import Target
from xmil.core.text import markdown_table
from xmil.lrp import Composite
from xmil.methods import class_output
from xmil.methods.lrp import trace_bags
from xmil.methods.method import Baseline
from xmil.models import MILModel
from xmil.network import Network, frozen

RULES = {"exact": ("", 0.0), "bag 0.25": ("bag", 0.25), "bag 0.5": ("bag", 0.5)}
RULES |= {f"mean {a}": ("mean", a) for a in (0.1, 0.25, 0.5)}
MEASURES, KEYS = ("auprc2", "signs", "srg", "gone"), ["data", "task", "net", "seed"]
LEARNED = 0.7  # accuracy from which on a net counts, of two classes; of four, half of it


def scores_by(model: MILModel, x: Tensor, rule: str) -> Tensor:
    """Scores (b, c, n) of bags (b, n, d) as `xmil.explain` gives them: no baseline, or one with secants."""
    by, strength = RULES[rule]
    centre = None
    if by == "bag":
        centre = Baseline(x.mean(dim=1, keepdim=True), strength, by)
    elif by:
        assert model.background is not None  # narrows the type
        centre = Baseline(torch.from_numpy(model.background.mean).to(x), strength, by)
    every = range(model.n_classes)
    outputs = [class_output(Target(c), "logit", n_outputs=model.n_classes).function for c in every]
    with frozen(model):
        traced = trace_bags(Network(model), x, Composite(), centre)
        flows = [traced.relevance(o, keep=o is not outputs[-1]).input for o in outputs]
        scores = [f.instances if centre is None else f.instances - f.against(centre.shift) for f in flows]
        return torch.stack(scores, dim=1).detach()


def measure(one: Trained) -> list[dict[str, Any]]:
    """A row for each rule: means over test bags and classes; SRG and `gone` are of the predicted class."""
    x, truth = one.test, torch.from_numpy(np.asarray(one.evidence, dtype=np.float32))
    about = {"data": one.data, "task": one.task, "net": one.name, "seed": one.seed, "accuracy": one.accuracy}
    try:
        scores = {rule: scores_by(one.net, x, rule) for rule in RULES}
    except UnsupportedError:  # a net that LRP refuses
        return [{**about, "rule": rule} for rule in RULES]
    with torch.no_grad():
        predicted = one.net(x).argmax(dim=-1)
    faith = faithfulness(one.net, x, predicted, scores)
    return [
        {**about, "rule": rule, **evidence_measures(s, truth), **faith[rule]} for rule, s in scores.items()
    ]


def report(rows: pd.DataFrame) -> str:
    """Of each data set and net: `exact`, and what other rules gain on it; nets that learnt only."""
    chance = np.where(rows.task == "four_bags", LEARNED / 2, LEARNED)
    learned, lines = rows[rows.accuracy >= chance], []
    for measured in MEASURES:
        wide = learned.pivot_table(index=KEYS, columns="rule", values=measured)[list(RULES)]
        others = list(RULES)[1:]
        wide[others] = wide[others].sub(wide["exact"], axis=0)
        groups = [(f"{data}, {net}", own) for (data, net), own in wide.groupby(["data", "net"], sort=False)]
        groups += [(f"{data}, all", own) for data, own in wide.groupby("data", sort=False)]
        cells = [
            [
                name,
                str(len(own)),
                f"{own['exact'].mean():.3f}",
                *(f"{own[rule].mean():+.3f}" for rule in others),
            ]
            for name, own in groups
        ]
        lines += [f"{measured}:", "", markdown_table(["nets", "n", *RULES], cells), ""]
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, then print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nets", type=Path, help="folder that trained nets are kept in")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=(*STANDARD, *NONLINEAR), default=(*STANDARD, *NONLINEAR))
    parser.add_argument("--tasks", nargs="+", choices=TASK_NAMES, default=TASK_NAMES)
    parser.add_argument("--cached", action="store_true", help="only nets that are in the folder")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--report", action="store_true", help="only print the tables of the rows so far")
    args = parser.parse_args()
    torch.set_num_threads(1)
    until = time.time() + args.seconds
    rows = pd.read_csv(args.out).to_dict("records") if args.out.exists() else []
    done = {tuple(row[key] for key in KEYS) for row in rows}
    asked = [(d, t, n, s) for d in args.data for s in args.seeds for t in args.tasks for n in args.only]
    for data, task, net, seed in asked if not args.report else ():
        file = args.nets / f"{data}-{task}-{net}-{seed}.pt"
        if (data, task, net, seed) in done or (args.cached and not file.exists()) or time.time() > until:
            continue
        rows += measure(trained(net, data, task, seed, cache=args.nets))
        pd.DataFrame(rows).to_csv(args.out, index=False)
    print(report(pd.DataFrame(rows)))


if __name__ == "__main__":
    main()
