"""Bounds of what removal can do, against all removals."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

import xmil
from xmil.network import Network
from xmil.subsets import bound_of, open_subsets
from xmil.subsets.bounds import Weights, highest_mean, relaxed_relu

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("attnmil", {"dim": 8, "attention_dim": 4}),
    ("attnmil", {"dim": 8, "attention_dim": 4, "n_out_layers": 1}),
    ("attnmil", {"dim": 8, "attention_dim": 4, "n_out_layers": 2}),
    ("attnmil", {"dim": 8, "attention_dim": 4, "branches": 2}),
    ("clam_mb", {"dim": 8, "attention_dim": 4}),
    ("meanpool", {"dim": 8}),
    ("maxpool", {"dim": 8}),
]


@pytest.mark.parametrize(("name", "params"), MODELS)
def test_bounds_never_exclude_what_removal_reaches(name: str, params: dict[str, Any]) -> None:
    """Whatever leaves, the largest difference it makes is one the bound holds possible."""
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for seed in range(4):
            model = xmil.create_model(name, in_dim=5, n_classes=3, seed=seed, **params)
            bag = 2 * torch.randn(9, 5, generator=torch.Generator().manual_seed(seed))
            game = open_subsets(Network(model), bag.unsqueeze(0))
            bound = bound_of(game)
            for removed in (1, 2, 4):
                sets = torch.ones(0, 9, dtype=torch.bool)
                for chosen in combinations(range(9), removed):
                    mask = torch.ones(1, 9, dtype=torch.bool)
                    mask[0, list(chosen)] = False
                    sets = torch.cat([sets, mask])
                d = torch.from_numpy(rng.normal(size=3))
                reached = bool((game.run(sets) @ d > 0).any())
                assert bound.possible(d, removed) or not reached


def test_highest_mean_is_that_of_all_choices() -> None:
    rng = np.random.default_rng(1)
    logits, values = rng.normal(size=7), rng.normal(size=(7, 4))
    for scale in (1.0, 10.0, 100.0):
        weights = np.exp(scale * logits)
        for removed in range(7):
            best = np.full(4, -np.inf)
            for size in range(removed + 1):
                for out in combinations(range(7), size):
                    kept = np.setdiff1d(np.arange(7), out)
                    best = np.maximum(best, weights[kept] @ values[kept] / weights[kept].sum())
            margin = torch.full((4,), 1e-7, dtype=torch.float64)
            bound = highest_mean(
                Weights(torch.from_numpy(scale * logits)), torch.from_numpy(values), removed, margin
            )
            assert (bound.numpy() >= best).all()
            np.testing.assert_allclose(bound.numpy(), best, atol=2e-3)


def test_relaxed_relu_lies_above() -> None:
    rng = np.random.default_rng(2)
    low = torch.from_numpy(rng.normal(size=20))
    high = low + torch.from_numpy(rng.random(20)) * 2
    slope = torch.from_numpy(rng.normal(size=20))
    bound, constant = relaxed_relu(slope, low, high)
    for _ in range(200):
        y = low + torch.from_numpy(rng.random(20)) * (high - low)
        assert float(slope @ y.relu()) <= float(bound @ y + constant) + 1e-9
