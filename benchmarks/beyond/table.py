"""Evidence found by Shapley values and by contexts, beside plain LRP on the same models and bags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from benchmarks.beyond.digits import Trained, stored
from xmil import explain_classes
from xmil.bench import TASKS, MethodSpec, score_bags
from xmil.evaluate import score_evidence
from xmil.methods.explain import deal
from xmil.models import MILModel

CONTEXTS = 24
PERMUTATIONS = {"attnmil": 200, "transmil": 100}  # of bags of thirty
SHAPLEY_BAGS = {"attnmil": 25, "transmil": 15}
CONTEXT_BAGS = 25


def study(*, quick: bool, data: str, models: Path | None) -> dict[str, Any]:
    """AUPRC-2 of each method, the mean over repetitions, and paired differences from LRP."""
    if models is None:
        raise SystemExit("the table needs --models, a folder of `xmil bench --suite paper`")
    repetitions, found = (2, {}) if quick else (10, {})
    for model in ("attnmil", "transmil"):
        for task in ("four_bags", "pos_neg_count", "adjacent_pairs"):
            rows = [
                measured(one, task, model, bags=2 if quick else None)
                for one in stored(task, model, folder=models, data=data, repetitions=repetitions)
            ]
            found[f"{task} {model}"] = summary(rows)
            print(task, model, found[f"{task} {model}"], flush=True)
    return found


def measured(one: Trained, task: str, model: str, *, bags: int | None) -> dict[str, float]:
    some = slice(bags or CONTEXT_BAGS)
    one = replace(one, x=one.x[some])
    evidence = torch.from_numpy(TASKS[task].evidence(one.test.codes[some]))
    spec, few = MethodSpec("lrp"), bags or SHAPLEY_BAGS[model]
    found = {
        "auroc": one.auroc,
        "lrp": auprc2(evidence, score_bags(one.model, one.x, spec)),
        f"contexts={CONTEXTS}": auprc2(evidence, in_contexts(one.model, one.x, spec, seed=one.repetition)),
        "lrp, as shapley": auprc2(evidence[:few], score_bags(one.model, one.x[:few], spec)),
    }
    shapley = [
        [e.scores for e in explain_classes(one.model, bag, method="shapley", precision=None,
                                           permutations=PERMUTATIONS[model])]
        for bag in one.x[:few]
    ]  # fmt: skip
    return {**found, "shapley": auprc2(evidence[:few], torch.from_numpy(np.array(shapley)))}


def in_contexts(model: MILModel, x: Tensor, spec: MethodSpec, *, seed: int) -> Tensor:
    """What `explain(..., contexts=24, keep=0.5, seed=seed)` gives, for all bags at once."""
    b, n = x.shape[:2]
    total, counts = torch.zeros(b, model.n_classes, n), torch.zeros(n)
    for rows in deal(n, contexts=CONTEXTS, keep=0.5, seed=seed):
        at = torch.from_numpy(rows)
        total[:, :, at] += score_bags(model, x[:, at.to(x.device)], spec).cpu()
        counts[at] += 1
    return total / counts


def auprc2(evidence: Tensor, scores: Tensor) -> float:
    return float(score_evidence(evidence, scores)["auprc2"].nanmean())


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    found: dict[str, Any] = {name: [values.mean(), values.std(ddof=1)] for name, values in columns.items()}
    for name, plain in ((f"contexts={CONTEXTS}", "lrp"), ("shapley", "lrp, as shapley")):
        change = columns[name] - columns[plain]
        found[f"{name} - lrp"] = [change.mean(), float(stats.ttest_rel(columns[name], columns[plain]).pvalue)]
    return found
