"""Values of the bag that leave torch come back as cuts; the model's own constants stay bias."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lrp.test_rules import closes, normal, relevance_of
from xmil.lrp import trace


@pytest.mark.parametrize(
    "leave",
    [
        lambda x: 5 * x.mean().item(),
        lambda x: math.exp(float(x.detach().mean())),
        lambda x: sum(x.mean(0).tolist()) / 7,
        lambda x: 5 * x.detach().numpy().mean(),
        lambda x: np.tanh(np.asarray(x.detach().float()).mean()),
        lambda x: 5 * torch.from_numpy(x.detach().numpy()).mean(),
        lambda x: torch.from_numpy(np.exp(x.detach().numpy())).mean(),
        lambda x: torch.tensor(np.exp(x.detach().numpy())).mean(),
        lambda x: torch.tensor(5 * x.mean().item(), dtype=x.dtype),
        lambda x: torch.ones(3, dtype=x.dtype) * math.exp(x.mean().item()),
        lambda x: x.new_tensor(np.exp(x.detach().numpy())).mean(),
    ],
)
def test_what_left_torch_is_cut(leave: Callable[[Tensor], Tensor | float]) -> None:
    x, g = normal(4, 3), normal(4, 3)
    found = relevance_of(lambda v: v * 2 + leave(v), x, seed=g)
    assert found.shares["cut"] == pytest.approx(float((g * leave(x)).sum()))
    assert found.shares["bias"] == 0
    assert closes(found)


class Logs(torch.nn.Module):
    """Reads a number for its log, and adds only constants of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3).double().requires_grad_(False)
        self.plain, self.shift, self.log = normal(3), 0.37, 0.0

    def forward(self, x: Tensor) -> Tensor:
        made = torch.full((3,), 0.25, dtype=x.dtype)
        self.log = math.exp(x.mean().item()) + float(x.detach().numpy().sum())
        shifts = torch.zeros_like(x) + self.layer.bias * 0.5 + made.to(x) + self.plain
        return self.layer(x) + shifts + self.shift + 0.75


def test_the_models_own_constants_stay_bias() -> None:
    net, x = Logs(), normal(4, 3)
    found = trace(lambda v: net(v).reshape(1, -1), x, module=net).relevance(lambda logits: logits.sum(-1))
    own = net.layer.bias * 1.5 + 0.25 + net.plain + net.shift + 0.75
    assert found.shares["cut"] == 0
    assert found.shares["bias"] == pytest.approx(4 * float(own.sum()))
