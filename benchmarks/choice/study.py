"""How well `auto` chooses: `python -m benchmarks.choice.study --data mnist --cache DIR --out rows.csv`.

For every net of `nets`, each candidate is scored on bags for choosing (SRG, nothing else) and on test bags
(AUPRC-2 against the known evidence, share of right signs, SRG). `auto` never sees the evidence. Nets are
trained into the cache once; nets whose rows are in the file are skipped. `--report` prints the tables.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import xmil
from benchmarks.choice.nets import NONLINEAR, SEEDS, STANDARD, TASK_NAMES, Trained, trained
from xmil.core.errors import XmilError
from xmil.evaluate import CANDIDATES, Flips, Judge, choose
from xmil.methods import explain

COMPARED = {**CANDIDATES, "single": ("single", {}), "one_removed": ("one_removed", {})}
CHOOSING, TESTED = 12, 16  # bags of each net
KEYS = ["data", "task", "net", "seed"]


def how(name: str) -> dict[str, Any]:
    """What a net of our own writing needs to be told."""
    return {} if name in STANDARD else {"returns": "logit"}


def measure(one: Trained) -> list[dict[str, Any]]:
    """A row for each method: SRG on the bags for choosing, and everything on the test bags."""
    srgs: dict[str, list[float]] = {label: [] for label in COMPARED}
    test: dict[str, list[list[float]]] = {label: [] for label in COMPARED}
    seconds = dict.fromkeys(COMPARED, 0.0)
    bags = [(x, None) for x in one.like[:CHOOSING]]
    bags += [(x, evidence) for x, evidence in zip(one.test[:TESTED], one.evidence, strict=False)]
    for i, (x, evidence) in enumerate(bags):
        flips = Flips(one.net, x, target=None, **how(one.name))
        judging, cls = Judge(flips), int(flips.output.target)
        for label, (method, params) in COMPARED.items():
            start = time.perf_counter()
            try:
                own = {"seed": i} if "contexts" in params or method == "one_added" else {}
                e = explain(
                    one.net, x, method=method, target=cls, check=False, **how(one.name), **own, **params
                )
                scores = e.scores.astype(np.float64)
            except XmilError:
                scores = np.zeros(len(x))
            seconds[label] += time.perf_counter() - start
            srg = float(judging.srgs([scores])[0]) if scores.any() else 0.0
            if evidence is None:
                srgs[label].append(srg)
                continue
            truth = evidence[cls].astype(np.float64)
            known = truth != 0
            signs = float((np.sign(scores[known]) == truth[known]).mean()) if known.any() else np.nan
            test[label].append([float(xmil.auprc2(truth, scores)), signs, srg])
    candidates = {label: CANDIDATES[label] for label in CANDIDATES}
    names = [str(i) for i in range(CHOOSING)]
    chosen = choose({k: np.array(srgs[k]) for k in candidates}, candidates, names=names, cases=names)
    about = {"data": one.data, "task": one.task, "net": one.name, "seed": one.seed, "accuracy": one.accuracy}
    rows = []
    for label in COMPARED:
        auprc2, signs, srg = np.nanmean(np.array(test[label]), axis=0)
        figures = {"choosing_srg": np.mean(srgs[label]), "auprc2": auprc2, "signs": signs, "srg": srg}
        chosen_here = label == chosen.candidate
        rows.append({**about, "method": label, **figures, "seconds": seconds[label], "chosen": chosen_here})
    return rows


def report(rows: pd.DataFrame) -> str:
    """The tables of the study: standard models and nets with nonlinear heads apart."""
    lines = []
    for kind, names in (("standard models", STANDARD), ("nets with nonlinear heads", tuple(NONLINEAR))):
        own = rows[rows.net.isin(names)]
        if own.empty:
            continue
        wide = own.pivot_table(index=KEYS, columns="method", values="auprc2")
        chosen = own[own.chosen].set_index(KEYS)
        auto = chosen["auprc2"].reindex(wide.index)
        best = wide[list(CANDIDATES)].max(axis=1)
        lines += [f"{kind}: {len(wide)} nets", ""]
        for label in (*CANDIDATES, "single"):
            mine = own[own.method == label]
            lines.append(
                f"| {label} | {mine.auprc2.mean():.3f} | {mine.signs.mean():.3f} | {mine.srg.mean():.3f} |"
            )
        lines.append(f"| auto | {auto.mean():.3f} | {chosen.signs.mean():.3f} | {chosen.srg.mean():.3f} |")
        lines.append(f"| best in hindsight | {best.mean():.3f} | | |")
        gain = auto - wide["lrp"]
        worse, better = int((gain < -0.01).sum()), int((gain > 0.01).sum())
        lines += [
            "",
            f"auto against lrp: {gain.mean():+.4f}; worse by more than .01 in {worse}, better in {better}.",
        ]
        picked = chosen.method.value_counts().to_dict()
        lines += [f"chosen: {picked}", ""]
        for other in [label for label in COMPARED if label != "lrp"]:
            srg = own.pivot_table(index=KEYS, columns="method", values="choosing_srg")
            d_srg, d_truth = srg[other] - srg["lrp"], wide[other] - wide["lrp"]
            clear = (d_srg.abs() > 0.01) & (d_truth.abs() > 0.01)
            agree = (
                float((np.sign(d_srg[clear]) == np.sign(d_truth[clear])).mean()) if clear.any() else np.nan
            )
            lines.append(
                f"SRG and AUPRC-2 agree on {other} against lrp in {agree:.0%} of {int(clear.sum())} nets"
            )
        lines.append("")
    cost = rows.groupby("method").seconds.sum() / rows[rows.method == "lrp"].seconds.sum()
    return "\n".join([*lines, "cost in explanations by lrp: " + cost.round(1).to_dict().__repr__()])


def main() -> None:
    """Measure what is missing, then print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", action="store_true", help="only print the tables of the rows so far")
    parser.add_argument("--cached", action="store_true", help="only nets that are in the cache")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = pd.read_csv(options.out).to_dict("records") if options.out.exists() else []
    done = {tuple(row[key] for key in KEYS) for row in rows}
    for seed in options.seeds if not options.report else ():
        for task in TASK_NAMES:
            for name in (*STANDARD, *NONLINEAR):
                file = options.cache / f"{options.data}-{task}-{name}-{seed}.pt"
                if (options.data, task, name, seed) in done or (options.cached and not file.exists()):
                    continue
                rows += measure(trained(name, options.data, task, seed, cache=options.cache))
                pd.DataFrame(rows).to_csv(options.out, index=False)
    print(report(pd.DataFrame(rows)))


if __name__ == "__main__":
    main()
