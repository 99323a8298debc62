"""Nyström attention in factored form.

Xiong et al., "Nyströmformer", AAAI 2021, arXiv:2102.03902; as used by TransMIL, arXiv:2106.00908.

The n x n attention matrix is softmax(q k_l) @ pinv(softmax(q_l k_l)) @ softmax(q_l k): a product of thin
factors over m landmarks. Only the factors' inputs are kept; everything else is linear in n.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from xmil.nn.attention import SelfAttention, attend, attention_weights, row_blocks

TINY = 4


@dataclass(frozen=True)
class NystromFactors:
    """softmax(q keys1 + bias1) @ core @ softmax(landmarks keys3 + bias3).

    Shapes: q (b, h, n, e), keys1 and landmarks (b, h, m, e), core (b, h, m, m), keys3 (b, h, skip + n, e).
    The first `skip` keys are the zero tokens that pad the sequence; their queries are zero as well. The
    biases are the logarithms of the number of equal tokens that a key represents, or None for one each.
    """

    q: Tensor
    keys1: Tensor
    core: Tensor
    landmarks: Tensor
    keys3: Tensor
    skip: int
    bias1: Tensor | None = None
    bias3: Tensor | None = None

    def __matmul__(self, v: Tensor) -> Tensor:
        """The attention matrix times values (b, h, skip + n, e), without an n x m matrix in memory."""
        gathered = attend(self.landmarks, self.keys3, v, self.bias3)
        return attend(self.q, self.keys1, self.core @ gathered, self.bias1)

    def left(self, u: Tensor) -> Tensor:
        """A row vector over the tokens with queries, padding first (b, h, skip + rows), times the matrix."""
        m = self.keys1.shape[-2]
        spread = (
            u[..., : self.skip].sum(dim=-1, keepdim=True) * self._first(self.q[..., :1, :] * 0)[..., 0, :]
        )
        real = u[..., self.skip :]
        for block in row_blocks(real.shape[-1], width=m * u.shape[0] * u.shape[1]):
            spread = spread + torch.einsum(
                "bhn,bhnm->bhm", real[..., block], self._first(self.q[..., block, :])
            )
        weights = (spread.unsqueeze(-2) @ self.core).squeeze(-2)
        total = u.new_zeros(*u.shape[:2], self.keys3.shape[-2])
        for block in row_blocks(m, width=total.numel()):
            third = attention_weights(self.landmarks[..., block, :], self.keys3, self.bias3)
            total = total + torch.einsum("bhm,bhmn->bhn", weights[..., block], third)
        return total

    def rows(self, block: slice) -> Tensor:
        """Rows of the attention matrix over all tokens, padding first: (b, h, rows, skip + n)."""
        start, stop, _ = block.indices(self.skip + self.q.shape[-2])
        padding = self.q[..., :1, :].expand(-1, -1, max(0, min(stop, self.skip) - start), -1) * 0
        real = self.q[..., max(0, start - self.skip) : max(0, stop - self.skip), :]
        first = self._first(torch.cat([padding, real], dim=-2))
        return (first @ self.core) @ attention_weights(self.landmarks, self.keys3, self.bias3)

    def row_sums(self) -> Tensor:
        """Sums of the rows of the attention matrix, padding first: (b, h, skip + n)."""
        inner = self.core.sum(dim=-1, keepdim=True)  # the third factor's rows sum to one
        real = attend(self.q, self.keys1, inner, self.bias1)
        padding = self._first(self.q[..., :1, :] * 0) @ inner
        return torch.cat([padding.expand(-1, -1, self.skip, -1), real], dim=-2).squeeze(-1)

    def _first(self, q: Tensor) -> Tensor:
        return attention_weights(q, self.keys1, self.bias1)


class NystromAttention(SelfAttention):
    """Multi-head Nyström self-attention with a depth-wise residual convolution on the values."""

    def __init__(self, dim: int, *, landmarks: int = 128, pinv_iterations: int = 6, **shared: Any) -> None:
        super().__init__(dim, **shared)
        self.n_landmarks = landmarks
        self.pinv_iterations = pinv_iterations

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        """(b, n, d) to (b, n, d), or to its first rows."""
        v = self.project(x, 2)
        factors = self.attention(x, rows)
        out = factors @ F.pad(v, (0, 0, factors.skip, 0))  # padding tokens have no bias: their values are 0
        return self.finish(out, v)

    def attention(self, x: Tensor, rows: int | None = None) -> NystromFactors:
        """The attention matrix over x as factors, or its first rows.

        Torch's function modes see one operation: LRP treats all of it as a constant.
        """
        if has_torch_function((x,)):
            return handle_torch_function(nystrom_factors, (x,), x, self, rows)
        n, m = x.shape[1], self.n_landmarks
        q, k = self.project(x[:, :rows], 0), self.project(x, 1)
        if n < m:
            all_q = q if q.shape[-2] == n else self.project(x, 0)
            return _collapsed_factors(q, all_q, k, padding=m - n, iterations=self.pinv_iterations)
        padding = -n % m
        keys = F.pad(k, (0, 0, padding, 0))  # zeros in front, as published
        groups: Tensor = F.pad(x, (0, 0, padding, 0)).unflatten(1, (m, -1))
        means = groups.mean(dim=2)  # (b, m, d)
        q_l, k_l = (
            self.project(means, 0),
            self.project(means, 1),
        )  # projections are linear, so project the means
        a = attention_weights(q_l, k_l)
        core = iterative_pinv(a, column_sums=a.sum(dim=-2), iterations=self.pinv_iterations)
        return NystromFactors(q, k_l, core, q_l, keys, skip=padding)


def nystrom_factors(x: Tensor, attention: NystromAttention, rows: int | None = None) -> NystromFactors:
    """The attention matrix of a layer over x; function modes know the operation by this name."""
    return attention.attention(x, rows)


def iterative_pinv(a: Tensor, *, column_sums: Tensor, iterations: int) -> Tensor:
    """Pseudo-inverse of a non-negative (b, h, m, m) with rows summing to one, by the paper's iteration.

    The start is the transpose over the largest row and column sum of **one bag**, so that a bag does not
    depend on its batch mates.
    """
    scale = column_sums.amax(dim=(1, 2), keepdim=True).unsqueeze(-1)  # row sums are 1
    z = a.transpose(-1, -2) / scale
    if a.shape[-1] <= TINY:  # many tiny matrices: batch last, so that each step runs along it
        a, z = a.permute(2, 3, 0, 1).contiguous(), z.permute(2, 3, 0, 1).contiguous()
        return _iterate(a, z, _entrywise_product, iterations).permute(2, 3, 0, 1)
    return _iterate(a, z, torch.matmul, iterations)


def _iterate(a: Tensor, z: Tensor, product: Callable[[Tensor, Tensor], Tensor], iterations: int) -> Tensor:
    eye = torch.eye(a.shape[-1] if product is torch.matmul else len(a), dtype=a.dtype, device=a.device)
    eye = eye if product is torch.matmul else eye[..., None, None]
    for _ in range(iterations):
        az = product(a, z)
        z = 0.25 * product(z, 13 * eye - product(az, 15 * eye - product(az, 7 * eye - az)))
    return z


def _entrywise_product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product over the first two dimensions."""
    return (a.unsqueeze(2) * b.unsqueeze(0)).sum(dim=1)


