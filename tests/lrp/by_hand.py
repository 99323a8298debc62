"""LRP written straight from its formulas: relevance R in, relevance R out, no gradients, no engine."""

from __future__ import annotations

import torch
from torch import Tensor


def sign(z: Tensor) -> Tensor:
    return torch.where(z >= 0, 1.0, -1.0).to(z)


def linear(
    R: Tensor,
    a: Tensor,
    w: Tensor,
    b: Tensor | None,
    *,
    eps: float = 0.0,
    gamma: float = 0.0,
    absorb: bool = True,
) -> Tensor:
    """R_i = sum_j a_i rho(w_ij) / (eps sign + sum_i' a_i' rho(w_i'j) [+ rho(b_j)]) R_j for one vector."""
    rho = w + gamma * w.clamp(min=0)  # (j, i)
    R_in = torch.zeros_like(a)
    for j in range(w.shape[0]):
        z = sum(a[i] * rho[j, i] for i in range(len(a)))
        if b is not None and absorb:
            z = z + b[j] + gamma * b[j].clamp(min=0)
        z = z + eps * sign(z)
        for i in range(len(a)):
            if R[j] != 0:
                R_in[i] += a[i] * rho[j, i] / z * R[j]
    return R_in


def dense(R: Tensor, contributions: Tensor, bias: Tensor | None = None) -> Tensor:
    """Share R_j in proportion to contributions q_ij (i, j); a bias takes part and keeps its share."""
    total = contributions.sum(dim=0) + (0 if bias is None else bias)
    safe = torch.where(total == 0, torch.ones_like(total), total)
    return (contributions / safe * R).sum(dim=1)


def rows(R: Tensor, a: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """The epsilon rule with eps = 0 and an absorbing bias for each row of (n, i) by itself."""
    return torch.stack([dense(R[k], (a[k] * w).T, b) for k in range(len(a))])


def attention(R: Tensor, z: Tensor, p: Tensor) -> Tensor:
    """AH-rule: R(z_kd) = sum_j z_kd p_jk / sum_i z_id p_ji R(y_jd), with y_j = sum_k p_jk z_k."""
    out = torch.zeros_like(z)
    for d in range(z.shape[1]):
        out[:, d] = dense(R[:, d], (p * z[:, d]).T)
    return out


def layer_norm(R: Tensor, z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LN-rule over the features of each token: R(z_d) = sum_j z_d (delta_dj - 1/N) / ... R(y_j)."""
    n = z.shape[-1]
    out = torch.zeros_like(z)
    for k in range(len(z)):
        std = torch.sqrt(z[k].var(unbiased=False) + eps)
        q = z[k].unsqueeze(1) * (torch.eye(n, dtype=z.dtype) - 1 / n) / std * weight  # (d, j)
        out[k] = dense(R[k], q, bias)
    return out
