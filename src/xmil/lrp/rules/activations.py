"""Activations and norms.

Relevance passes each neuron unchanged, less the share of the constant f(0); logarithms are measured from
their zero. LN-rule: the standard deviation is a constant, the mean is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xmil.core.errors import UnsupportedError
from xmil.lrp.marks import CUT, GATE, WEIGHT, exponent_of
from xmil.lrp.operations import Function, name_of, register_rule
from xmil.lrp.values import Ledger, product_sum, ruled, stabilised, with_gradient_of

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine

_MARKS = {
    **dict.fromkeys(("sigmoid", "hardsigmoid", "special_expit", "erfc", "special_ndtr"), GATE),
    **dict.fromkeys(("exp", "exp2", "special_exp2", "__rpow__"), WEIGHT),
}
EPSILON = 1e-12  # matters only at x = 0, where f(x) - f(0) = 0 too


@register_rule(
    "gelu", "silu", "mish", "elu", "selu", "celu", "softplus", "tanh", "softsign", "tanhshrink", "hardswish",
    "sigmoid", "hardsigmoid", "logsigmoid", "softshrink", "hardshrink", "erf", "arctan", "atan",
    "special_expit", "erfc", "expm1", "log1p", "sin", "sinh", "asinh", "arcsinh", "cos", "exp", "exp2",
    "special_exp2", "special_expm1", "__rpow__", "cosh", "tan", "sinc", "special_sinc", "asin", "arcsin",
    "atanh", "arctanh", "erfinv", "special_erfinv", "special_ndtr", "acos", "arccos", "special_i0", "i0",
    "special_erfcx", "special_log_ndtr",
)  # fmt: skip
def smooth(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """f(x) = f(0) + x (f(x) - f(0)) / x: the constant keeps f(0), the rest goes to x.

    In products a sigmoid is a gate, and an exponential is a weight, as in a softmax written by hand.
    """
    if input.is_complex():
        engine.refuse(function, "of complex numbers")
    with torch.no_grad():
        out = function(input, *args, **kwargs)
        at_zero = function(input.new_zeros(1), *args, **kwargs)
    passed = _through_neuron(engine.ledger, input, out, at_zero)
    if (mark := _MARKS.get(name_of(function))) is not None:
        engine.marks.put(passed, mark)
    return passed


def _through_neuron(ledger: Ledger, x: Tensor, out: Tensor, at_zero: Tensor) -> Tensor:
    """The value f(x); f(0) keeps its share, the rest goes to x."""

    def back(gradient: Tensor, x: Tensor, out: Tensor, at_zero: Tensor) -> Tensor:
        passed = gradient * (out - at_zero) / stabilised(x, EPSILON)
        ledger.add("bias", at_zero.double().squeeze() * gradient.sum())
        return passed

    return ruled(x, out, back, x, out, at_zero)


def logistic(
    engine: Engine, numerator: Any, denominator: Any, compute: Callable[[], Tensor]
) -> Tensor | None:
    """c / (1 + e^u) or e^u / (1 + e^u) under the rule of a sigmoid; None for other fractions."""
    exponent = exponent_of(engine.marks, numerator, denominator)
    if exponent is None:
        return None
    with torch.no_grad():
        out = compute()
    at_zero = exponent.new_full((1,), 0.5 if isinstance(numerator, Tensor) else numerator / 2)
    passed = _through_neuron(engine.ledger, exponent, out, at_zero)
    engine.marks.put(passed, GATE)
    return passed


_ZEROS = {  # the zero of f, and its slope there
    "log": (1.0, 1.0),
    "log2": (1.0, 1 / math.log(2)),
    "log10": (1.0, 1 / math.log(10)),
    "logit": (0.5, 4.0),
    "special_logit": (0.5, 4.0),
}


@register_rule(*_ZEROS)
def logarithm(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """f(x) = s (x - a) with f(a) = 0 and s = f(x) / (x - a): x gets s x, the constant -s a.

    So log undoes exp, and logit undoes sigmoid: exp keeps f(0) = 1, the zero of log.
    """
    zero, slope = _ZEROS[name_of(function)]
    with torch.no_grad():
        out = function(input, *args, **kwargs)
        step = input - zero
        secant = torch.where(step == 0, slope, out / stabilised(step, 0.0))
        secant = torch.where(torch.isfinite(secant), secant, 0.0)  # -inf comes only from masks

    def back(gradient: Tensor, secant: Tensor) -> Tensor:
        engine.ledger.add("bias", product_sum(secant, gradient) * -zero)
        return gradient * secant

    return ruled(input, out, back, secant)


@register_rule("logsumexp", "special_logsumexp")
def logsumexp(engine: Engine, function: Any, input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """sum(p x) + H(p) with p = softmax(x). The weights p are constants, as in attention, and so is their
    entropy H, which is cut: no single number decides how many share the maximum.
    """
    out: Tensor = function(input, dim, keepdim)
    with torch.no_grad():
        weights = torch.exp(input - function(input, dim, True))
        weighted = torch.where(weights == 0, 0.0, weights * input)  # a mask's -inf adds nothing
        entropy = out.detach() - weighted.sum(dim=dim, keepdim=keepdim)
    engine.marks.put(entropy, CUT)
    engine.keep(entropy, out)
    return out


@register_rule("clamp", "clamp_min", "clamp_max", "clip", "hardtanh", "relu6")
def clamp(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The identity inside the bounds, a constant that keeps its relevance outside."""
    out: Tensor = function(input, *args, **kwargs)
    outside = torch.where(out.detach() == input.detach(), 0.0, out.detach())
    bounds = [value for value in (*args, *kwargs.values()) if engine.marks.depends(value)]
    engine.ledger.keep(engine.share_of(bounds[0]) if bounds else "bias", outside, out)
    return out


