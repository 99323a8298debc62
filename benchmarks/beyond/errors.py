"""Whether standard errors are honest: how often an interval of 95 % holds the long-run mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

import xmil
from benchmarks.beyond.digits import stored
from xmil.bench import MethodSpec, score_bags
from xmil.core.explanation import half_interval
from xmil.methods.explain import deal

LONG = 2000  # sub-bags for the long-run mean of contexts


def study(*, quick: bool, data: str, models: Path | None) -> dict[str, Any]:
    """Coverage on the models of Table 1: enumerated bags are cut to 14 and 10 instances."""
    if models is None:
        raise SystemExit("errors needs --models, a folder of `xmil bench --suite paper`")
    bags, seeds, found = (2, 3, {}) if quick else (10, 25, {})
    for model in ("attnmil", "transmil"):
        n, some = (14, seeds) if model == "attnmil" else (9, max(2, seeds // 8))
        (one,) = stored("adjacent_pairs", model, folder=models, data=data, repetitions=1)
        every, cut = one.x[:bags], one.x[:bags, :n]
        found[f"contexts {model}, bags of 30"] = float(
            np.mean([_contexts(one.model, x, seeds) for x in every])
        )
        found[f"shapley {model}, bags of {n}"] = float(np.mean([shapley(one.model, x, some) for x in cut]))
        if model == "attnmil":
            held = [interactions(one.model, x, seeds) for x in cut]
            found[f"interactions {model}, bags of {n}"] = float(np.mean(held))
        print(found, flush=True)
    return found


def shapley(model: Any, x: torch.Tensor, seeds: int) -> float:
    truth = xmil.explain(model, x, method="shapley", target=1, exact=True).scores
    runs = [
        xmil.explain(
            model, x, method="shapley", target=1, exact=False, precision=None, permutations=64, seed=s
        )
        for s in range(seeds)
    ]
    return float(np.mean([_held(e.scores, e.stderr, truth, 31) for e in runs]))


def _contexts(model: Any, x: torch.Tensor, seeds: int) -> float:
    return float(np.mean([found["24"]["all"] for found in coverage(model, x, seeds=seeds)]))


def coverage(
    model: Any, x: torch.Tensor, *, seeds: int, counts: tuple[int, ...] = (24,), long: int = LONG
) -> list[dict[str, dict[str, float]]]:
    """For each seed and number of contexts, how often intervals hold the long-run mean.

    "all": of all patches; "strong": of those whose mean is a twentieth of the largest or more; "seen": of
    those whose scores over the long run are not skewed (less than 2); "miss": the mean distance from the
    interval, in shares of the largest mean. These are intervals from the standard errors alone;
    "interval" are those of `e.interval()`.
    """
    every = _draws(model, x, long, seed=10_000)
    truth, deviation = np.nanmean(every, axis=1), np.nanstd(every, axis=1)
    skewness = np.nanmean((every - truth[:, None]) ** 3, axis=1) / np.maximum(deviation, 1e-12) ** 3
    largest = float(np.abs(truth).max())
    groups = {
        "all": np.ones(len(x), dtype=bool),
        "strong": np.abs(truth) >= 0.05 * largest,
        "seen": np.abs(skewness) < 2,
    }
    found = []
    for seed in range(seeds):
        drawn = _draws(model, x, max(counts), seed=seed)
        found.append({str(count): _within(drawn[:, :count], truth, groups, largest) for count in counts})
    return found


def _within(drawn: Any, truth: Any, groups: dict[str, Any], largest: float) -> dict[str, float]:
    m = (~np.isnan(drawn)).sum(axis=1)
    half = stats.t.ppf(0.975, m - 1) * np.nanstd(drawn, axis=1, ddof=1) / np.sqrt(m)
    outside = np.maximum(0.0, np.abs(np.nanmean(drawn, axis=1) - truth) - half - 1e-7)
    shares = {name: float(np.mean(outside[at] == 0)) for name, at in groups.items() if at.any()}
    stderr = np.nanstd(drawn, axis=1, ddof=1) / np.sqrt(m)
    within = np.abs(np.nanmean(drawn, axis=1) - truth) <= half_interval(stderr, int(m.min())) + 1e-7
    shares["interval"] = float(within.mean())
    return {**shares, "miss": float(outside.mean() / max(largest, 1e-12))}


def _draws(model: Any, x: torch.Tensor, contexts: int, *, seed: int) -> Any:
    """Scores (n, contexts) of each patch in each sub-bag, nan where it is not in."""
    hands = deal(len(x), contexts=contexts, keep=0.5, seed=seed)
    bags = torch.stack([x[torch.from_numpy(rows)] for rows in hands])
    scores = score_bags(model, bags, MethodSpec("lrp"))[:, 1].detach().numpy()
    found = np.full((len(x), contexts), np.nan)
    for k, (rows, values) in enumerate(zip(hands, scores, strict=True)):
        found[rows, k] = values
    return found


def interactions(model: Any, x: torch.Tensor, seeds: int) -> float:
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
