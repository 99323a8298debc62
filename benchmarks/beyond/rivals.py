"""Our sampling beside shapiq's approximators on one game: `python -m benchmarks.beyond rivals`.

shapiq is no dependency: install it where this runs. Each has as many values of coalitions to spend; errors
are root mean squares in shares of the exact values' own deviation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import xmil
from xmil.network import Network
from xmil.subsets import open_subsets

N, WIDTH, BUDGETS = 14, 32, (1000, 4000)
LARGE, ORDERS = 2000, 20  # patches of the large bag, and permutations
Game = Callable[[npt.NDArray[np.bool_]], npt.NDArray[np.float64]]
Pairs = npt.NDArray[np.float64]


def study(*, quick: bool, data: str, models: Path | None) -> dict[str, Any]:
    """AttnMIL with a hidden layer behind the pooling: pairs and single values of 14 patches, then 2,000."""
    del data, models
    seeds = 2 if quick else 5
    found: dict[str, Any] = {}
    for budget in BUDGETS:
        rows = [_pairs(seed, budget) for seed in range(seeds)]
        found[f"pairs of {N}, {budget} values"] = _mean(rows)
        rows = [_values(seed, budget) for seed in range(seeds)]
        found[f"values of {N}, {budget} values"] = _mean(rows)
        print(found, flush=True)
    return {**found, f"values of {LARGE}, {ORDERS} orders": _large(200 if quick else LARGE)}


def model_of(seed: int) -> nn.Module:
    """Weights large enough for attention to be uneven."""
    model = xmil.create_model(
        "attnmil", in_dim=WIDTH, n_classes=2, dim=16, attention_dim=8, n_out_layers=1, seed=seed
    )
    rng = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6, generator=rng)
    return model.eval()


def game_of(model: nn.Module, x: torch.Tensor) -> Game:
    """Values (b,) of coalitions (b, n), as shapiq wants them."""
    parts = open_subsets(Network(model), x.unsqueeze(0))

    @torch.no_grad()
    def game(masks: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        values = parts.run(torch.from_numpy(np.atleast_2d(masks).astype(bool)))[:, 1]
        return np.asarray(values.numpy())

    return game


def _bag(seed: int, n: int) -> torch.Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(1000 + seed))


def _pairs(seed: int, budget: int) -> dict[str, list[float]]:
    import shapiq

    model, x = model_of(seed), _bag(seed, N)
    truth = _by_pair(xmil.interactions(model, x, target=1, exact=True))
    draws = max(4, round(budget / (1 + N + N * (N - 1) / 2)))
    found = {"ours": _timed(truth, lambda: _by_pair(_ours(model, x, draws, seed)))}
    for name in ("PermutationSamplingSII", "SHAPIQ", "SVARMIQ", "KernelSHAPIQ"):
        how: dict[str, Any] = {"n": N, "max_order": 2, "index": "SII", "random_state": seed}
        rival = getattr(shapiq, name)(**how)
        found[name] = _timed(truth, lambda r=rival: _of_shapiq(r.approximate(budget, game_of(model, x)), 2))
    return found


def _ours(model: nn.Module, x: torch.Tensor, draws: int, seed: int) -> xmil.Interactions:
    return xmil.interactions(model, x, target=1, exact=False, precision=None, draws=draws, seed=seed)


def _values(seed: int, budget: int) -> dict[str, list[float]]:
    import shapiq

    model, x = model_of(seed), _bag(seed, N)
    truth = xmil.explain(model, x, method="shapley", target=1, exact=True).scores

    def ours() -> Any:
        how: dict[str, Any] = {"exact": False, "precision": None, "permutations": budget // (N - 1)}
        return xmil.explain(model, x, method="shapley", target=1, seed=seed, **how).scores

    found = {"ours": _timed(truth, ours)}
    for name in ("PermutationSamplingSV", "UnbiasedKernelSHAP", "SVARM", "KernelSHAP"):
        rival = getattr(shapiq, name)(n=N, random_state=seed)
        found[name] = _timed(truth, lambda r=rival: _of_shapiq(r.approximate(budget, game_of(model, x)), 1))
    return found


def _large(n: int) -> dict[str, float]:
    """Seconds for as many permutations of a large bag."""
    import shapiq

    model, x = model_of(0), _bag(0, n)
    start = perf_counter()
    xmil.explain(model, x, method="shapley", target=1, precision=None, permutations=ORDERS)
    middle = perf_counter()
    shapiq.PermutationSamplingSV(n=n, random_state=0).approximate(ORDERS * n, game_of(model, x))
    return {"ours": middle - start, "PermutationSamplingSV": perf_counter() - middle}


def _by_pair(found: xmil.Interactions) -> Pairs:
    order = np.lexsort(found.pairs.T[::-1])
    return np.asarray(found.values[order])


def _of_shapiq(found: Any, size: int) -> Pairs:
    """The values of one size, by their players."""
    players = sorted(key for key in found.interaction_lookup if len(key) == size)
    return np.array([found[key] for key in players])


def _timed(truth: Pairs, call: Callable[[], Any]) -> list[float]:
    start = perf_counter()
    error = np.sqrt(np.mean((call() - truth) ** 2)) / np.std(truth)
    return [float(error), perf_counter() - start]


def _mean(rows: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: np.mean([row[name] for row in rows], axis=0).round(4).tolist() for name in rows[0]}
