"""Attention: pooling scores over instances, dot-product self-attention, and its fused kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK_ELEMENTS = 1 << 24  # largest temporary of a blockwise product, in numbers (64 MB in float32)
SMALL_WEIGHTS = 1 << 12  # up to this size plain products beat the fused kernel, and work under vmap


class AttentionScores(nn.Module):
    """Unnormalised attention of each instance: w tanh(V f), or gated w (tanh(V f) * sigmoid(U f)).

    Ilse et al., "Attention-based Deep Multiple Instance Learning", ICML 2018, arXiv:1802.04712.
    """

    def __init__(
        self, dim: int, hidden: int, *, gated: bool, branches: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.V = nn.Linear(dim, hidden)
        self.U = nn.Linear(dim, hidden) if gated else None
        self.w = nn.Linear(hidden, branches)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        """(b, n, d) to (b, n, branches)."""
        hidden = self.dropout(torch.tanh(self.V(h)))
        if self.U is not None:
            hidden = hidden * self.dropout(torch.sigmoid(self.U(h)))
        return self.w(hidden)


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the instances (dim 1) of (b, n, k), zero outside the mask (b, n)."""
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(-1), float("-inf"))
    return F.softmax(scores, dim=1)


@dataclass(frozen=True)
class DenseAttention:
    """softmax(q k) of queries and keys (b, h, n, e), computed in blocks of rows."""

    q: Tensor
    k: Tensor
    skip: int = 0  # padding tokens in front

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
    """The projections and the residual convolution that Nyström and dot-product attention share.

    Queries, keys and values are projected separately: relevance only goes through the values, so it costs a
    third of a gradient.
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
        self.res_conv = None
        if residual_kernel is not None:  # depth-wise along the sequence, one kernel per head
            size, pad = (residual_kernel, 1), (residual_kernel // 2, 0)
            self.res_conv = nn.Conv2d(heads, heads, size, padding=pad, groups=heads, bias=False)

    def project(self, x: Tensor, part: int) -> Tensor:
        """Queries (0), keys (1) or values (2) of tokens: (b, n, d) to (b, h, n, e)."""
        weight = self.to_qkv.weight.chunk(3)[part]
        bias = None if self.to_qkv.bias is None else self.to_qkv.bias.chunk(3)[part]
        return F.linear(x, weight, bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attention(self, x: Tensor, rows: int | None = None) -> Any:
        """The attention matrix over x, or its first rows, in implicit form; see `DenseAttention`."""
        raise NotImplementedError

    def finish(self, out: Tensor, v: Tensor) -> Tensor:
        """Add the residual convolution of the values, join the heads and project: (b, n, d).

        `out` may hold the first rows only.
        """
        if self.res_conv is not None:
            rows = out.shape[2]
            middle = int(self.res_conv.kernel_size[0]) // 2
            first = v[:, :, : rows + middle]
            reach = min(middle, first.shape[2] - 1)  # in a short sequence the outer weights only meet padding
            kernel = self.res_conv.weight[:, :, middle - reach : middle + reach + 1]
            out = out + F.conv2d(first, kernel, padding=(reach, 0), groups=self.heads)[:, :, :rows]
        return self.to_out(out.transpose(1, 2).flatten(2))


class DotProductAttention(SelfAttention):
    """Multi-head dot-product self-attention."""

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        """(b, n, d) to (b, n, d), or to its first rows."""
        v = self.project(x, 2)
        return self.finish(attend(self.project(x[:, :rows], 0), self.project(x, 1), v), v)

    def attention(self, x: Tensor, rows: int | None = None) -> DenseAttention:
        """The attention matrix over x, or its first rows."""
        return DenseAttention(self.project(x[:, :rows], 0), self.project(x, 1))


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k / sqrt(e) + bias) over the keys."""
    similarity = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return F.softmax(similarity if bias is None else similarity + bias, dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k / sqrt(e) + bias) v; builds the weight matrix only if it is small."""
    if q.shape[-2] * k.shape[-2] <= SMALL_WEIGHTS:
        return attention_weights(q, k, bias) @ v
    if bias is None and leaves_gpu_idle(q, k, v):
        fused = normalised_attention(q, k, v, None, scale=q.shape[-1] ** -0.5)
        if fused is not None:
            return fused[0]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def row_blocks(n: int, *, width: int, most: int | None = None) -> Iterator[slice]:
    """Slices of range(n) with at most `most` numbers each, at `width` numbers per row."""
    step = max(1, (most or BLOCK_ELEMENTS) // max(1, width))
    return (slice(start, start + step) for start in range(0, n, step))


class DistanceAttention(SelfAttention):
    """(softmax(q k) - slope * distance) v, with one slope per head.

    The weights do not sum to one and can be negative. Both parts are linear in v: the first is an attention,
    the second runs in blocks of rows.
    """

    def __init__(self, dim: int, **shared: Any) -> None:
        super().__init__(dim, **shared)
        self.slopes = nn.Parameter(torch.rand(self.heads))

    def forward(self, x: Tensor, rows: int | None = None, *, places: Tensor) -> Tensor:
        """(b, n, d) at positions (b, n, 2) to (b, n, d), or to its first rows."""
        v = self.project(x, 2)
        out = attend(self.project(x[:, :rows], 0), self.project(x, 1), v)
        ends = places[:, :rows]
        by_distance = [
            torch.cdist(ends[:, block], places).unsqueeze(1) @ v  # (b, h, rows, e)
            for block in row_blocks(ends.shape[1], width=places.shape[0] * places.shape[1])
        ]
        return self.finish(out - self.slopes[:, None, None] * torch.cat(by_distance, dim=2), v)


# Attention together with its normalisers, by torch's fused kernels, which never build the weight matrix.
# Given the normalisers, a product with the transposed weights is an attention too, with queries and keys
# swapped. Few queries over many keys would leave a GPU idle: the keys are split among its processors, and the
# parts are joined by their normalisers.

BUSY_TILES = 512  # tiles of 64 queries that fill a large GPU, about four per processor
TILE = 64
FEWEST_KEYS = 256  # per part; with fewer, joining costs more than it saves
ALIGNED = 8  # the GPU's kernel needs bias rows padded to a multiple of this


def normalised_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float
) -> tuple[Tensor, Tensor] | None:
    """softmax(q k scale + bias) v, and the logarithms of its row sums; None if no kernel fits.

    Shapes: q (b, h, m, e), k and v (b, h, n, e), bias (..., 1, n) real, sums (b, h, m).
    """
    if not _fits(q, k, v, bias):
        return None
    with torch.no_grad():
        if bias is None:
            return split_attention(q, k, v, None, scale=scale, parts=_parts(q, k))
        bias = bias.expand(
            *k.shape[:2], 1, k.shape[-2]
        )  # in one part: a mask may exclude all keys of another
        return split_attention(q, k, v, bias, scale=scale, parts=1)


def leaves_gpu_idle(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch's own attention would use only a small part of a GPU, and no gradient is needed."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    return _fits(q, k, v, None) and _parts(q, k) > 1


def transposed_attention(
    q: Tensor, k: Tensor, gradient: Tensor, bias: Tensor | None, sums: Tensor, *, scale: float
) -> Tensor | None:
    """P^T gradient (b, h, n, e) for the weights P = softmax(q k scale + bias) with logarithmic row sums.

    P^T is exp(k q scale - sums), each row times exp(bias): an attention whose rows need not sum to one, so
    the result is multiplied by its row sums.
    """
    if not _fits(k, q, gradient, bias):
        return None
    with torch.no_grad():
        mixed, received = split_attention(
            k, q, gradient, -sums.unsqueeze(-2), scale=scale, parts=_parts(k, q)
        )
        received = received if bias is None else received + bias.squeeze(-2)
        return mixed * received.exp().unsqueeze(-1)


def split_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float, parts: int
) -> tuple[Tensor, Tensor]:
    """Attention and row sums over `parts` equal runs of keys and a remainder, joined by their row sums."""
    n = k.shape[-2] - k.shape[-2] % parts
    if parts == 1 or n == 0:
        return _kernel(q, k, v, bias, scale)
    b, h, m, e = q.shape
    queries = q.unsqueeze(1).expand(b, parts, h, m, e).flatten(0, 1)
    keys, values = (_runs(t[:, :, :n], parts) for t in (k, v))
    bias_runs = None if bias is None else _runs(bias[..., :n].mT, parts).mT
    out, sums = _kernel(queries, keys, values, bias_runs, scale)
    outs, all_sums = [*out.unflatten(0, (b, parts)).unbind(1)], [*sums.unflatten(0, (b, parts)).unbind(1)]
    if n < k.shape[-2]:
        last = _kernel(q, k[:, :, n:], v[:, :, n:], None if bias is None else bias[..., n:], scale)
        outs.append(last[0])
        all_sums.append(last[1])
    joined = torch.stack(all_sums, dim=-1)  # (b, h, m, parts)
    weights = joined.softmax(dim=-1).unsqueeze(-2)
    return (weights @ torch.stack(outs, dim=-2)).squeeze(-2), joined.logsumexp(dim=-1)


def _runs(t: Tensor, parts: int) -> Tensor:
    """(b, h, n, e) to (b parts, h, n / parts, e), a view if b is one."""
    return t.transpose(1, 2).unflatten(1, (parts, -1)).flatten(0, 1).transpose(1, 2)


def _fits(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels support these tensors: float32, four dimensions, equal heads and widths."""
    tensors = (q, k, v)
    return (
        q.device.type in ("cpu", "cuda")
        and all(t.dtype == torch.float32 and t.ndim == 4 for t in tensors)
        and q.shape[:2] == k.shape[:2] == v.shape[:2]
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and (q.shape[-1] % 4 == 0 or q.device.type == "cpu")
        and (bias is None or (bias.dtype == torch.float32 and bias.shape[-2] == 1))
        and min(q.shape) > 0
        and min(k.shape) > 0
    )


def _parts(q: Tensor, k: Tensor) -> int:
    """The number of runs to split the keys into; one on a CPU."""
    if q.device.type != "cuda":
        return 1
    tiles = q.shape[0] * q.shape[1] * -(-q.shape[-2] // TILE)
    return max(1, min(BUSY_TILES // tiles, k.shape[-2] // FEWEST_KEYS))


def _kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mask = None if bias is None else bias.expand(-1, -1, q.shape[-2], -1)
        return flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    if bias is not None:
        n = k.shape[-2]
        bias = F.pad(bias, (0, -n % ALIGNED))[..., :n].expand(-1, -1, q.shape[-2], -1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, sums, *_ = efficient(q, k, v, bias, True, 0.0, False, scale=scale)
    return out, sums[..., : q.shape[-2]]
