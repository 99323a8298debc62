"""Epsilon and gamma rules for linear layers, convolutions and batch norm in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xmil.core.errors import UnsupportedError
from xmil.lrp.composite import AffineRule
from xmil.lrp.ledger import Ledger, product_sum
from xmil.lrp.operations import is_live, name_of, register_rule
from xmil.lrp.values import contiguous_gradient, with_gradient_of

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine


@register_rule("linear")
def linear(
    engine: Engine, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """y = x W + b."""
    engine.check_constant("linear", weight=weight, bias=bias)
    rule = engine.rule_for(weight)
    enters = rule.is_gradient and not rule.constant
    return _affine(
        engine, partial(engine.enter, function) if enters else function, input, weight, bias, bias_shape=(-1,)
    )


@register_rule("addmm", "addbmm", "baddbmm", "addmv", "addr")
def addmm(engine: Engine, function: Any, input: Tensor, *factors: Any, **kwargs: Any) -> Tensor:
    """y = beta b + alpha x W, as some write a linear layer, and attention with its bias."""
    beta, alpha = kwargs.pop("beta", 1), kwargs.pop("alpha", 1)
    first, second = (*factors, *kwargs.values())
    weight = second if is_live(first) else first
    rule = engine.rule_for(weight)
    out: Tensor = function(input, first, second, beta=beta, alpha=alpha)
    if function.__name__ == "addmm" and not (is_live(weight) or is_live(input) or rule.gamma or alpha != 1):
        share = engine.share_of(input)
        carrier = out if rule.is_gradient else first @ second
        return apply_affine(engine, carrier, out, input * beta, rule, share)
    with engine:
        product = _PRODUCTS[name_of(function)](first, second)
        carrier = beta * input + alpha * product
    return with_gradient_of(carrier, out)


_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "addmm": torch.matmul,
    "addmv": torch.matmul,
    "addr": torch.outer,
    "baddbmm": torch.bmm,
    "addbmm": lambda first, second: torch.bmm(first, second).sum(dim=0),
}


def _register_convolution(name: str, spatial: int) -> None:
    @register_rule(name)
    def convolution(
        engine: Engine,
        function: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """A convolution is a linear layer with shared weights."""
        engine.check_constant(name, weight=weight, bias=bias)
        return _affine(
            engine,
            lambda x, w, b: contiguous_gradient(function(x, w, b, *args, **kwargs)),
            input,
            weight,
            bias,
            bias_shape=(-1, *[1] * spatial),
        )


for _name in ("conv", "conv_transpose"):
    for _spatial in (1, 2, 3):
        _register_convolution(f"{_name}{_spatial}d", _spatial)


@register_rule("batch_norm")
def batch_norm(
    engine: Engine,
    function: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """In eval mode y = s x + t with constant s and t."""
    if training or running_mean is None or running_var is None:
        raise UnsupportedError(
            f"batch_norm {engine.where()} uses the statistics of the batch, which mixes bags; "
            "put the module in eval mode with running statistics."
        )
    scale = torch.rsqrt(running_var + eps) if weight is None else weight * torch.rsqrt(running_var + eps)
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    shape = (-1, *[1] * (input.ndim - 2))
    out: Tensor = function(input, running_mean, running_var, weight, bias, training, momentum, eps)
    rule = engine.rule_for(weight)
    if rule.gamma:
        rule = AffineRule(rule.epsilon, 0.0, rule.bias)  # one input per output: gamma changes nothing
    return apply_affine(engine, out - shift.view(shape), out, shift.view(shape), rule)


def _affine(
    engine: Engine,
    compute: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    bias_shape: tuple[int, ...],
) -> Tensor:
    rule = engine.rule_for(weight)
    if rule.constant:
        with torch.no_grad():
            return compute(input, weight, bias)
    shaped = None if bias is None else bias.view(bias_shape)
    share = engine.share_of(bias)
    if rule.is_gradient or (rule.gamma == 0 and bias is None):
        out = compute(input, weight, bias)
        return apply_affine(engine, out, out, shaped, rule, share)
    with torch.no_grad():
        out = compute(input, weight, bias)
    # computed without the bias rather than by taking it off: denominators near zero keep their digits
    if rule.gamma and rule.signed:
        carrier, shaped = _agreeing(lambda x, w: compute(x, w, None), input, weight, shaped, out, rule.gamma)
        return apply_affine(engine, carrier, out, shaped, rule, share)
    stretched = weight + rule.gamma * weight.clamp(min=0) if rule.gamma else weight
    carrier = compute(input, stretched, None)
    shaped = None if shaped is None else shaped + rule.gamma * shaped.clamp(min=0)
    return apply_affine(engine, carrier, out, shaped, rule, share)


def _agreeing(
    compute: Callable[[Tensor, Tensor], Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    gamma: float,
) -> tuple[Tensor, Tensor | None]:
    """The terms of each result with those of its own sign strengthened: their sum, and the bias."""
    more, less = weight + gamma * weight.clamp(min=0), weight + gamma * weight.clamp(max=0)
    above = input.clamp(min=0)
    up, down = compute(above, more), compute(above, less)
    if bool((input < 0).any()):
        below = input.clamp(max=0)
        up, down = up + compute(below, less), down + compute(below, more)
    positive = out >= 0
    if bias is not None:
        bias = torch.where(positive, bias + gamma * bias.clamp(min=0), bias + gamma * bias.clamp(max=0))
    return torch.where(positive, up, down), bias


def apply_affine(
    engine: Engine,
    carrier: Tensor,
    out: Tensor,
    bias: Tensor | None,
    rule: AffineRule,
    share: str = "bias",
) -> Tensor:
    """The output, with relevance going to the carrier as the rule says; the bias's is booked to `share`."""
    if rule.is_gradient:
        if bias is not None:
            engine.ledger.keep(share, bias, out)
        return out
    ruled: Tensor = _EpsilonGamma.apply(carrier, out.detach(), bias, rule, (engine.ledger, share))  # type: ignore[no-untyped-call]
    return ruled


class _EpsilonGamma(torch.autograd.Function):
    """Value `out`; relevance to `carrier` = x rho(w), in shares of the stabilised denominator."""

    @staticmethod
    def forward(
        ctx: Any,
        carrier: Tensor,
        out: Tensor,
        bias: Tensor | None,
        rule: AffineRule,
        booked: tuple[Ledger, str],
    ) -> Tensor:
        ctx.save_for_backward(carrier, out, bias)
        ctx.rule, ctx.booked = rule, booked
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = gradients
        rule, (ledger, share) = ctx.rule, ctx.booked
        inputs, out, bias = ctx.saved_tensors
        absorbs = rule.bias == "absorb" and bias is not None
        denominator = inputs + bias if absorbs else inputs
        received = out * gradient
        passed = received / stabilised(denominator, rule.epsilon)
        kept = product_sum(bias, passed) if absorbs else passed.new_zeros((), dtype=torch.float64)
        ledger.add(share, kept)
        ledger.add("epsilon", (received - inputs * passed).sum().double() - kept)
        return passed, None, None, None, None


def stabilised(denominator: Tensor, epsilon: float) -> Tensor:
    """denominator + epsilon * sign, with sign(0) = 1; where all is zero, one (nothing is to be shared)."""
    sign = 2 * (denominator >= 0).to(denominator.dtype) - 1
    total = denominator + epsilon * sign
    return torch.where(total == 0, torch.ones_like(total), total)
