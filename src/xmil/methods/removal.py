"""Outputs of a bag without each of its instances: closed forms where pooling allows, else one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from xmil.methods.network import Network

SMALL = 200  # bags up to this size are run without each instance plainly: the same bits as doing it by hand


def logits_without_each(network: Network, x: Tensor, embedded: Tensor) -> Tensor:
    """Logits (n, c) of the n bags that lack one instance of x (1, n, d), embedded as (1, n, e).

    A bag that loses its only instance is a zero vector. Of several bags (b, n, d): (b n, c).
    """
    if x.shape[1] == 1:
        return network(torch.zeros_like(x))
    if len(x) > 1:
        rests = [torch.cat([embedded[:, :k], embedded[:, k + 1 :]], dim=1) for k in range(x.shape[1])]
        return torch.stack([network.aggregate(rest) for rest in rests], dim=1).flatten(0, 1)
    if x.shape[1] <= SMALL:
        rows = torch.arange(x.shape[1], device=x.device)
        return torch.cat([network(x[:, rest], rest.unsqueeze(0)) for k in rows for rest in [rows[rows != k]]])
    h = embedded[0]
    every = torch.arange(len(h), device=h.device)
    if network.model is None:
        return without(network, h, every)
    parts = [network.model.without_each(h, every[batch]) for batch in network.batches(len(h), 1)]
    closed = [part for part in parts if part is not None]
    if not closed:
        return without(network, h, every)
    logits = torch.cat(closed)
    lost = logits.isnan().any(dim=1).nonzero().squeeze(1)
    if len(lost):
        logits[lost] = without(network, h, lost)
    return logits


def without(network: Network, h: Tensor, removed: Tensor) -> Tensor:
    """Logits of the embedded bag without each of the given instances, computed bag by bag."""
    n = len(h)
    others = torch.arange(n - 1, device=h.device)
    batches = network.batches(len(removed), n - 1)
    rows = (others + (others >= removed[batch].unsqueeze(1)) for batch in batches)  # all but one, in order
    return torch.cat([network.sub(h.unsqueeze(0), part) for part in rows])
