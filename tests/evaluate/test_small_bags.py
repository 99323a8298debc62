"""A network whose outputs are not finite for small bags: what removes patches says where it stops working."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from xmil.core.errors import UnsupportedError
from xmil.evaluate import FaithfulnessSettings, Flips, Judge, choose_method, evaluate_slide

N, D = 20, 4
SCORES = np.arange(N, dtype=float)


class Spread(nn.Module):
    """Reads a standard deviation over patches, which too few of them do not have."""

    def __init__(self, least: int = 3) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        squares = (x - x.mean(dim=1, keepdim=True)).square().sum(dim=1)
        return ((1 + squares) / (x.shape[1] - self.least + 1)).sqrt()[:, :2]


class Unit(nn.Module):
    """Divides the mean instance by its length, which the empty bag's does not have."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=1)
        return (mean / mean.norm(dim=1, keepdim=True))[:, :2]


def bag() -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "measure",
    [
        lambda net, x: xmil.flip(net, x, SCORES, target=1),
        lambda net, x: xmil.srg(net, x, SCORES, target=1),
        lambda net, x: xmil.sufficiency(net, x, SCORES, target=1),
        lambda net, x: xmil.interactions(net, x, target=1, by=SCORES, draws=20),
        lambda net, x: Judge(Flips(net, x, target=1)).verdicts([("scores", SCORES)]),
        lambda net, x: xmil.explain(net, x, method="shapley", target=1),
        lambda net, x: choose_method(net, [x], ["gxi"]),
        lambda net, x: evaluate_slide(net, xmil.Bag(x.numpy()), FaithfulnessSettings(methods=("gxi",))),
    ],
    ids=["flip", "srg", "sufficiency", "interactions", "verdict", "shapley", "choice", "evaluate"],
)
def test_the_size_at_which_a_network_stops_working_is_named(measure: Callable[[Any, Tensor], object]) -> None:
    with pytest.raises(UnsupportedError, match="Spread needs at least 3 patches"):
        measure(Spread(), bag())


def test_what_needs_no_small_bag_still_works() -> None:
    flips = Flips(Spread(), bag(), target=1)
    assert np.isfinite(flips.gains(np.arange(N)[None], steps=5)).all()
    assert np.isfinite(flips.values_of([np.arange(N) < 3])).all()
    e = xmil.explain(Spread(5), bag(), method="one_added", target=1)
    assert e.params["company"] == 5
    assert np.isfinite(e.scores).all()
    assert np.isfinite(xmil.explain(Spread(), bag(), method="one_removed", target=1).scores).all()


def test_an_empty_bag_without_an_output_is_named() -> None:
    with pytest.raises(UnsupportedError, match="empty bag"):
        xmil.flip(Unit(), bag(), SCORES, target=1)
    (verdict,) = Judge(Flips(Unit(), bag(), target=1)).verdicts([("scores", SCORES)])
    assert np.isfinite([verdict.srg, verdict.p]).all()


def test_scores_are_not_checked_on_halves_without_an_output() -> None:
    e = xmil.explain(Spread(5), bag()[:8], method="gxi", target=1)
    assert "half" in e.params["check"]
    assert "check" not in xmil.explain(Spread(5), bag(), method="gxi", target=1).params
