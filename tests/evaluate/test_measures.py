"""Sufficiency, necessity, random bands, bootstrap: by hand and by slow versions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import xmil
from xmil.core.errors import InputError, XmilError
from xmil.core.interval import bootstrap
from xmil.evaluate.flip import Flips
from xmil.evaluate.measures import necessity, random_band, sufficiency, top_instances


class Sum(nn.Module):
    def forward(self, x):
        return x[..., 0].sum(dim=1, keepdim=True)


X = torch.tensor([[3.0], [-1.0], [2.0], [-4.0]])


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def test_sufficiency_and_necessity_by_hand():
    scores = X[:, 0].numpy()
    assert sufficiency(Sum(), X, scores, top=0.5) == pytest.approx(sigmoid(5))
    assert necessity(Sum(), X, scores, top=0.5) == pytest.approx(sigmoid(0) - sigmoid(-5))
    assert sufficiency(Sum(), X, scores, top=0.01) == pytest.approx(sigmoid(3))  # one instance at least
    assert necessity(Sum(), X, scores, top=1.0) == pytest.approx(0.0)  # the empty bag is zeros


def test_top_instances_break_ties_by_seed():
    ties = np.zeros(100)
    a, b = (top_instances(ties, 0.2, seed=seed) for seed in (0, 1))
    assert a.sum() == b.sum() == 20
    assert not np.array_equal(a, b)


def test_random_band_is_that_of_plain_random_orders():
    model = xmil.create_model("attnmil", in_dim=5, n_classes=2, dim=8, attention_dim=4, seed=0)
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(0)) * 3
    band = random_band(Flips(model, x, target=1), orders=8, seed=4)
    rng = np.random.default_rng(4)
    curves = np.array([xmil.flip(model, x, rng.permutation(30), target=1).values for _ in range(8)])
    np.testing.assert_allclose(band.mean, curves.mean(axis=0))
    np.testing.assert_allclose(band.low, np.quantile(curves, 0.025, axis=0))
    assert band.aupc == pytest.approx(curves.mean())
    low, high = band.aupc_interval
    assert low <= band.aupc <= high


def test_bootstrap_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    inside = 0
    for i in range(200):
        found = bootstrap(rng.normal(1.0, 1.0, size=40), draws=400, seed=i)
        inside += found.low <= 1.0 <= found.high
    assert 0.88 <= inside / 200 <= 0.99


def test_bootstrap_edges():
    one = bootstrap([0.3])
    assert one.estimate == 0.3
    assert np.isnan(one.low)
    median = bootstrap([1.0, 2.0, 9.0], statistic=np.median)
    assert median.estimate == 2.0
    with pytest.raises(XmilError, match="finite values"):
        bootstrap([1.0, np.nan])
    with pytest.raises(XmilError, match="orders"):
        random_band(Flips(Sum(), X), orders=1)
    with pytest.raises(XmilError, match="share in the range"):
        sufficiency(Sum(), X, [1, 2, 3, 4], top=0)


@pytest.mark.parametrize("measure", [xmil.flip, xmil.srg, xmil.sufficiency, xmil.necessity])
def test_an_explanation_of_another_slide_is_refused(measure) -> None:
    net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    one, two, nameless = (xmil.Bag(np.eye(4), slide_id=name) for name in ("s1", "s2", None))
    e = xmil.explain(net, one, target=1)
    with pytest.raises(InputError, match="of the bag 's1', but the bag here is 's2'"):
        measure(net, two, e)
    expected = measure(net, two, e.scores, target=1)
    for bag in (one, nameless):
        assert repr(measure(net, bag, e)) == repr(expected)
