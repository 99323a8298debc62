"""A method: how long each instance's feature vector is."""

from __future__ import annotations

import torch
from torch import Tensor

from xmil.methods import Attribution, Attributions, Question, register_method
from xmil.network import Network


@register_method("lengths", signed=False, cost="1")
@torch.no_grad()
def lengths(network: Network, x: Tensor, question: Question, *, power: float = 1.0) -> Attributions:
    """Lengths of instances, whatever the model says."""
    logits = network(x)
    scores = x[0].norm(dim=1) ** power
    return Attributions(logits, [Attribution(o, float(o(logits)), scores) for o in question.outputs(logits)])
