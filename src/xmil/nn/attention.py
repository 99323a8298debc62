"""Attention: pooling scores over instances, and dot-product self-attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmil.nn.fused import leaves_gpu_idle, normalised_attention

BLOCK_ELEMENTS = 1 << 24  # largest temporary of a blockwise product, in numbers (64 MB in float32)
SMALL_WEIGHTS = (
    1 << 12
)  # up to this size plain products are faster than the fused kernel, and vmap takes them


class AttentionScores(nn.Module):
    """Unnormalised attention of each instance: w tanh(V f), or gated w (tanh(V f) * sigmoid(U f)).

    Ilse et al., "Attention-based Deep Multiple Instance Learning", ICML 2018, arXiv:1802.04712.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        gated: bool,
        branches: int = 1,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.V = nn.Linear(dim, hidden, bias=bias)
        self.U = nn.Linear(dim, hidden, bias=bias) if gated else None
        self.w = nn.Linear(hidden, branches, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        """(b, n, d) to (b, n, branches)."""
        hidden = self.dropout(torch.tanh(self.V(h)))
        if self.U is not None:
            hidden = hidden * self.dropout(torch.sigmoid(self.U(h)))
        scores: Tensor = self.w(hidden)
        return scores


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the instances (dim 1) of (b, n, k), zero outside the mask (b, n)."""
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(-1), float("-inf"))
    return F.softmax(scores, dim=1)


class AttentionMatrix(Protocol):
    """An attention matrix that is not written out; the first `skip` tokens are padding."""

    @property
    def skip(self) -> int:
        """Number of padding tokens in front."""

    def left(self, u: Tensor) -> Tensor:
        """A row vector (b, h, skip + n) times the matrix."""

    def rows(self, block: slice) -> Tensor:
        """Rows of the matrix, (b, h, rows, skip + n)."""

    def row_sums(self) -> Tensor:
        """Sums of the rows, (b, h, skip + n)."""


@dataclass(frozen=True)
class DenseAttention:
    """softmax(q k) of queries and keys (b, h, n, e), worked through in blocks of rows."""

    q: Tensor
    k: Tensor
    skip: int = 0  # no padding

    def left(self, u: Tensor) -> Tensor:
        """A row vector (b, h, n) times the attention matrix, (b, h, n)."""
        total = torch.zeros_like(self.k[..., 0])
        for block in row_blocks(u.shape[-1], width=total.numel()):
            total = total + torch.einsum("bhn,bhnm->bhm", u[..., block], self.rows(block))
        return total

    def rows(self, block: slice) -> Tensor:
        """Rows of the attention matrix, (b, h, rows, n)."""
        return attention_weights(self.q[..., block, :], self.k)

    def row_sums(self) -> Tensor:
        """Sums of the rows of the attention matrix, (b, h, n)."""
        return torch.ones_like(self.q[..., 0])


class SelfAttention(nn.Module):
    """What Nyström and dot-product attention share: the projections and the residual convolution.

    Queries, keys and values are projected one by one, so that relevance, which goes through the values
    alone, costs a third of a gradient.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int = 8,
        residual_kernel: int | None = 33,
        bias: bool = True,
        dropout: float = 0.0,
        head_dim: int | None = None,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        inner = heads * (head_dim or dim // heads)
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * inner, bias=qkv_bias)
        self.to_out = nn.Sequential(nn.Linear(inner, dim, bias=bias), nn.Dropout(dropout))
        self.res_conv = residual_convolution(heads, residual_kernel)

    def project(self, x: Tensor, part: int) -> Tensor:
        """Queries (0), keys (1) or values (2) of tokens: (b, n, d) to (b, h, n, e)."""
        weight = self.to_qkv.weight.chunk(3)[part]
        bias = None if self.to_qkv.bias is None else self.to_qkv.bias.chunk(3)[part]
        heads: Tensor = F.linear(x, weight, bias).unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)

    def attention(self, x: Tensor, rows: int | None = None) -> AttentionMatrix:
        """The attention matrix that a forward pass over x uses, or its first rows."""
        raise NotImplementedError

    def finish(self, out: Tensor, v: Tensor) -> Tensor:
        """Add the residual convolution of the values, join the heads and project: (b, n, d).

        `out` may hold the first rows only.
        """
        if self.res_conv is not None:
            rows = out.shape[2]
            middle = int(self.res_conv.kernel_size[0]) // 2
            near = v[:, :, : rows + middle]
            reach = min(middle, near.shape[2] - 1)  # of a short sequence the outer weights meet padding only
            kernel = self.res_conv.weight[:, :, middle - reach : middle + reach + 1]
            out = out + F.conv2d(near, kernel, padding=(reach, 0), groups=self.heads)[:, :, :rows]
        joined: Tensor = self.to_out(out.transpose(1, 2).flatten(2))
        return joined


class DotProductAttention(SelfAttention):
    """Multi-head dot-product self-attention."""

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        """(b, n, d) to (b, n, d), or to its first rows."""
        v = self.project(x, 2)
        out = attend(self.project(x[:, :rows], 0), self.project(x, 1), v)
        return self.finish(out, v)

    def attention(self, x: Tensor, rows: int | None = None) -> DenseAttention:
        """The attention matrix over x, or its first rows."""
        return DenseAttention(self.project(x[:, :rows], 0), self.project(x, 1))


def residual_convolution(heads: int, kernel: int | None) -> nn.Conv2d | None:
    """Depth-wise convolution along the sequence, one kernel per head."""
    if kernel is None:
        return None
    return nn.Conv2d(heads, heads, (kernel, 1), padding=(kernel // 2, 0), groups=heads, bias=False)


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k / sqrt(e) + bias) over the keys."""
    similarity = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return F.softmax(similarity if bias is None else similarity + bias, dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k / sqrt(e) + bias) v; small weight matrices are built, large ones never."""
    if q.shape[-2] * k.shape[-2] <= SMALL_WEIGHTS:
        return attention_weights(q, k, bias) @ v
    if bias is None and leaves_gpu_idle(q, k, v):
        found = normalised_attention(q, k, v, None, scale=q.shape[-1] ** -0.5)
        if found is not None:
            return found[0]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def row_blocks(n: int, *, width: int) -> Iterator[slice]:
    """Slices of range(n) whose temporaries of `width` numbers per row stay small."""
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    return (slice(start, start + step) for start in range(0, n, step))
