"""The naive way, written from the formulas: dense attention matrices, loops over instances."""

from __future__ import annotations

import torch
from torch import Tensor

from xmil.models import TransMIL
from xmil.nn import NystromAttention


def dense_attention(attn: NystromAttention, x: Tensor) -> Tensor:
    """The n x n attention matrices (b, h, n, n) of a layer, written out."""
    factors = attn.attention(x)
    return factors.rows(slice(factors.skip, factors.skip + x.shape[1]))[..., factors.skip :]


def dense_relevance(model: TransMIL, x: Tensor, c: int) -> Tensor:
    """LRP of a TransMIL with constant dense attention matrices, biases absorbing: gradient times input."""
    x = x.detach().requires_grad_(True)
    h = model.embed(x)
    edge = int((h.shape[1] - 1) ** 0.5) + 1 if h.shape[1] > 1 else 1
    h = torch.cat([h, h[:, : edge * edge - h.shape[1]]], dim=1)
    assert model.class_token is not None
    assert model.ppeg is not None
    h = torch.cat([model.class_token, h], dim=1)
    for i, layer in enumerate(model.layers):
        normed = _layer_norm(layer.norm, h)
        attn = layer.attn
        with torch.no_grad():
            weights = dense_attention(attn, normed)
        v = attn.project(normed, 2)
        h = h + attn.finish(weights @ v, v)
        if i == 0:
            h = torch.cat([h[:, :1], model.ppeg(h[:, 1:], edge)], dim=1)
    logits = model.classifier(_layer_norm(model.norm, h)[:, 0])
    (gradient,) = torch.autograd.grad(logits[0, c], x)
    return (gradient * x).sum(dim=-1)[0].detach()


def _layer_norm(norm: torch.nn.LayerNorm, x: Tensor) -> Tensor:
    std = torch.sqrt(x.var(dim=-1, unbiased=False, keepdim=True) + norm.eps).detach()
    return (x - x.mean(dim=-1, keepdim=True)) / std * norm.weight + norm.bias


def looped_singles(model: torch.nn.Module, x: Tensor) -> Tensor:
    """Logits (n, c) of each instance alone, one forward pass each."""
    with torch.no_grad():
        return torch.cat([model(x[:, k : k + 1]) for k in range(x.shape[1])])
