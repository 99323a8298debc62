"""Equal instances get equal scores, however a model writes its maximum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lrp.test_rules import TIGHT, closes, normal, relevance_of


@pytest.mark.parametrize(
    "pick",
    [
        lambda x: x.max(dim=0)[0],
        lambda x: torch.max(x, 0, keepdim=True).values,
        lambda x: -(-x).min(0).values,
        lambda x: x.max(dim=0).values.mul_(2).div_(2),
        lambda x: x.topk(1, dim=0).values,
        lambda x: x.sort(dim=0, descending=True).values[0],
        lambda x: x.kthvalue(len(x), 0).values,
        lambda x: F.adaptive_max_pool1d(x.T, 1),
        lambda x: F.adaptive_max_pool1d(x.T, 1, return_indices=True)[0],
    ],
)
def test_ties_share_as_amax_does(pick: Callable[[Tensor], Tensor]) -> None:
    x, g = normal(6, 3), normal(3)
    x[1] = 5 + torch.arange(3)
    x[4], x[5] = x[1], x[1]
    expected = torch.zeros_like(x)
    expected[[1, 4, 5]] = g * x[1] / 3
    found = relevance_of(pick, x, seed=g)
    torch.testing.assert_close(found.input.features, expected, **TIGHT)
    assert closes(found)


def test_ties_in_the_middle_of_a_ranking() -> None:
    x = torch.tensor([2.0, 1.0, 3.0, 2.0, 2.0], dtype=torch.float64)
    g = torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64)  # to 3, 2 and 2: one of the three is left out
    found = relevance_of(lambda v: v.topk(3).values, x, seed=g)
    each = 2.0 * (0.5 + 0.7) / 3
    torch.testing.assert_close(found.input.features, x.new_tensor([each, 0, 3 * 0.3, each, each]), **TIGHT)
