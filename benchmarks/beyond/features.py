"""Partners on features of real digits, bags of 30: TransMIL trained on bags drawn anew for each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from benchmarks.beyond import pairs, table
from benchmarks.beyond.digits import Trained, several
from benchmarks.beyond.learning import Course, learn, load, save
from xmil.bench import TASKS, MethodSpec, score_bags

REPETITIONS, BAGS, DRAWS, STEPS = 10, 8, 32, 800


def study(*, quick: bool, data: str, models: Path | None) -> dict[str, Any]:
    """One repetition after another; those that the folder has are not done again."""
    if models is None:
        raise SystemExit("features needs --models, a folder for the models and rows")
    models.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(2 if quick else REPETITIONS):
        kept = models / f"row_{seed}.json"
        if not kept.is_file():
            steps = 5 if quick else STEPS
            course = Course("adjacent_pairs", n=30, steps=steps, lr=1e-3, data=data, seed=seed)
            one = _trained(course, models / f"model_{seed}.pt")
            kept.write_text(json.dumps(_row(one, quick=quick)))
        rows.append(json.loads(kept.read_text()))
        print(seed, {k: v for k, v in rows[-1].items() if k != "bags"}, flush=True)
    return summary(rows)


def _trained(course: Course, path: Path) -> Trained:
    if not path.is_file():
        save(learn(course, repetitions=1), path)
    (one,) = several(course.configuration(1), load(course, path, 1), 1)
    return one


def _row(one: Trained, *, quick: bool) -> dict[str, Any]:
    bags, draws = (1, 4) if quick else (BAGS, DRAWS)
    found = [pairs.precisions(one.model, x, codes, draws=draws) for x, codes in pairs.positives(one, bags)]
    some = slice(bags if quick else table.CONTEXT_BAGS)
    x, truth = one.x[some], TASKS["adjacent_pairs"].evidence(one.test.codes[some])
    spec, evidence = MethodSpec("lrp"), torch.from_numpy(truth)
    return {
        "auroc": one.auroc,
        "bags": found,
        "lrp": table.auprc2(evidence, score_bags(one.model, x, spec)),
        "contexts=24": table.auprc2(evidence, table.in_contexts(one.model, x, spec, seed=one.repetition)),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means, and paired tests over the bags of all models."""
    each = [bag for row in rows for bag in row["bags"]]
    by_way = {name: np.array([bag[name] for bag in each]) for name in each[0]}
    ours, product = by_way["shapley interaction"], by_way["product of lrp"]
    contexts = [np.array([row[name] for row in rows]) for name in ("contexts=24", "lrp")]
    return {
        "models": len(rows),
        "bags": len(each),
        "auroc": [row["auroc"] for row in rows],
        **{name: float(values.mean()) for name, values in by_way.items()},
        "p over bags": float(stats.ttest_rel(ours, product).pvalue),
        "p over bags, signed ranks": float(stats.wilcoxon(ours, product).pvalue),
        "contexts=24, lrp": [float(values.mean()) for values in contexts],
    }
