"""LN-rule: the standard deviation is a constant, the mean is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xmil.core.errors import UnsupportedError
from xmil.lrp.operations import register_rule
from xmil.lrp.values import with_gradient_of

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine


@register_rule("layer_norm")
def layer_norm(
    engine: Engine,
    function: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_rest: Any,
) -> Tensor:
    """Centred over the features, scaled by constants."""
    engine.check_constant("layer_norm", weight=weight, bias=bias)
    with torch.no_grad():  # the kernel behind every layer norm; it returns 1 / std as well
        out, _mean, scale = torch.native_layer_norm(input, list(normalized_shape), weight, bias, eps)
    ruled: Tensor = _Centred.apply(input, out, weight, scale, len(normalized_shape))  # type: ignore[no-untyped-call]
    if bias is not None:
        engine.keep(bias, ruled)
    return ruled


@register_rule("rms_norm")
def rms_norm(
    engine: Engine,
    function: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """The root mean square is a constant."""
    engine.check_constant("rms_norm", weight=weight)
    dims = tuple(range(-len(normalized_shape), 0))
    with torch.no_grad():
        out = function(input, normalized_shape, weight, eps)
        floor = torch.finfo(input.dtype).eps if eps is None else eps
        scale = torch.rsqrt(input.pow(2).mean(dim=dims, keepdim=True) + floor)
        scale = scale if weight is None else scale * weight
    return with_gradient_of(input * scale, out)


@register_rule("group_norm")
def group_norm(
    engine: Engine,
    function: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Tensor:
    """Centred over each group of channels of one sample."""
    engine.check_constant("group_norm", weight=weight, bias=bias)
    with torch.no_grad():
        out = function(input, num_groups, weight, bias, eps, *rest)
    return _grouped(engine, input, out, num_groups, weight, bias, eps)


@register_rule("instance_norm")
def instance_norm(
    engine: Engine,
    function: Any,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Centred over each channel of one sample."""
    if not use_input_stats:
        raise UnsupportedError(f"instance_norm with running statistics has no rule, {engine.where()}.")
    with torch.no_grad():
        out = function(input, None, None, weight, bias, True, momentum, eps)
    return _grouped(engine, input, out, input.shape[1], weight, bias, eps)


@register_rule("normalize")
def normalize(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """x over its norm: the norm is a constant."""
    with torch.no_grad():
        out = function(input, *args, **kwargs)
        safe = torch.where(input == 0, torch.ones_like(input), input)
        ratio = torch.where(input == 0, torch.zeros_like(input), out / safe)
    return with_gradient_of(input * ratio, out)


def _grouped(
    engine: Engine,
    x: Tensor,
    out: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    grouped = x.reshape(x.shape[0], groups, -1)
    with torch.no_grad():
        scale = torch.rsqrt(grouped.var(dim=-1, unbiased=False, keepdim=True) + eps)
    centred = ((grouped - grouped.mean(dim=-1, keepdim=True)) * scale).view_as(x)
    per_channel = (-1, *[1] * (x.ndim - 2))
    if weight is not None:
        centred = centred * weight.view(per_channel)
    ruled = with_gradient_of(centred, out)
    if bias is not None:
        engine.ledger.keep(engine.share_of(bias), bias.view(per_channel), ruled)
    return ruled


class _Centred(torch.autograd.Function):
    """Value `out`; gradient of (x - mean(x)) w / std with a constant std."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, out: Tensor, weight: Tensor | None, scale: Tensor, n_dims: int
    ) -> Tensor:
        ctx.dims = tuple(range(-n_dims, 0))
        ctx.save_for_backward(scale, weight)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        scale, weight = ctx.saved_tensors
        gradient = gradients[0] if weight is None else gradients[0] * weight
        return (gradient - gradient.mean(dim=ctx.dims, keepdim=True)) * scale, None, None, None, None
