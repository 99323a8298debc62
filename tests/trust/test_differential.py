"""Every model and a zoo of variants: LRP against other ways to know, and against itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import xmil
from tests.zoo.patterns import ORDERED, PATTERNS, RANDOM, WIDTH, logits_of
from xmil.lrp import trace
from xmil.network import frozen

OURS = tuple(xmil.list_models())
VARIANTS = tuple(name for name in PATTERNS if name not in RANDOM)
BAGS = 6
LOOSE = ("transmil", "top-k", "nearest neighbours")  # few instances: they repeat, choose or link them anew
IN_ORDER = ("transmil", "mambamil", *ORDERED)


def network(name: str) -> nn.Module:
    if name in PATTERNS:
        return PATTERNS[name]().eval()
    return xmil.create_model(name, in_dim=WIDTH, n_classes=2, seed=1).eval()


def bag(seed: int, n: int = 5) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed)) + 0.5


def logit(net: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float(logits_of(net, x[None])[0, 1])


def explained(net: nn.Module, x: Tensor) -> xmil.Explanation:
    forward = None if isinstance(net, xmil.models.MILModel) else logits_of
    return xmil.explain(net, x, target=1, preset="exact", forward=forward)


def shapley(value: Callable[[tuple[int, ...]], float], n: int) -> np.ndarray:
    """Exact Shapley values, by the formula over all subsets; the empty bag, the same for all, is 0."""
    worth = {s: value(s) if s else 0.0 for r in range(n + 1) for s in itertools.combinations(range(n), r)}
    out = np.zeros(n)
    for i, r in itertools.product(range(n), range(n)):
        weight = math.factorial(r) * math.factorial(n - r - 1) / math.factorial(n)
        for s in itertools.combinations([j for j in range(n) if j != i], r):
            out[i] += weight * (worth[tuple(sorted((*s, i)))] - worth[s])
    return out


def without_others(net: nn.Module, x: Tensor, kept: tuple[int, ...]) -> float:
    """The logit of the kept instances alone; a variant that needs a number of them sees zeros instead."""
    if isinstance(net, xmil.models.MILModel):
        return logit(net, x[list(kept)])
    return logit(net, x * torch.isin(torch.arange(len(x)), torch.tensor(kept))[:, None])


@cache
def agreement(name: str) -> float:
    """Mean rank correlation with exact Shapley values."""
    net = network(name)
    found = [
        spearmanr(
            explained(net, x).scores, shapley(lambda s, x=x: without_others(net, x, s), len(x))
        ).statistic
        for x in map(bag, range(BAGS))
    ]
    return float(np.mean(found))


@cache
def right_signs(name: str) -> float:
    """How often the output moves in the sign of the strongest score when that patch is zeroed."""
    net, right = network(name), []
    for x in map(bag, range(BAGS)):
        scores = explained(net, x).scores
        top = int(np.abs(scores).argmax())
        zeroed = x.clone()
        zeroed[top] = 0
        right.append((logit(net, x) - logit(net, zeroed)) * scores[top] > 0)
    return float(np.mean(right))


@pytest.mark.parametrize("name", [*OURS, *PATTERNS])
def test_the_sum_rule(name: str) -> None:
    for x in map(bag, range(BAGS)):
        e = explained(network(name), x)
        assert e.audit is not None
        shares = [value for key, value in e.audit.as_dict().items() if key not in ("output", "other")]
        assert sum(shares) == pytest.approx(e.output, abs=1e-4 * max(abs(e.output), *map(abs, shares)))
        assert e.audit.instances == pytest.approx(float(e.scores.astype(float).sum()), abs=1e-5)


@pytest.mark.parametrize("name", [*OURS, *VARIANTS])
def test_ranks_agree_with_exact_shapley_values(name: str) -> None:
    assert agreement(name) >= (0.1 if name in LOOSE else 0.6)


def test_zeroing_the_top_patch_moves_the_output_in_its_sign() -> None:
    found = {name: right_signs(name) for name in (*OURS, *VARIANTS)}
    assert np.mean(list(found.values())) >= 0.9
    assert min(found.values()) >= 0.5, found


@pytest.mark.parametrize("name", [name for name in (*OURS, *VARIANTS) if name not in IN_ORDER])
def test_the_order_of_instances_does_not_matter(name: str) -> None:
    net, x, order = network(name), bag(0, n=9), torch.randperm(9)
    one, other = explained(net, x), explained(net, x[order])
    np.testing.assert_allclose(other.scores, one.scores[order], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", OURS)
def test_batch_mates_do_not_matter(name: str) -> None:
    net = network(name)
    x = torch.stack([bag(seed) for seed in range(3)])
    with frozen(net):
        together = trace(net, x, module=net).relevance(lambda logits: logits[:, 1]).input.instances
        alone = [trace(net, one[None], module=net).relevance(lambda logits: logits[:, 1]) for one in x]
    torch.testing.assert_close(together, torch.cat([r.input.instances for r in alone]), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", [*OURS, *VARIANTS])
def test_double_precision_changes_little(name: str) -> None:
    net, x = network(name), bag(1, n=9)
    one = explained(net, x)
    other = explained(net.double(), x.double())
    np.testing.assert_allclose(one.scores, other.scores, rtol=1e-3, atol=1e-5)
    assert one.audit is not None
    assert other.audit is not None
    assert abs(other.audit.other) <= 1e-10 * max(1.0, abs(other.output))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_device_does_not_matter() -> None:
    for name in OURS:
        net, x = network(name), bag(1, n=9)
        here, there = explained(net, x), explained(net.cuda(), x.cuda())
        np.testing.assert_allclose(here.scores, there.scores, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("name", RANDOM)
def test_a_draw_can_be_repeated(name: str) -> None:
    one, other = (explained(network(name), bag(2)) for _ in range(2))
    np.testing.assert_array_equal(one.scores, other.scores)
    assert one.warnings


@pytest.mark.parametrize("name", [*OURS, *VARIANTS])
def test_explaining_leaves_the_network_as_it_was(name: str) -> None:
    net, x = network(name).train(), bag(3)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    given = x.clone()
    explained(net, x)
    assert torch.equal(given, x)
    assert all(part.training for part in net.modules())
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
