"""AH-rule: attention weights are constants, and attention is linear in the values.

Ali et al., "XAI for Transformers: Better Explanations through Conservative Propagation", ICML 2022.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.core.errors import UnsupportedError
from xmil.lrp.marks import CUT
from xmil.lrp.operations import register_rule
from xmil.lrp.rules.affine import apply_affine
from xmil.lrp.values import with_gradient_of
from xmil.nn.fused import normalised_attention, transposed_attention

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine

BLOCK_ELEMENTS = 1 << 21  # largest block of attention weights, in numbers: small enough for the cache


@register_rule("softmax", "softmin", "gumbel_softmax", "_sparse_softmax")
def softmax(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A constant."""
    with torch.no_grad():
        out: Tensor = function(*args, **kwargs)
    return out


@register_rule("nystrom_factors")
def nystrom_factors(engine: Engine, function: Any, x: Tensor, *args: Any) -> Any:
    """Constants that depend on the input, one and all."""
    with torch.no_grad():
        factors = function(x, *args)
    for value in vars(factors).values():
        if isinstance(value, Tensor):
            engine.marks.put(value, CUT)
    return factors


@register_rule("scaled_dot_product_attention")
def scaled_dot_product_attention(
    engine: Engine,
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **kwargs: Any,
) -> Tensor:
    """Linear in the values; queries, keys and a bias only make the constant weights."""
    query, key = query.detach(), key.detach()
    mask = None if attn_mask is None else attn_mask.detach()
    out: Tensor
    if (
        dropout_p
        or is_causal
        or kwargs.get("enable_gqa")
        or (mask is not None and (mask.ndim < 2 or mask.shape[-2] != 1))
    ):
        out = function(query, key, value, mask, dropout_p, is_causal, scale=scale, **kwargs)
        return apply_affine(engine, out, out, None, engine.composite.attention)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.no_grad():
        known = normalised_attention(query, key, value, _as_bias(mask), scale=factor)
        sums = None if known is None else known[1]
        out = (
            known[0]
            if known is not None
            else function(query, key, value, mask, dropout_p, is_causal, scale=scale, **kwargs)
        )
    ruled: Tensor = _ConstantWeights.apply(value, out, query, key, mask, sums, factor)  # type: ignore[no-untyped-call]
    return apply_affine(engine, ruled, ruled, None, engine.composite.attention)


def _as_bias(mask: Tensor | None) -> Tensor | None:
    """A mask as what it adds to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, float("-inf"))


class _ConstantWeights(torch.autograd.Function):
    """Value `out` of an attention; gradient P^T g to the values alone, in blocks that are never all kept."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        sums: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key, mask, sums)
        ctx.shape, ctx.scale = value.shape, scale
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        query, key, mask, sums = ctx.saved_tensors
        passed = _transposed(query, key, mask, gradients[0], sums, ctx.scale)
        return passed.sum_to_size(ctx.shape), None, None, None, None, None, None


def _transposed(
    query: Tensor, key: Tensor, mask: Tensor | None, gradient: Tensor, sums: Tensor | None, scale: float
) -> Tensor:
    """P^T g: by a fused kernel where there is one, else in blocks."""
    if sums is not None and query.device.type != "cpu":  # there blocks in the cache are as fast
        found = transposed_attention(query, key, gradient, _as_bias(mask), sums, scale=scale)
        if found is not None:
            return found
    if query.shape[-2] >= key.shape[-2]:
        return _by_queries(query * scale, key, mask, gradient)
    return _by_keys(query * scale, key, mask, gradient, sums)


def _by_queries(query: Tensor, key: Tensor, mask: Tensor | None, gradient: Tensor) -> Tensor:
    """P^T g over blocks of queries, for few keys."""
    total = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
    for block in _blocks(query.shape[-2], query.shape[:-2].numel() * key.shape[-2]):
        weights = F.softmax(_masked(query[..., block, :] @ key.mT, mask), dim=-1)
        total = total + weights.mT @ gradient[..., block, :]
    return total


def _by_keys(
    query: Tensor, key: Tensor, mask: Tensor | None, gradient: Tensor, sums: Tensor | None
) -> Tensor:
    """P^T g over blocks of keys, for few queries; the normalisers come first where they are not known."""
    blocks = _blocks(key.shape[-2], query.shape[:-2].numel() * query.shape[-2])
    masks = [None if mask is None else mask[..., block] for block in blocks]
    if sums is None:
        parts = [
            torch.logsumexp(_masked(query @ key[..., block, :].mT, m), dim=-1, keepdim=True)
            for block, m in zip(blocks, masks, strict=True)
        ]
        sums = torch.logsumexp(torch.cat(parts, dim=-1), dim=-1)
    normaliser, found = sums.unsqueeze(-2), []
    for block, m in zip(blocks, masks, strict=True):
        score = key[..., block, :] @ query.mT
        score = score if m is None else (_masked(score.mT, m)).mT
        found.append(score.sub_(normaliser).exp_() @ gradient)
    return torch.cat(found, dim=-2)


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


def _blocks(n: int, width: int) -> list[slice]:
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    return [slice(start, start + step) for start in range(0, n, step)]


@register_rule("multi_head_attention_forward")
def multi_head_attention(
    engine: Engine,
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`nn.MultiheadAttention`: its value as computed, its relevance through value and output projection."""
    if kwargs.get("training") and dropout_p:
        raise UnsupportedError(
            f"Attention dropout must be off, {engine.where()}; put the module in eval mode."
        )
    fixed = (embed_dim, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v, add_zero_attn, dropout_p)
    with torch.no_grad():
        out, weights = function(query, key, value, *fixed, out_proj_weight, out_proj_bias, **kwargs)
        asked = {**kwargs, "need_weights": True, "average_attn_weights": False}
        _, per_head = function(query, key, value, *fixed, out_proj_weight, out_proj_bias, **asked)
    weight_v, bias = _value_projection(in_proj_weight, in_proj_bias, embed_dim, kwargs)
    with engine:  # the linear layers below go through their own rules
        v = F.linear(value if value.ndim == 3 else value.unsqueeze(1), weight_v, bias)  # (s, b, e)
        v = _extended(v, bias_v, add_zero_attn)
        s, b, e = v.shape
        heads = v.reshape(s, b * num_heads, e // num_heads).transpose(0, 1)
        mixed = per_head.reshape(b * num_heads, -1, s) @ heads  # (b h, l, e / h)
        joined = mixed.transpose(0, 1).reshape(-1, b, e)
        carrier = F.linear(joined, out_proj_weight, out_proj_bias)
    return with_gradient_of(carrier.reshape(out.shape), out), weights


def _value_projection(
    weight: Tensor | None, bias: Tensor | None, embed_dim: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    bias_v = None if bias is None else bias[2 * embed_dim :]
    if kwargs.get("use_separate_proj_weight") or weight is None:
        return kwargs["v_proj_weight"], bias_v
    return weight[2 * embed_dim :], bias_v


def _extended(v: Tensor, bias_v: Tensor | None, add_zero_attn: bool) -> Tensor:
    """The values with the tokens that `bias_kv` and `add_zero_attn` put behind them."""
    if bias_v is not None:
        v = torch.cat([v, bias_v.repeat(1, v.shape[1], 1)])
    if add_zero_attn:
        v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
    return v
