"""Smooth activations: relevance passes each neuron unchanged, less the share of the constant f(0)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xmil.lrp.forms import exponent_of
from xmil.lrp.ledger import Ledger
from xmil.lrp.marks import GATE, WEIGHT
from xmil.lrp.operations import name_of, register_rule
from xmil.lrp.rules.affine import stabilised

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine

_MARKS = {
    **dict.fromkeys(("sigmoid", "hardsigmoid", "special_expit", "erfc", "special_ndtr"), GATE),
    **dict.fromkeys(("exp", "exp2", "special_exp2", "__rpow__"), WEIGHT),
}
EPSILON = 1e-12  # only ever meets x = 0, where f(x) - f(0) = 0 as well


@register_rule(
    "gelu", "silu", "mish", "elu", "selu", "celu", "softplus", "tanh", "softsign", "tanhshrink", "hardswish",
    "sigmoid", "hardsigmoid", "logsigmoid", "softshrink", "hardshrink", "erf", "arctan", "atan",
    "special_expit", "erfc", "expm1", "log1p", "sin", "sinh", "asinh", "arcsinh", "cos", "exp", "exp2",
    "special_exp2", "special_expm1", "__rpow__", "cosh", "tan", "sinc", "special_sinc", "asin", "arcsin",
    "atanh", "arctanh", "erfinv", "special_erfinv", "special_ndtr",
)  # fmt: skip
def smooth(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """f(x) = f(0) + x (f(x) - f(0)) / x: the constant keeps f(0), the rest goes to x.

    In products a sigmoid is a gate, and an exponential a weight: a softmax written by hand is one.
    """
    if input.is_complex():
        engine.refuse(function, "of complex numbers")
    with torch.no_grad():
        out = function(input, *args, **kwargs)
        at_zero = function(input.new_zeros(1), *args, **kwargs)
    ruled: Tensor = _Smooth.apply(input, out, at_zero, engine.ledger)  # type: ignore[no-untyped-call]
    if (mark := _MARKS.get(name_of(function))) is not None:
        engine.marks.put(ruled, mark)
    return ruled


def logistic(
    engine: Engine, numerator: Any, denominator: Any, compute: Callable[[], Tensor]
) -> Tensor | None:
    """c / (1 + e^u) or e^u / (1 + e^u) under the rule of the sigmoid that it is; None for other fractions."""
    exponent = exponent_of(engine.marks, numerator, denominator)
    if exponent is None:
        return None
    with torch.no_grad():
        out = compute()
    at_zero = exponent.new_full((1,), 0.5 if isinstance(numerator, Tensor) else numerator / 2)
    ruled: Tensor = _Smooth.apply(exponent, out, at_zero, engine.ledger)  # type: ignore[no-untyped-call]
    engine.marks.put(ruled, GATE)
    return ruled


@register_rule("clamp", "clamp_min", "clamp_max", "clip", "hardtanh", "relu6")
def clamp(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Inside the bounds the identity; outside, a constant that keeps its relevance."""
    out: Tensor = function(input, *args, **kwargs)
    held = torch.where(out.detach() == input.detach(), 0.0, out.detach())
    bounds = [value for value in (*args, *kwargs.values()) if engine.marks.depends(value)]
    engine.ledger.keep(engine.share_of(bounds[0]) if bounds else "bias", held, out)
    return out


@register_rule("threshold")
def threshold(engine: Engine, function: Any, input: Tensor, threshold: float, value: float) -> Tensor:
    """The identity above the threshold, a constant below."""
    out: Tensor = function(input, threshold, value)
    engine.ledger.keep("bias", torch.where(input.detach() > threshold, 0.0, out.detach()), out)
    return out


@register_rule("alpha_dropout", "feature_alpha_dropout")
def alpha_dropout(
    engine: Engine, function: Any, input: Tensor, p: float = 0.5, training: bool = False, **kwargs: Any
) -> Tensor:
    """The identity, unless it drops."""
    if training and p:
        engine.refuse(function, "in training")
    out: Tensor = function(input, p, training, **kwargs)
    return out


@register_rule(
    "floor", "ceil", "round", "trunc", "fix", "sign", "sgn", "heaviside", "floor_divide", "__floordiv__"
)
def steps(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Constant between its steps."""
    with torch.no_grad():
        out: Tensor = function(*args, **kwargs)
    return out


class _Smooth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, at_zero: Tensor, ledger: Ledger) -> Tensor:
        ctx.save_for_backward(x, out, at_zero)
        ctx.ledger = ledger
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        x, out, at_zero = ctx.saved_tensors
        passed = gradient * (out - at_zero) / stabilised(x, EPSILON)
        ctx.ledger.add("bias", at_zero.double().squeeze() * gradient.sum())
        return passed, None, None, None
