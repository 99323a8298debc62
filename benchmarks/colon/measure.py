"""One run of the colon benchmark: train on four folds, explain and flip the bags of the fifth."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

import xmil
from benchmarks.colon.bags import ColonBag, folds
from benchmarks.colon.train import EPOCHS, fit
from xmil.evaluate import Flips
from xmil.models.base import MILModel

# Rows of the table: a method with its parameters. MILLI is left out: O(samples n^2) a bag.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "random": ("random", {}),
    "attention": ("attention", {}),
    "single": ("single", {}),
    "one_removed": ("one_removed", {}),
    "combined": ("combined", {}),
    "logits": ("logits", {}),
    "gxi": ("gxi", {}),
    "grad2": ("grad2", {}),
    "ig": ("ig", {}),
    "lrp": ("lrp", {}),
    "lrp, preset paper": ("lrp", {"preset": "paper"}),
    "lrp, log-odds": ("lrp", {"output": "log_odds"}),
}
SLOW = ("one_removed", "combined")  # n passes over n - 1 instances where pooling has no closed form
UNCURVED = ("combined", "lrp, preset paper", "lrp, log-odds")  # evidence only


def measure(
    name: str,
    bags: list[ColonBag],
    task: str,
    *,
    run: int,
    thorough: bool,
    epochs: int = EPOCHS,
    steps: int = 100,
) -> dict[str, Any]:
    """Bag AUROC, and for each row the test bags' AUPRC-2, AUPC and SRG.

    Run r is fold r mod 5 of the r div 5-th division into folds, and the seed of the weights. The slow
    methods and the curves are part of thorough runs.
    """
    test = set(folds(bags, task, seed=run // 5)[run % 5].tolist())
    model = fit(name, [bag for i, bag in enumerate(bags) if i not in test], task, seed=run, epochs=epochs)
    held = [bags[i] for i in sorted(test)]
    labels, chances = [bag.label(task) for bag in held], [_chance(model, bag) for bag in held]
    known = xmil.list_methods(model)
    rows = {r: m for r, m in ROWS.items() if m[0] in known and (thorough or r not in SLOW)}
    found = {row: _evidence(model, held, task, *how) for row, how in rows.items()}
    right = [bag for bag, y, p in zip(held, labels, chances, strict=True) if (p > 0.5) == (y == 1)]
    if thorough:
        _add_curves(
            model, right, task, {r: m for r, m in rows.items() if r not in UNCURVED}, found, steps=steps
        )
    return {
        "model": name,
        "task": task,
        "run": run,
        "auroc": float(roc_auc_score(labels, chances)),
        "left_out": len(held) - len(right),
        "rows": found,
    }


def _evidence(
    model: MILModel, bags: list[ColonBag], task: str, method: str, params: dict[str, Any]
) -> dict[str, list[float]]:
    """AUPRC-2 for class 1 on the bags that have evidence, and something beside it."""
    values = []
    for bag in bags:
        evidence = bag.evidence(task)
        if len(set(np.sign(evidence).tolist())) > 1:
            scores = xmil.explain(model, bag.features, method=method, target=1, **params).scores
            values.append(xmil.auprc2(evidence, scores))
    return {"auprc2": values, "aupc": [], "srg": [], "flipped_at_zero": []}


def _add_curves(
    model: MILModel,
    bags: list[ColonBag],
    task: str,
    rows: dict[str, tuple[str, dict[str, Any]]],
    found: dict[str, dict[str, list[float]]],
    *,
    steps: int,
) -> None:
    """AUPC and SRG for the true class of the bags that are classified correctly."""
    for bag in bags:
        flips = Flips(model, bag.features, target=bag.label(task))
        for row, (method, params) in rows.items():
            e = xmil.explain(model, bag.features, method=method, target=bag.label(task), **params)
            morf, lerf = (flips.curve(e.scores, order=order, steps=steps) for order in ("morf", "lerf"))
            found[row]["aupc"].append(morf.aupc)
            found[row]["srg"].append(lerf.aupc - morf.aupc)
            found[row]["flipped_at_zero"].append(float(morf.flipped_at_zero))


@torch.no_grad()
def _chance(model: MILModel, bag: ColonBag) -> float:
    return float(torch.softmax(model(bag.features.unsqueeze(0)), dim=-1)[0, 1])
