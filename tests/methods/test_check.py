"""The check of signed scores in every explanation: it warns, changes no score, and says why it is skipped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from xmil.core.errors import UnsupportedError

D = 4


class OffSwitch(nn.Module):
    def __init__(self, leak: float) -> None:
        super().__init__()
        self.leak = leak

    def forward(self, x: Tensor) -> Tensor:
        return 2 - torch.relu(1 - 8 * x[..., :1].relu().mean(1)) + self.leak * x[..., 1:2].mean(1)


def bag(n: int = 20, seed: int = 0, *, planted: bool = False) -> Tensor:
    x = torch.randn(n, D, generator=torch.Generator().manual_seed(seed))
    if planted:
        x[:, 0] = -1.0
        x[0, 0] = 8.0
    return x


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_evidence_that_switches_a_unit_off_is_refused_or_warned_about(seed: int, planted: bool) -> None:
    x = bag(seed=seed, planted=planted)
    with pytest.raises(UnsupportedError):
        xmil.explain(OffSwitch(0.0), x, target=1)
    e = xmil.explain(OffSwitch(0.05), x, target=1)
    assert any("one_added" in line for line in e.warnings)
    plain = xmil.explain(OffSwitch(0.05), x, target=1, check=False)
    assert not any("one_added" in line for line in plain.warnings)
    np.testing.assert_array_equal(e.scores, plain.scores)


def test_random_scores_get_no_advice() -> None:
    model = xmil.create_model("attnmil", in_dim=D, n_classes=2, seed=1)
    warned = [xmil.explain(model, bag(10, seed), method="random", target=1).warnings for seed in range(8)]
    assert not any("contradict" in line for lines in warned for line in lines)


@pytest.mark.parametrize("name", ["attnmil", "meanpool"])
def test_right_scores_pass(name: str) -> None:
    model = xmil.create_model(name, in_dim=D, n_classes=2, seed=1)
    net = nn.Sequential(model)
    for seed in range(2):
        x = 3 * bag(10, seed)  # few enough to enumerate
        e = xmil.explain(model, x, method="shapley", target=1)
        assert not any("contradict" in line for line in e.warnings)
        against = xmil.explain(net, x, method="shapley", target=1, forward=lambda net, x: -net(x))
        assert not any("contradict" in line for line in against.warnings)


@pytest.mark.parametrize(
    ("x", "method", "word"),
    [(bag(7), "lrp", "patches"), (torch.ones(20, D), "lrp", "tie"), (bag(), "attention", None)],
)
def test_what_cannot_be_checked_says_why(x: Tensor, method: str, word: str | None) -> None:
    model = xmil.create_model("attnmil", in_dim=D, n_classes=2, seed=0)
    e = xmil.explain(model, x, method=method)
    assert (word is None and "check" not in e.params) or word in e.params["check"]


def test_large_bags_are_checked_on_a_part() -> None:
    sizes = []

    class Watched(OffSwitch):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(x.shape[1])
            return super().forward(x)

    net, x = Watched(0.05), bag(3000)
    xmil.explain(net, x, target=1, check=False)
    before, sizes[:] = list(sizes), []
    xmil.explain(net, x, target=1)
    assert sorted(sizes) == sorted([*before, 512, 512, 1024])


def test_features_and_outputs_that_say_nothing_are_named() -> None:
    """A failed extraction gives rows of zeros, and a constant network zeros for scores."""
    net = xmil.create_model("attnmil", in_dim=4, n_classes=2, seed=0)
    for bag, word in ((torch.zeros(9, 4), "only zeros"), (torch.ones(9, 4), "the same features")):
        assert any(word in text for text in xmil.explain(net, bag, target=1).warnings)
    varied = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    assert not xmil.explain(net, varied, target=1).warnings

    class Constant(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[1.0, 2.0]]) + 0 * x.sum()

    for method in ("lrp", "one_added", "ig"):
        e = xmil.explain(Constant(), varied, method=method, target=1)
        assert not e.scores.any()
        assert any("zero" in text for text in e.warnings)


def test_the_zero_of_a_unit_does_not_hide_scores_that_contradict_a_value() -> None:
    """The same scores of the same value in Celsius and in Kelvin."""

    class Value(torch.nn.Module):
        task = "regression"

        def __init__(self, zero: float) -> None:
            super().__init__()
            self.zero = zero

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.zero - torch.relu(1 - 8 * x[..., :1].relu().mean(1)) + 0.05 * x[..., 1:2].mean(1)

    x = bag(planted=True)
    warned = [xmil.explain(Value(zero), x, method="gxi").warnings for zero in (0.5, 273.5)]
    assert [any("contradict" in line for line in lines) for lines in warned] == [True, True]
