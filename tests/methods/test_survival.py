"""Discrete hazards: the survival function, the risk, and how the risk is shared out among time bins."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xmil.methods import risk_gradient, risk_slopes, survival_function, survival_risk

logits = st.lists(st.floats(-50, 50), min_size=1, max_size=12)


def slow_risk(z: list[float]) -> float:
    """Bin by bin, from the definition."""
    alive, total = 1.0, 0.0
    for logit in z:
        alive *= 1 - float(torch.sigmoid(torch.tensor(logit, dtype=torch.float64)))
        total += alive
    return -total


def row(z: list[float]) -> torch.Tensor:
    return torch.tensor([z], dtype=torch.float64)


@settings(deadline=None)
@given(logits)
def test_risk_is_the_definition(z: list[float]) -> None:
    risk = float(survival_risk(row(z)))
    assert abs(risk - slow_risk(z)) < 1e-9
    assert -len(z) <= risk <= 0


@settings(deadline=None)
@given(logits, st.data())
def test_a_higher_hazard_never_lowers_the_risk(z: list[float], data: st.DataObject) -> None:
    bin_ = data.draw(st.integers(0, len(z) - 1))
    higher = [value + 1 if i == bin_ else value for i, value in enumerate(z)]
    assert float(survival_risk(row(higher))) >= float(survival_risk(row(z)))
    assert (risk_slopes(row(z)) >= 0).all()


@settings(deadline=None)
@given(logits)
def test_shares_add_up_to_the_risk_above_zero_logits(z: list[float]) -> None:
    shared = float((risk_slopes(row(z)) * row(z)).sum())
    assert abs(shared - slow_risk(z) + slow_risk([0.0] * len(z))) < 1e-9


@settings(deadline=None)
@given(logits)
def test_survival_falls(z: list[float]) -> None:
    chances = survival_function(row(z))[0]
    assert (chances >= 0).all()
    assert (chances <= 1).all()
    assert (chances.diff() <= 0).all()


@settings(deadline=None)
@given(logits)
def test_gradient_is_autograd(z: list[float]) -> None:
    leaf = row(z).requires_grad_(True)
    (gradient,) = torch.autograd.grad(survival_risk(leaf).sum(), leaf)
    torch.testing.assert_close(risk_gradient(row(z)), gradient, rtol=1e-9, atol=1e-12)


def test_slopes_are_the_mean_of_the_gradient_on_the_path() -> None:
    z, steps = row([2.0, -3.0, 0.5, 6.0]), 20_000
    path = (torch.arange(steps, dtype=torch.float64) + 0.5)[:, None] / steps * z
    torch.testing.assert_close(risk_slopes(z)[0], risk_gradient(path).mean(dim=0), rtol=1e-7, atol=1e-9)


def test_batches_are_rows() -> None:
    z = torch.randn(5, 3)
    for i in range(5):
        torch.testing.assert_close(risk_slopes(z)[i], risk_slopes(z[i : i + 1])[0])
