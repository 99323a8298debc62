"""Products of live tensors share relevance between their factors; normalisers are constants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xmil.lrp.operations import is_live, live_tensors, name_of, register_rule
from xmil.lrp.rules.activations import logistic
from xmil.lrp.rules.affine import apply_affine
from xmil.lrp.values import scaled_gradient, with_gradient_of

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine


@register_rule("mul")
def mul(engine: Engine, function: Any, input: Any, other: Any) -> Tensor:
    """By a constant: linear. Of two live tensors: a gate, or half each."""
    first, second = engine.without_gates([input, other])
    out: Tensor = function(first, second)
    return scaled_gradient(out, 0.5) if is_live(first) and is_live(second) else out


@register_rule(
    "matmul",
    "rmatmul",
    "bmm",
    "mm",
    "mv",
    "dot",
    "inner",
    "outer",
    "vdot",
    "kron",
    "chain_matmul",
    "tensordot",
    "cross",
    "linalg_cross",
    "linalg_vecdot",
    "_sparse_mm",
)
def multilinear(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Linear in each live factor: an equal share each."""
    return _shared(engine, function, args, kwargs)


@register_rule("einsum")
def einsum(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Linear in each live operand: an equal share each."""
    return _shared(engine, function, args, kwargs)


@register_rule("div")
def div(engine: Engine, function: Any, input: Any, other: Any, **kwargs: Any) -> Tensor:
    """The denominator is a constant: it normalises."""
    if kwargs.get("rounding_mode") is not None:
        engine.refuse(function, "with a rounding mode")
    if (sigmoid := logistic(engine, input, other, lambda: function(input, other))) is not None:
        return sigmoid
    out: Tensor = function(input, other.detach() if is_live(other) else other)
    return out


@register_rule("rdiv", "reciprocal", "rsqrt", "inverse", "linalg_inv", "pinverse", "linalg_pinv")
def normaliser(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """One over a live tensor is a constant that normalises whatever it multiplies."""
    if name_of(function) in ("rdiv", "reciprocal"):
        numerator = args[1] if len(args) > 1 else 1
        sigmoid = logistic(engine, numerator, args[0], lambda: function(*args, **kwargs))
        if sigmoid is not None:
            return sigmoid
    with torch.no_grad():
        out: Tensor = function(*args, **kwargs)
    return out


@register_rule("pow", "square", "sqrt", "float_power")
def power(engine: Engine, function: Any, input: Any, exponent: Any = None) -> Tensor:
    """Homogeneous of degree p: the gradient over p conserves; a negative power normalises."""
    degree = {"square": 2.0, "sqrt": 0.5}.get(function.__name__, exponent)
    args = (input,) if exponent is None else (input, exponent)
    if not isinstance(degree, int | float) or degree == 0:
        engine.refuse(function, "with an exponent that is not a number above or below zero")
    if degree < 0:
        constant: Tensor = normaliser(engine, function, *args)
        return constant
    return scaled_gradient(function(*args), 1.0 / degree)


@register_rule("var", "var_mean")
def variance(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Homogeneous of degree two; a mean given along with it, of degree one."""
    out = function(*args, **kwargs)
    return scaled_gradient(out, 0.5) if isinstance(out, Tensor) else (scaled_gradient(out[0], 0.5), out[1])


@register_rule("prod")
def product(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """An equal share for each factor."""
    out: Tensor = function(input, *args, **kwargs)
    return scaled_gradient(out, out.numel() / max(1, input.numel()))


@register_rule("bilinear")
def bilinear(
    engine: Engine, function: Any, first: Tensor, second: Tensor, weight: Tensor, bias: Any = None
) -> Tensor:
    """Half each, and the bias its own."""
    both = is_live(first) and is_live(second)
    out: Tensor = function(first, second, weight, bias)
    out = scaled_gradient(out, 0.5) if both else out
    if bias is not None:
        engine.ledger.keep("bias", bias, out)
    return out


@register_rule("glu")
def glu(engine: Engine, function: Any, input: Tensor, dim: int = -1) -> Tensor:
    """A signal times a sigmoid gate."""
    signal, gate = input.chunk(2, dim)
    with torch.no_grad():
        out = function(input, dim)
    if engine.composite.gates == "signal":
        return with_gradient_of(signal * torch.sigmoid(gate).detach(), out)
    with engine:
        product = signal * torch.sigmoid(gate)
    return with_gradient_of(product, out)


def _shared(engine: Engine, function: Any, args: Any, kwargs: Any) -> Tensor:
    args, kwargs = _without_gates(engine, args, kwargs)
    factors = len(live_tensors(args)) + len(live_tensors(kwargs))
    if factors > 1:
        return scaled_gradient(function(*args, **kwargs), 1.0 / factors)
    weights = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and not is_live(a)]
    if weights and engine.name_of_parameter(weights[0]) is not None:
        return _weighted(engine, function, args, kwargs, weights[0])
    out: Tensor = function(*args, **kwargs)  # a sum weighted by constants, such as attention
    return apply_affine(engine, out, out, None, engine.composite.attention)


def _without_gates(
    engine: Engine, args: Any, kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with gates as constants; operands may come as one list, as in `einsum`."""
    flat = [part for a in args for part in (a if isinstance(a, list | tuple) else [a])]
    plain = iter(engine.without_gates([*flat, *kwargs.values()]))
    given = tuple([next(plain) for _ in a] if isinstance(a, list | tuple) else next(plain) for a in args)
    return given, dict(zip(kwargs, plain, strict=True))


def _weighted(engine: Engine, function: Any, args: Any, kwargs: Any, weight: Tensor) -> Tensor:
    """A linear layer without a bias, written as a product with a parameter."""
    rule = engine.rule_for(weight)
    out: Tensor = function(*args, **kwargs)
    if not rule.gamma:
        return apply_affine(engine, out, out, None, rule)
    stretched = weight + rule.gamma * weight.clamp(min=0)
    named = {key: stretched if value is weight else value for key, value in kwargs.items()}
    carrier = function(*(stretched if a is weight else a for a in args), **named)
    return apply_affine(engine, carrier, out, None, rule)
