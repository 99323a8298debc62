"""Strata against all coalitions."""

from __future__ import annotations

import torch
from torch import Tensor

from xmil.methods.interactions import Strata, Surrogate, exact_interaction
from xmil.methods.shapley import bits_of

N = 13


def surrogate(n: int, rng: torch.Generator) -> Surrogate:
    levels, slopes, pairs = (torch.randn(*s, generator=rng).double() for s in ((n + 1,), (3, n), (n, n)))
    pairs = pairs.triu(1)
    return Surrogate(levels, slopes, pairs + pairs.T)


def rough(masks: Tensor) -> Tensor:
    """A game that no surrogate is: the most of its members' weights, by a product of three of them."""
    weights = torch.randn(N, generator=torch.Generator().manual_seed(3)).double()
    most = torch.where(masks, weights, -5.0).amax(dim=1)
    return most * (1 + masks[:, :3].all(dim=1)) + masks.double() @ weights


def strata_of(draws: int, seed: int) -> tuple[Tensor, Tensor]:
    strata = Strata(N, draws, torch.Generator().manual_seed(seed))
    assert strata.shares  # not all of it is run in full
    strata.full = (every := strata.every(), rough(every))
    strata.add(drawn := strata.draw(draws), rough(drawn))
    mean, stderr = strata.estimate(torch.arange(N))
    i, j = torch.triu_indices(N, N, offset=1)
    return mean[i, j], stderr[i, j]


def test_means_of_a_surrogate_are_those_of_its_coalitions() -> None:
    near = surrogate(6, torch.Generator().manual_seed(0))
    masks = bits_of(torch.arange(64), 6)
    for size in range(1, 6):
        for p, q in ((1, 1), (1, 0), (0, 0)):
            at = (masks.sum(dim=1) == size) & (masks[:, 2] == p) & (masks[:, 4] == q)
            if at.any():
                torch.testing.assert_close(near.mean(size, p, q)[2, 4], near(masks[at]).mean())


def test_a_surrogate_finds_a_game_of_its_kind() -> None:
    rng = torch.Generator().manual_seed(1)
    near, masks = surrogate(7, rng), bits_of(torch.arange(128), 7)
    found = Surrogate.fit(masks, near(masks))
    torch.testing.assert_close(found(masks), near(masks), rtol=0, atol=1e-5)


def test_intervals_of_strata_hold_the_exact_indices() -> None:
    values = rough(bits_of(torch.arange(1 << N), N))
    truth = torch.stack(
        [exact_interaction(values, N, int(i), int(j)) for i, j in torch.triu_indices(N, N, offset=1).T]
    )
    held = []
    for seed in range(5):
        mean, stderr = strata_of(1500, seed)
        assert float((mean - truth).square().mean().sqrt()) < 0.2 * float(truth.std())
        held.append(((mean - truth).abs() <= 2 * stderr).double())
    assert 0.9 <= float(torch.cat(held).mean()) <= 0.98
