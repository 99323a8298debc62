"""Outputs of a bag without each of its instances: closed forms where pooling allows, else one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.methods.network import Network
from xmil.models import PooledMIL
from xmil.models.pooling import MaxPool

DOMINANT = 1e-9  # below this remaining weight the closed form has lost its digits

SMALL = 200  # bags up to this size are run without each instance plainly: the same bits as doing it by hand


def logits_without_each(network: Network, x: Tensor, embedded: Tensor) -> Tensor:
    """Logits (n, c) of the n bags that lack one instance of x (1, n, d), embedded as (1, n, e).

    A bag that loses its only instance is a zero vector.
    """
    if x.shape[1] == 1:
        return network(torch.zeros_like(x))
    if x.shape[1] <= SMALL:
        return torch.cat([network(torch.cat([x[:, :k], x[:, k + 1 :]], dim=1)) for k in range(x.shape[1])])
    h = embedded[0]
    if isinstance(network.model, PooledMIL):
        return _pooled_without_each(network, network.model, h)
    if isinstance(network.model, MaxPool):
        return _max_without_each(network.model, h)
    return without(network, h, torch.arange(len(h), device=h.device))


def without(network: Network, h: Tensor, removed: Tensor) -> Tensor:
    """Logits of the embedded bag without each of the given instances, computed bag by bag."""
    n = len(h)
    others = torch.arange(n - 1, device=h.device)
    rows = others + (others >= removed.unsqueeze(1))  # (r, n - 1): all but the removed, in order
    return network.aggregate_batches(len(removed), n - 1, lambda batch: h[rows[batch]])


def _pooled_without_each(network: Network, model: PooledMIL, h: Tensor) -> Tensor:
    """A weighted mean loses a term and is normalised again: (z - a_k h_k) / (1 - a_k), in float64."""
    a = F.softmax(model.attend(h.unsqueeze(0))[0].double(), dim=0)  # (n, k)
    z = a.T @ h.double()  # (k, e)
    rest = 1.0 - a
    parts = []
    for batch in network.batches(len(h), a.shape[1]):
        reduced = (z - a[batch].unsqueeze(-1) * h[batch].double().unsqueeze(1)) / rest[batch].unsqueeze(-1)
        parts.append(model.head(reduced.to(h.dtype)))
    logits = torch.cat(parts)
    dominant = (rest < DOMINANT).any(dim=1).nonzero().squeeze(1)
    if len(dominant):
        logits[dominant] = without(network, h, dominant)
    return logits


def _max_without_each(model: MaxPool, h: Tensor) -> Tensor:
    """Only the instance that holds a feature's maximum changes it, to the second largest value."""
    top, owner = h.topk(2, dim=0)  # (2, e)
    logits = model.head(top[0].unsqueeze(0)).repeat(len(h), 1)
    for k in owner[0].unique():
        logits[k] = model.head(torch.where(owner[0] == k, top[1], top[0]).unsqueeze(0))[0]
    return logits
