"""Whether standard errors are honest: how often an interval of 95 % holds the long-run mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

import xmil
from benchmarks.beyond.digits import stored
from xmil.methods.contexts import deal
from xmil.toy.scoring import MethodSpec, score_bags

LONG = 2000  # sub-bags for the long-run mean of contexts


def study(*, quick: bool, data: str, models: Path | None) -> dict[str, Any]:
    """Coverage on the models of Table 1: enumerated bags are cut to 14 and 10 instances."""
    if models is None:
        raise SystemExit("errors needs --models, a folder of `xmil toy --table1`")
    bags, seeds, found = (2, 3, {}) if quick else (10, 25, {})
    for model in ("attnmil", "transmil"):
        n, some = (14, seeds) if model == "attnmil" else (9, max(2, seeds // 8))
        (one,) = stored("adjacent_pairs", model, folder=models, data=data, repetitions=1)
        every, cut = one.x[:bags], one.x[:bags, :n]
        found[f"contexts {model}, bags of 30"] = float(
            np.mean([_contexts(one.model, x, seeds) for x in every])
        )
        found[f"shapley {model}, bags of {n}"] = float(np.mean([_shapley(one.model, x, some) for x in cut]))
        if model == "attnmil":
            held = [_interactions(one.model, x, seeds) for x in cut]
            found[f"interactions {model}, bags of {n}"] = float(np.mean(held))
        print(found, flush=True)
    return found


def _shapley(model: Any, x: torch.Tensor, seeds: int) -> float:
    truth = xmil.explain(model, x, method="shapley", target=1, exact=True).scores
    runs = [
        xmil.explain(
            model, x, method="shapley", target=1, exact=False, precision=None, permutations=64, seed=s
        )
        for s in range(seeds)
    ]
    return float(np.mean([_held(e.scores, e.stderr, truth, 31) for e in runs]))


def _contexts(model: Any, x: torch.Tensor, seeds: int) -> float:
    def mean_and_error(count: int, seed: int) -> tuple[Any, Any, Any]:
        hands = deal(len(x), contexts=count, keep=0.5, seed=seed)
        bags = torch.stack([x[torch.from_numpy(rows)] for rows in hands])
        scores = score_bags(model, bags, MethodSpec("lrp"))[:, 1].detach().numpy()
        held: list[list[float]] = [[] for _ in range(len(x))]
        for rows, values in zip(hands, scores, strict=True):
            for i, value in zip(rows, values, strict=True):
                held[i].append(float(value))
        m = np.array([len(v) for v in held])
        stderr = np.array([np.std(v, ddof=1) for v in held]) / np.sqrt(m)
        return np.array([np.mean(v) for v in held]), stderr, m

    truth, _, _ = mean_and_error(LONG, 10_000)
    runs = [mean_and_error(24, seed) for seed in range(seeds)]
    return float(np.mean([_held(mean, error, truth, m - 1) for mean, error, m in runs]))


def _interactions(model: Any, x: torch.Tensor, seeds: int) -> float:
    truth = xmil.interactions(model, x, target=1, exact=True)
    known = {tuple(pair): value for pair, value in zip(truth.pairs, truth.values, strict=True)}
    held = []
    for seed in range(seeds):
        e = xmil.interactions(model, x, target=1, exact=False, precision=None, draws=128, seed=seed)
        expected = np.array([known[tuple(pair)] for pair in e.pairs])
        held.append(_held(e.values, e.stderr, expected, 63))
    return float(np.mean(held))


def _held(mean: Any, stderr: Any, truth: Any, degrees: Any) -> float:
    return float(np.mean(np.abs(mean - truth) <= stats.t.ppf(0.975, degrees) * stderr + 1e-7))
