"""Attention and scans: their weights are constants, and the result is linear in the values.

AH-rule: Ali et al., "XAI for Transformers: Better Explanations through Conservative Propagation", ICML 2022.
Selective scan of Mamba: Jafari et al., "MambaLRP: Explaining Selective State Space Sequence Models", NeurIPS
2024, arXiv:2406.07592.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.core.errors import UnsupportedError
from xmil.lrp.marks import CUT
from xmil.lrp.operations import Gradients, is_live, register_function, register_rule
from xmil.lrp.rules.linear import apply_affine
from xmil.lrp.values import Secants, ruled, with_gradient_of
from xmil.nn import normalised_attention, row_blocks, scan_adjoint, transposed_attention
from xmil.nn.scan import Carry, Mamba, Order, add_rows, take_rows

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine

BLOCK_ELEMENTS = 1 << 21  # largest block of attention weights, in numbers: small enough for the cache


@register_rule("nystrom_factors")
def nystrom_factors(engine: Engine, function: Any, x: Tensor, *args: Any) -> Any:
    """All factors are constants that depend on the input."""
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
    """Linear in the values; queries, keys and a bias only enter the constant weights."""
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
        fused = normalised_attention(query, key, value, _as_bias(mask), scale=factor)
        sums = None if fused is None else fused[1]
        out = (
            fused[0]
            if fused is not None
            else function(query, key, value, mask, dropout_p, is_causal, scale=scale, **kwargs)
        )
    shape = value.shape

    def back(
        gradient: Tensor, query: Tensor, key: Tensor, mask: Tensor | None, sums: Tensor | None
    ) -> Tensor:
        """P^T g in blocks, without the full matrix P."""
        passed = None
        if sums is not None and query.device.type != "cpu":  # on a CPU blocks are as fast
            passed = transposed_attention(query, key, gradient, _as_bias(mask), sums, scale=factor)
        if passed is None and query.shape[-2] >= key.shape[-2]:
            passed = _by_queries(query * factor, key, mask, gradient)
        elif passed is None:
            passed = _by_keys(query * factor, key, mask, gradient, sums)
        return passed.sum_to_size(shape)

    mixed = ruled(value, out, back, query, key, mask, sums)
    return apply_affine(engine, mixed, mixed, None, engine.composite.attention)


def _as_bias(mask: Tensor | None) -> Tensor | None:
    """The mask as a bias on the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, float("-inf"))


def _by_queries(query: Tensor, key: Tensor, mask: Tensor | None, gradient: Tensor) -> Tensor:
    """P^T g over blocks of queries, for few keys."""
    total = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
    width = query.shape[:-2].numel() * key.shape[-2]
    for block in row_blocks(query.shape[-2], width=width, most=BLOCK_ELEMENTS):
        weights = F.softmax(_masked(query[..., block, :] @ key.mT, mask), dim=-1)
        total = total + weights.mT @ gradient[..., block, :]
    return total


