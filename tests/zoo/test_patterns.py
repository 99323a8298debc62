"""Operation patterns of the field's models: explained with a closed account, or refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import xmil
from tests.zoo.patterns import (
    PATTERNS,
    RANDOM,
    WIDTH,
    CustomFunction,
    Doubled,
    LossInForward,
    Probabilities,
    SoftmaxValues,
    logits_of,
)
from xmil.core.errors import UnsupportedError
from xmil.lrp import FUNCTION_RULES, register_function

X = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", PATTERNS)
def test_the_account_closes(name: str) -> None:
    for target in (0, 1):
        e = xmil.explain(PATTERNS[name](), X, target=target, preset="exact", forward=logits_of)
        assert e.audit is not None
        assert abs(e.audit.other) <= 1e-4 * abs(e.output)
        assert np.abs(e.scores).max() > 0


@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in RANDOM])
def test_values_are_the_models_own(name: str) -> None:
    net = PATTERNS[name]().eval()
    e = xmil.explain(net, X, target=0, preset="exact", forward=logits_of)
    with torch.no_grad():
        np.testing.assert_allclose(e.logits, logits_of(net, X[None])[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", RANDOM)
def test_chance_is_said(name: str) -> None:
    e = xmil.explain(PATTERNS[name](), X, target=0, preset="exact")
    assert any("random in eval mode" in line for line in e.warnings)


def test_logits_are_found_beside_a_loss() -> None:
    e = xmil.explain(LossInForward(), X, target=0, preset="exact")
    assert e.audit is not None
    assert abs(e.audit.other) <= 1e-4 * abs(e.output)


def test_a_softmax_as_a_value_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="No relevance"):
        xmil.explain(SoftmaxValues(), X, target=0, preset="exact")


def test_probabilities_are_not_taken_for_logits() -> None:
    with pytest.raises(xmil.XmilError, match="probabilit"):
        xmil.explain(Probabilities(), X, target=0, preset="exact")


def test_a_custom_function_runs_once_it_has_a_rule() -> None:
    name = f"{Doubled.__module__}.Doubled"
    with pytest.raises(UnsupportedError, match=r"patterns\.Doubled"):
        xmil.explain(CustomFunction(), X, target=0, preset="exact")
    register_function(name)(lambda engine, node, gradients, upstream: gradients)  # linear: its own backward
    try:
        e = xmil.explain(CustomFunction(), X, target=0, preset="exact")
    finally:
        del FUNCTION_RULES._entries[name]
    assert e.audit is not None
    assert abs(e.audit.other) <= 1e-4 * abs(e.output)
