"""Activations written by hand have the account of torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lrp.test_rules import TIGHT, normal, relevance_of

ROOT = math.sqrt(2 / math.pi)
GELU = partial(F.gelu, approximate="tanh")


def _logistic(z: Tensor) -> Tensor:
    e = z.exp()
    return e / (1 + e)


@pytest.mark.parametrize(
    ("by_hand", "named"),
    [
        (lambda z: 0.5 * z * (1 + torch.tanh(ROOT * (z + 0.044715 * z**3))), GELU),
        (lambda z: z * (0.5 + torch.tanh(ROOT * (z + 0.044715 * z.pow(3))) * 0.5), GELU),
        (lambda z: z * 0.5 * (1 + torch.erf(z / 2**0.5)), F.gelu),
        (lambda z: z * torch.erfc(-z / 2**0.5) / 2, F.gelu),
        (lambda z: z * torch.special.ndtr(z), F.gelu),
        (lambda z: z.exp() / (1 + z.exp()), torch.sigmoid),
        (_logistic, torch.sigmoid),
        (lambda z: 1 / (1 + torch.exp(-z)), torch.sigmoid),
        (lambda z: (1 + torch.exp(-z)).reciprocal(), torch.sigmoid),
        (lambda z: z * _logistic(z), F.silu),
    ],
)
def test_by_hand_as_torch_has_it(
    by_hand: Callable[[Tensor], Tensor], named: Callable[[Tensor], Tensor]
) -> None:
    x, g = normal(4, 3), normal(4, 3)
    found, expected = relevance_of(by_hand, x, seed=g), relevance_of(named, x, seed=g)
    torch.testing.assert_close(found.input.features, expected.input.features, **TIGHT)
    assert found.shares == pytest.approx(expected.shares)


def test_a_tanh_that_changes_sign_is_no_gate() -> None:
    x, g = normal(4, 3), normal(4, 3)
    found = relevance_of(lambda z: z * (0.5 + torch.tanh(z.flip(0))), x, seed=g)
    u = torch.tanh(x.flip(0))
    expected = g * x * (0.5 + u) / 2 + (g * x * u / 2).flip(0)
    torch.testing.assert_close(found.input.features, expected, **TIGHT)
