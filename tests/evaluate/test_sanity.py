"""Randomised weights change scores that depend on them; stability and audits summed up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import xmil
from xmil.core.errors import XmilError
from xmil.evaluate import randomisation, redrawn, stability
from xmil.evaluate.statistics import spearman

X = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))


def model(name="attnmil", seed=0, **params):
    return xmil.create_model(name, in_dim=6, n_classes=2, seed=seed, **params)


@pytest.mark.parametrize("method", ["lrp", "gxi", "attention"])
def test_scores_change_with_the_weights(method):
    found = randomisation(model(), X, method=method, draws=4)
    assert found.passed
    assert len(found.correlations) == 4


def test_a_method_blind_to_the_model_fails():
    found = randomisation(model(), X, method="random")
    assert found.mean == 1.0
    assert not found.passed


def test_redrawing_leaves_the_model_and_keeps_the_moments():
    net = model("transmil", dim=32, heads=2)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    twin = redrawn(net, seed=1)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        if a.numel() > 1000:
            assert not torch.equal(a, b)
            assert b.std().item() == pytest.approx(a.std().item(), rel=0.15)
    again = redrawn(net, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), again.parameters(), strict=True))


def test_stability_is_a_correlation_matrix():
    nets = [model(seed=0), model(seed=0), model(seed=7)]
    matrix = stability(nets, X)
    np.testing.assert_allclose(matrix, matrix.T)
    np.testing.assert_allclose(np.diag(matrix), 1.0)
    assert matrix[0, 1] == pytest.approx(1.0)
    assert matrix[0, 2] < 0.999
    with pytest.raises(XmilError, match="two models"):
        stability(nets[:1], X)


def test_rank_correlation_against_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 5, size=(2, 40))
    assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert np.isnan(spearman([1, 1], [1, 2]))
    assert np.isnan(spearman([1], [1]))
