"""v(S): the outputs of parts of a bag, batched, with the closed forms of models that pool."""

from __future__ import annotations

import torch
from torch import Tensor

from xmil.models import AddMIL, MaxPool, PooledMIL
from xmil.network import Network
from xmil.subsets.bounds import Bound, bound_of
from xmil.subsets.closed_forms import WIDEST, AdditiveSubsets, MaxSubsets, PooledSubsets
from xmil.subsets.engine import MODES, Subsets, check_finite, memory_budget

CLOSED_FORMS = {
    "softmax": (PooledMIL, PooledSubsets),
    "max": (MaxPool, MaxSubsets),
    "additive": (AddMIL, AdditiveSubsets),
}

__all__ = ["MODES", "Bound", "Subsets", "bound_of", "check_finite", "memory_budget", "open_subsets"]


@torch.no_grad()
def open_subsets(network: Network, x: Tensor, fill: Tensor | None = None) -> Subsets:
    """Compute outputs of parts of a bag (1, n, d), in the fastest exact way for the model's pooling.

    The empty part is n vectors `fill` (d,), zeros by default. Use the result within `torch.no_grad`, and
    within `frozen` if the model may be in training mode.

    >>> import torch, xmil
    >>> network = Network(xmil.create_model("attnmil", in_dim=4, n_classes=2, seed=0))
    >>> with torch.no_grad():
    ...     parts = open_subsets(network, torch.eye(4).unsqueeze(0))
    ...     outputs = parts.run(torch.tensor([[True, False, True, False], [False, False, False, False]]))
    >>> outputs.shape, bool((outputs[1] == parts.empty[0]).all())
    (torch.Size([2, 2]), True)
    """
    kind, closed_form = CLOSED_FORMS.get(getattr(network.model, "pooling", None) or "", (None, Subsets))
    if kind is None or network.takes_companions or not isinstance(network.model, kind):
        return Subsets(network, x, fill)
    parts = closed_form(network, x, fill)
    too_wide = isinstance(parts, PooledSubsets) and not parts.spread < WIDEST
    return Subsets(network, x, fill) if too_wide else parts