def _by_keys(
    query: Tensor, key: Tensor, mask: Tensor | None, gradient: Tensor, sums: Tensor | None
) -> Tensor:
    """P^T g over blocks of keys, for few queries; computes the normalisers first if `sums` is None."""
    width = query.shape[:-1].numel()
    blocks = list(row_blocks(key.shape[-2], width=width, most=BLOCK_ELEMENTS))
    masks = [None if mask is None else mask[..., block] for block in blocks]
    if sums is None:
        parts = [
            torch.logsumexp(_masked(query @ key[..., block, :].mT, m), dim=-1, keepdim=True)
            for block, m in zip(blocks, masks, strict=True)
        ]
        sums = torch.logsumexp(torch.cat(parts, dim=-1), dim=-1)
    normaliser, products = sums.unsqueeze(-2), []
    for block, m in zip(blocks, masks, strict=True):
        score = key[..., block, :] @ query.mT
        score = score if m is None else (_masked(score.mT, m)).mT
        products.append(score.sub_(normaliser).exp_() @ gradient)
    return torch.cat(products, dim=-2)


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


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
    """`nn.MultiheadAttention`: relevance goes through the value and output projections."""
    if kwargs.get("training") and dropout_p:
        raise UnsupportedError(
            f"Attention dropout must be off, {engine.where()}; put the module in eval mode."
        )
    fixed = (embed_dim, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v, add_zero_attn, dropout_p)
    with torch.no_grad():
        out, weights = function(query, key, value, *fixed, out_proj_weight, out_proj_bias, **kwargs)
        with_weights = {**kwargs, "need_weights": True, "average_attn_weights": False}
        _, per_head = function(query, key, value, *fixed, out_proj_weight, out_proj_bias, **with_weights)
    separate = kwargs.get("use_separate_proj_weight") or in_proj_weight is None
    weight_v = kwargs["v_proj_weight"] if separate else in_proj_weight[2 * embed_dim :]  # type: ignore[index]
    bias = None if in_proj_bias is None else in_proj_bias[2 * embed_dim :]
    with engine:  # the linear layers below go through their own rules
        v = F.linear(value if value.ndim == 3 else value.unsqueeze(1), weight_v, bias)  # (s, b, e)
        if bias_v is not None:  # an extra token, as for `add_zero_attn`
            v = torch.cat([v, bias_v.repeat(1, v.shape[1], 1)])
        if add_zero_attn:
            v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
        s, b, e = v.shape
        heads = v.reshape(s, b * num_heads, e // num_heads).transpose(0, 1)
        mixed = per_head.reshape(b * num_heads, -1, s) @ heads  # (b h, l, e / h)
        joined = mixed.transpose(0, 1).reshape(-1, b, e)
        carrier = F.linear(joined, out_proj_weight, out_proj_bias)
    return with_gradient_of(carrier.reshape(out.shape), out), weights


# Fused kernels of other packages, by the names of their autograd functions. Their backward returns gradients
# for all inputs; the rules pass on those of the values and stop the others.

FLASH = "flash_attn.flash_attn_interface."


@register_function(f"{FLASH}FlashAttnFunc", f"{FLASH}FlashAttnVarlenFunc", "xformers.ops.fmha._fMHA")
def flash_attention(engine: Engine, node: Any, gradients: Gradients, upstream: Gradients) -> Gradients:
    """Queries, keys, values: the AH-rule."""
    return [None, None, gradients[2], *[None] * (len(gradients) - 3)]


@register_function(f"{FLASH}FlashAttnQKVPackedFunc", f"{FLASH}FlashAttnVarlenQKVPackedFunc")
def packed_attention(engine: Engine, node: Any, gradients: Gradients, upstream: Gradients) -> Gradients:
    """Queries, keys and values in one tensor (..., 3, h, d)."""
    return [_last_of(gradients[0]), *[None] * (len(gradients) - 1)]


@register_function(f"{FLASH}FlashAttnKVPackedFunc", f"{FLASH}FlashAttnVarlenKVPackedFunc")
def key_value_packed_attention(
    engine: Engine, node: Any, gradients: Gradients, upstream: Gradients
) -> Gradients:
    """Queries, and keys and values in one tensor (..., 2, h, d)."""
    return [None, _last_of(gradients[1]), *[None] * (len(gradients) - 2)]


def _last_of(gradient: Tensor | None) -> Tensor | None:
    """The values' part of a packed gradient."""
    if gradient is None:
        return None
    values = torch.zeros_like(gradient)
    values[..., -1, :, :] = gradient[..., -1, :, :]
    return values


@register_function("mamba_ssm.ops.selective_scan_interface.SelectiveScanFn")
def fused_scan(engine: Engine, node: Any, gradients: Gradients, upstream: Gradients) -> Gradients:
    """u, delta, A, B, C, D, z: linear in u, all others constant; y silu(z) in halves if z is live."""
    u, *rest = gradients
    ruled: list[Tensor | None] = [u, *[None] * len(rest)]
    z = node.saved_tensors[6] if getattr(node, "has_z", False) else None
    if z is None or not node.needs_input_grad[6] or u is None or upstream[0] is None:
        return ruled
    scanned = node.saved_tensors[-1]
    z_index = 6 if node.saved_tensors[5] is not None else 5  # after D, which may be None
    ruled[0], ruled[z_index] = 0.5 * u, 0.5 * upstream[0] * scanned * torch.sigmoid(z)
    return ruled


@register_rule("selective_scan")
def selective_scan(
    engine: Engine,
    function: Any,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    carry: Carry | None = None,
) -> Tensor:
    """Linear in x: dt, A, B and C only enter the decay and the input and output weights, all constant."""
    constants = [value.detach() for value in (dt, A, B, C, D)]
    with torch.no_grad():
        out: Tensor = function(x, *constants, carry)
    return ruled(x, out, partial(scan_adjoint, carry=carry), *constants) if x.requires_grad else out


@register_rule("gated_scans")
def gated_scans(engine: Engine, function: Any, h: Tensor, layer: Mamba, orders: Sequence[Order]) -> Tensor:
    """By the rules of its parts; for a long sequence the backward pass recomputes them one at a time."""
    activations = engine.activations
    ahead = [] if activations is None else activations.ahead(1 + 2 * len(layer.branches))
    if ahead is None or not layer.takes_parts(h):
        with engine:
            return layer.scan_whole(h, orders)
    if isinstance(activations, Secants):
        activations.skip(len(ahead))
    with torch.no_grad():
        out, states = layer.scan_parts(h, orders)

    def back(gradient: Tensor, h: Tensor) -> Tensor:
        passed = torch.zeros_like(h)
        for k, (branch, order, starts) in enumerate(zip(layer.branches, orders, states, strict=True)):
            own = [*ahead[:1], *ahead[1 + 2 * k : 3 + 2 * k]]  # the gate's, the signal's, the step's
            carry = Carry(starts[-1])
            for part, carry.state in reversed([*zip(layer.parts(h, order), starts, strict=True)]):
                rows = part.rows(h).requires_grad_(True)
                with torch.enable_grad(), engine.rerun(Secants(own) if own else None):
                    scanned = layer.scan_part(rows, branch, carry)
                if is_live(scanned):
                    reaching = take_rows(gradient, part.places).contiguous()
                    (to_rows,) = torch.autograd.grad(scanned, rows, reaching, materialize_grads=True)
                    add_rows(passed, part.sources, to_rows[:, part.missing :])
        return passed

    return ruled(h, out, back, h)
