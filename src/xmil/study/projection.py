"""Bags behind the first linear layer, where explaining costs less and instances score the same.

With u = W x, relevance and gradient x input reach an instance as sum_j u_j delta_j = sum_d x_d (W^T delta)_d:
the sum over features is the same before and behind W. Many classes need no pass through the widest layer.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmil.lrp import Composite
from xmil.models import MILModel
from xmil.models.attnmil import AttnMIL
from xmil.models.transmil import TransMIL

FIRST = "instance.0.0"


def project(model: MILModel, x: Tensor, rules: Composite | None = None) -> tuple[MILModel, Tensor]:
    """A model and bags (b, n, e) whose instances score as those of the given ones, or these where none are.

    The gamma rule tells positive weights from negative ones, so that it has to see them.
    """
    gamma = 0.0 if rules is None else rules.rule_for(f"{FIRST}.weight").gamma
    if not isinstance(model, AttnMIL | TransMIL) or gamma:
        return model, x
    first = model.get_submodule(FIRST)
    if not isinstance(first, nn.Linear) or first.out_features >= first.in_features:
        return model, x
    narrow = copy.deepcopy(model)
    narrow.get_submodule(FIRST.rpartition(".")[0])[0] = _identity(first)  # type: ignore[operator]
    with torch.no_grad():
        return narrow, F.linear(x, first.weight)


def _identity(layer: nn.Linear) -> nn.Linear:
    """The layer with its bias, for inputs that its weight has seen."""
    unit = nn.Linear(layer.out_features, layer.out_features, bias=layer.bias is not None)
    unit.weight.data = torch.eye(layer.out_features).to(layer.weight)
    if layer.bias is not None:
        unit.bias.data = layer.bias.detach().clone()
    return unit
