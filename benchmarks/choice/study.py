"""How well `auto` chooses, and what the check of `explain` catches: `python -m benchmarks.choice.study`.

For every net of `nets`, each candidate is scored on bags for choosing (SRG, nothing else) and on test bags
(AUPRC-2 against the known evidence, share of right signs, SRG). `auto` never sees the evidence. Each net has
a file of results, with its background and without one; a study that was stopped goes on. `--report` prints
the tables of what is there.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import xmil
from benchmarks.choice.nets import NONLINEAR, SEEDS, STANDARD, TASK_NAMES, Trained, trained
from xmil.bench import MethodSpec, score_bags
from xmil.evaluate import CANDIDATES, Flips, Judge, choose
from xmil.methods import explain
from xmil.methods.explain import deal

COMPARED = {**CANDIDATES, "single": ("single", {}), "one_removed": ("one_removed", {})}
CHOOSING, TESTED = 12, 16  # bags of each net
KINDS = {"standard models": STANDARD, "nets with nonlinear heads": tuple(NONLINEAR)}
KEYS = ["data", "task", "net", "seed"]
CLEAR = 0.01  # differences from which on methods differ
RIGHT = 0.05  # the SRG from which on a map is right, and below whose negative it is wrong


def score(one: Trained, x: torch.Tensor, cls: Any, label: str) -> Any:
    """Scores (b, n) of the classes (b,) of many bags; sub-bags hold the same instances of each."""
    method, params = COMPARED[label]
    spec, rows = MethodSpec(method), np.arange(len(x))
    if "contexts" not in params:
        return score_bags(one.net, x, spec).numpy()[rows, cls]
    total, counts = np.zeros(x.shape[:2]), np.zeros(x.shape[1])
    for hand in deal(x.shape[1], contexts=params["contexts"], keep=params["keep"]):
        total[:, hand] += score_bags(one.net, x[:, hand], spec).numpy()[rows, cls]
        counts[hand] += 1
    return total / counts


def measure(one: Trained) -> dict[str, Any]:
    """SRGs on the bags for choosing, all figures on the test bags, and whether the check warns of lrp."""
    x = torch.cat([one.like[:CHOOSING], one.test[:TESTED]])
    with torch.no_grad():
        cls = one.net(x).argmax(-1).numpy()
    seconds, maps = {}, {}
    for label in COMPARED:
        start = time.process_time()
        maps[label] = score(one, x, cls, label)
        seconds[label] = time.process_time() - start
    srgs: dict[str, list[float]] = {label: [] for label in COMPARED}
    test: dict[str, list[list[float]]] = {label: [] for label in COMPARED}
    warned = []
    for i, bag in enumerate(x):
        flips = Flips(one.net, bag, target=int(cls[i]))
        values = Judge(flips).srgs([maps[label][i] for label in COMPARED])
        if i >= CHOOSING:
            e = explain(one.net, bag, target=int(cls[i]))
            warned.append(any("contradict the model" in line or "miss what" in line for line in e.warnings))
        for label, srg in zip(COMPARED, values.tolist(), strict=True):
            if i < CHOOSING:
                srgs[label].append(srg)
                continue
            truth, own = one.evidence[i - CHOOSING][cls[i]].astype(float), maps[label][i].astype(float)
            known = truth != 0
            signs = float((np.sign(own[known]) == truth[known]).mean()) if known.any() else np.nan
            test[label].append([float(xmil.auprc2(truth, own)), signs, srg])
    names = [str(i) for i in range(CHOOSING)]
    chosen = choose({k: np.array(srgs[k]) for k in CANDIDATES}, CANDIDATES, names=names, cases=names)
    rows = {}
    for label in COMPARED:
        auprc2, signs, srg = np.nanmean(np.array(test[label]), axis=0).tolist()
        figures = {"auprc2": auprc2, "signs": signs, "srg": srg, "seconds": seconds[label]}
        rows[label] = {"choosing_srg": float(np.mean(srgs[label])), **figures}
    checks = [[bool(flag), *own] for flag, own in zip(warned, test["lrp"], strict=True)]
    return {"accuracy": one.accuracy, "chosen": chosen.candidate, "methods": rows, "checks": checks}


def run(out: Path, data: str, seed: int, task: str, name: str) -> None:
    """Measure a net with its background and without one, unless its file is there."""
    path = out / "results" / f"{data}-{task}-{name}-{seed}.json"
    if path.exists():
        return
    one = trained(name, data, task, seed, cache=out / "nets")
    found = {"data": data, "task": task, "net": name, "seed": seed, "background": measure(one)}
    one.net.background = None
    found["none"] = measure(one)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))


def table_of(results: list[dict[str, Any]], setting: str) -> pd.DataFrame:
    """A row for each net and method."""
    rows = []
    for one in results:
        own = one[setting]
        for label, figures in own["methods"].items():
            about = {key: one[key] for key in KEYS} | {"method": label, "chosen": label == own["chosen"]}
            rows.append(about | figures)
    return pd.DataFrame(rows)


def report(results: list[dict[str, Any]], setting: str) -> str:
    """The tables of one setting: standard models and nets with nonlinear heads apart."""
    lines = []
    for kind, names in KINDS.items():
        own = table_of([one for one in results if one["net"] in names], setting)
        if own.empty:
            continue
        truth = own.pivot_table(index=KEYS, columns="method", values="auprc2")
        srg = own.pivot_table(index=KEYS, columns="method", values="choosing_srg")
        chosen = own[own.chosen].set_index(KEYS).reindex(truth.index)
        title = f"{len(truth)} {kind}, {'with' if setting == 'background' else 'without'} a background"
        lines += ["", f"| {title} | AUPRC-2 | right signs | SRG |", "|---|---|---|---|"]
        columns = ["auprc2", "signs", "srg"]
        for label, rows in [*own.groupby("method", sort=False), ("auto", chosen)]:
            lines.append(f"| `{label}` | {' | '.join(f'{value:.3f}' for value in rows[columns].mean())} |")
        lines.append(f"| best in hindsight | {truth[list(CANDIDATES)].max(axis=1).mean():.3f} | | |")
        gain = chosen.auprc2 - truth["lrp"]
        worse, better = int((gain < -CLEAR).sum()), int((gain > CLEAR).sum())
        lines += ["", f"auto against lrp: {gain.mean():+.3f}; worse on {worse}, better on {better} nets"]
        lines += [f"chosen: {chosen.method.value_counts().to_dict()}"]
        level = (truth["one_added"] - truth["single"]).groupby("net").mean()
        lines += ["one_added against single: " + ", ".join(f"{name} {d:+.3f}" for name, d in level.items())]
        lines += [agreement(truth, srg, *pair) for pair in combinations(COMPARED, 2)]
    every = table_of(results, setting)
    cost = every.groupby("method").seconds.sum() / every[every.method == "lrp"].seconds.sum()
    return "\n".join(
        [*lines, "", f"cost in maps by lrp: {cost.round(1).to_dict()}", caught(results, setting)]
    )


def agreement(truth: pd.DataFrame, srg: pd.DataFrame, a: str, b: str) -> str:
    """How often the sign of the SRG difference of two methods is that of their AUPRC-2 difference."""
    by_srg, by_truth = srg[b] - srg[a], truth[b] - truth[a]
    clear = (by_srg.abs() > CLEAR) & (by_truth.abs() > CLEAR)
    agree = int((np.sign(by_srg[clear]) == np.sign(by_truth[clear])).sum())
    wrong = int((clear & (by_srg > 0) & (by_truth < 0)).sum())
    return f"{b} against {a}: signs agree on {agree} of {int(clear.sum())}, {b} favoured wrongly on {wrong}"


def caught(results: list[dict[str, Any]], setting: str) -> str:
    """How many right and wrong maps by lrp the check warns of."""
    maps = np.array([row for one in results for row in one[setting]["checks"]], dtype=float)
    warned, auprc2, srg = maps[:, 0], maps[:, 1], maps[:, 3]
    groups = {
        f"SRG above {RIGHT}": srg > RIGHT,
        f"SRG below -{RIGHT}": srg < -RIGHT,
        "AUPRC-2 below 0.5": auprc2 < 0.5,
    }
    counts = [f"{int(warned[own].sum())} of {int(own.sum())} ({name})" for name, own in groups.items()]
    return f"the check warns of maps by lrp: {', '.join(counts)}"


def main() -> None:
    """Measure what is missing, then print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="*", default=["mnist", "tissue"], help="digits, mnist, tissue")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--nets", nargs="*", default=[*NONLINEAR, *STANDARD])
    parser.add_argument("--out", type=Path, default=Path("build/choice"))
    parser.add_argument("--report", action="store_true", help="only print the tables of the results so far")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds if not options.report else ():
        for task in TASK_NAMES:
            for data in options.data:
                for name in options.nets:
                    run(options.out, data, seed, task, name)
    files = sorted((options.out / "results").glob("*.json"))
    results = [json.loads(file.read_text()) for file in files]
    results = [one for one in results if one["data"] in options.data and one["seed"] in options.seeds]
    for setting in ("background", "none"):
        print(report(results, setting))


if __name__ == "__main__":
    main()
