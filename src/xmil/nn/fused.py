"""Attention together with its normalisers, by torch's fused kernels: no matrix of weights is ever there.

With the normalisers known, products with the transposed weights are an attention as well, queries and keys
changing places. On a GPU few queries over many keys would leave it idle: the keys are split among its
processors, and the parts are joined by their normalisers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BUSY_TILES = 512  # tiles of 64 queries that fill a large GPU, some four for each of its processors
TILE = 64
FEWEST_KEYS = 256  # of a part: below, joining costs more than it saves
ALIGNED = 8  # numbers to which the rows of a bias are padded for the GPU's kernel


def normalised_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float
) -> tuple[Tensor, Tensor] | None:
    """softmax(q k scale + bias) v, and the logarithms of its row sums; None where no kernel fits.

    Shapes: q (b, h, m, e), k and v (b, h, n, e), bias (..., 1, n) real, sums (b, h, m).
    """
    if not _fits(q, k, v, bias):
        return None
    with torch.no_grad():
        if bias is None:
            return split_attention(q, k, v, None, scale=scale, parts=_parts(q, k))
        whole = bias.expand(*k.shape[:2], 1, k.shape[-2])  # in one part: a mask may leave nothing of another
        return split_attention(q, k, v, whole, scale=scale, parts=1)


def leaves_gpu_idle(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch's own attention of these would use a small part of a GPU, and no gradient is wanted."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    return _fits(q, k, v, None) and _parts(q, k) > 1


def transposed_attention(
    q: Tensor, k: Tensor, gradient: Tensor, bias: Tensor | None, sums: Tensor, *, scale: float
) -> Tensor | None:
    """P^T gradient (b, h, n, e) for the weights P = softmax(q k scale + bias) with logarithmic row sums.

    P^T is exp(k q scale - sums), each row times exp(bias): an attention whose rows need not sum to one, so
    that its own row sums are multiplied back.
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
    """The same over `parts` equal runs of keys, and a rest, that are joined by their row sums."""
    n = k.shape[-2] - k.shape[-2] % parts
    if parts == 1 or n == 0:
        return _kernel(q, k, v, bias, scale)
    b, h, m, e = q.shape
    many = q.unsqueeze(1).expand(b, parts, h, m, e).flatten(0, 1)
    keys, values = (_runs(t[:, :, :n], parts) for t in (k, v))
    bias_runs = None if bias is None else _runs(bias[..., :n].mT, parts).mT
    out, sums = _kernel(many, keys, values, bias_runs, scale)
    outs, all_sums = [*out.unflatten(0, (b, parts)).unbind(1)], [*sums.unflatten(0, (b, parts)).unbind(1)]
    if n < k.shape[-2]:
        rest = _kernel(q, k[:, :, n:], v[:, :, n:], None if bias is None else bias[..., n:], scale)
        outs.append(rest[0])
        all_sums.append(rest[1])
    joined = torch.stack(all_sums, dim=-1)  # (b, h, m, parts)
    weights = joined.softmax(dim=-1).unsqueeze(-2)
    return (weights @ torch.stack(outs, dim=-2)).squeeze(-2), joined.logsumexp(dim=-1)


def _runs(t: Tensor, parts: int) -> Tensor:
    """(b, h, n, e) to (b parts, h, n / parts, e), a view where b is one."""
    runs: Tensor = t.transpose(1, 2).unflatten(1, (parts, -1))
    return runs.flatten(0, 1).transpose(1, 2)


def _fits(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels take them: float32, four dimensions, the same heads and widths."""
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
    """Into how many runs the keys are split: one on a CPU."""
    if q.device.type != "cuda":
        return 1
    tiles = q.shape[0] * q.shape[1] * -(-q.shape[-2] // TILE)
    return max(1, min(BUSY_TILES // tiles, k.shape[-2] // FEWEST_KEYS))


def _kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mask = None if bias is None else bias.expand(-1, -1, q.shape[-2], -1)
        out, sums = flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
        return out, sums
    if bias is not None:
        n = k.shape[-2]
        bias = F.pad(bias, (0, -n % ALIGNED))[..., :n].expand(-1, -1, q.shape[-2], -1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, sums, *_ = efficient(q, k, v, bias, True, 0.0, False, scale=scale)
    return out, sums[..., : q.shape[-2]]