def _collapsed_factors(
    q: Tensor, all_q: Tensor, k: Tensor, *, padding: int, iterations: int
) -> NystromFactors:
    """The factors of a sequence shorter than the landmarks, where each token is its own landmark.

    The zero tokens in front are interchangeable, and attention maps every vector that sums to zero over
    them to zero. So the m x m problem is equivalent to one over n + 1 token classes, of which the first
    represents all zero tokens. The orthonormal basis (1/sqrt(count) on each class) preserves transposes,
    products and the identity, and so the pseudo-inverse iteration.
    """
    counts = torch.ones(k.shape[-2] + 1, dtype=q.dtype, device=q.device)
    counts[0] = padding
    q_l, k_l = F.pad(all_q, (0, 0, 1, 0)), F.pad(k, (0, 0, 1, 0))
    bias = counts.log().unsqueeze(0)
    p = attention_weights(q_l, k_l, bias)  # p_ij = count_j * a_ij
    root = counts.sqrt()
    a = p * root.unsqueeze(-1) / root
    column_sums = (p * counts.unsqueeze(-1)).sum(dim=-2) / counts
    z = iterative_pinv(a, column_sums=column_sums, iterations=iterations)
    core = z / root.unsqueeze(-1) * root
    return NystromFactors(q, k_l, core, q_l, k_l, skip=1, bias1=bias, bias3=bias)


class PPEG(nn.Module):
    """Identity plus depth-wise convolutions of three sizes; Shao et al. 2021, arXiv:2106.00908."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj, self.proj1, self.proj2 = (
            nn.Conv2d(dim, dim, size, padding=size // 2, groups=dim) for size in (7, 5, 3)
        )

    def forward(self, tokens: Tensor, edge: int) -> Tensor:
        """Instance tokens (b, edge * edge, d), without the class token, to the same shape."""
        b, _, d = tokens.shape
        grid = tokens.transpose(1, 2).contiguous().view(b, d, edge, edge)  # far faster than channels-last
        encoded = (
            grid + _convolve(self.proj, grid) + _convolve(self.proj1, grid) + _convolve(self.proj2, grid)
        )
        return encoded.flatten(2).transpose(1, 2)


def _convolve(conv: nn.Conv2d, grid: Tensor) -> Tensor:
    """Convolve without the outer weights, which only meet padding on a small grid."""
    middle = int(conv.kernel_size[0]) // 2
    reach = min(middle, grid.shape[-1] - 1)
    near = slice(middle - reach, middle + reach + 1)
    return F.conv2d(grid, conv.weight[:, :, near, near], conv.bias, padding=reach, groups=conv.groups)


def square_edge(n: int) -> int:
    """Edge of the smallest square that holds n instances.

    >>> [square_edge(n) for n in (1, 2, 4, 5)]
    [1, 2, 2, 3]
    """
    return math.isqrt(n - 1) + 1