@register_rule("threshold")
def threshold(engine: Engine, function: Any, input: Tensor, threshold: float, value: float) -> Tensor:
    """The identity above the threshold, a constant below."""
    out: Tensor = function(input, threshold, value)
    engine.ledger.keep("bias", torch.where(input.detach() > threshold, 0.0, out.detach()), out)
    return out


@register_rule("alpha_dropout", "feature_alpha_dropout")
def alpha_dropout(
    engine: Engine, function: Function, input: Tensor, p: float = 0.5, training: bool = False, **kwargs: Any
) -> Tensor:
    """The identity in eval mode; refused in training."""
    if training and p:
        engine.refuse(function, "in training")
    return function(input, p, training, **kwargs)


@register_rule(
    "floor", "ceil", "round", "trunc", "fix", "sign", "sgn", "heaviside", "floor_divide", "__floordiv__",
    "softmax", "softmin", "gumbel_softmax", "_sparse_softmax",
)  # fmt: skip
def constant(engine: Engine, function: Function, *args: Any, **kwargs: Any) -> Tensor:
    """Constant: a step function, or weights such as a softmax."""
    with torch.no_grad():
        return function(*args, **kwargs)


# Norms: the LN-rule.


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
    """Centred over the features and scaled by constants."""
    engine.check_constant("layer_norm", weight=weight, bias=bias)
    with torch.no_grad():  # the kernel behind every layer norm; it returns 1 / std as well
        out, _mean, scale = torch.native_layer_norm(input, list(normalized_shape), weight, bias, eps)
    dims = tuple(range(-len(normalized_shape), 0))

    def back(gradient: Tensor, scale: Tensor, weight: Tensor | None) -> Tensor:
        gradient = gradient if weight is None else gradient * weight
        return (gradient - gradient.mean(dim=dims, keepdim=True)) * scale

    normed = ruled(input, out, back, scale, weight)
    if bias is not None:
        engine.keep(bias, normed)
    return normed


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
    """x over its norm, which is a constant."""
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
    normed = with_gradient_of(centred, out)
    if bias is not None:
        engine.ledger.keep(engine.share_of(bias), bias.view(per_channel), normed)
    return normed
