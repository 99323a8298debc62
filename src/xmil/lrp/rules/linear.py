"""Linear layers and products: epsilon and gamma rules, equal shares of live factors, constant normalisers.

Also other linear or jointly homogeneous operations: solving, mixing, reducing, distances.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.core.errors import UnsupportedError
from xmil.lrp.operations import (
    PRODUCTS,
    AffineRule,
    Function,
    is_live,
    live_tensors,
    name_of,
    register_rule,
)
from xmil.lrp.rules.activations import logistic
from xmil.lrp.values import (
    contiguous_gradient,
    product_sum,
    ruled,
    scaled_gradient,
    stabilised,
    with_gradient_of,
)

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
    """y = beta b + alpha x W: a linear layer, or attention with a bias."""
    beta, alpha = kwargs.pop("beta", 1), kwargs.pop("alpha", 1)
    first, second = (*factors, *kwargs.values())
    weight = second if is_live(first) else first
    rule = engine.rule_for(weight)
    out: Tensor = function(input, first, second, beta=beta, alpha=alpha)
    if function.__name__ == "addmm" and not (is_live(weight) or is_live(input) or rule.gamma or alpha != 1):
        share = engine.share_of(input)
        carrier = out if rule.is_gradient else first @ second
        return apply_affine(engine, carrier, out, input * beta, rule, share)
    product = _PRODUCTS[name_of(function)]
    return by_parts(engine, out, lambda: beta * input + alpha * product(first, second))


_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "addmm": torch.matmul,
    "addmv": torch.matmul,
    "addr": torch.outer,
    "baddbmm": torch.bmm,
    "addbmm": lambda first, second: torch.bmm(first, second).sum(dim=0),
}


@register_rule(*[f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)])
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
    engine.check_constant(name_of(function), weight=weight, bias=bias)
    return _affine(
        engine,
        lambda x, w, b: contiguous_gradient(function(x, w, b, *args, **kwargs)),
        input,
        weight,
        bias,
        bias_shape=(-1, *[1] * (weight.ndim - 2)),
    )


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
    # computed without the bias, not by subtracting it: denominators near zero keep their digits
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
    """The sum of each result's terms, with those of its own sign strengthened, and the bias."""
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
    """The output, with relevance passed to the carrier by the rule; the bias's part is booked to `share`."""
    if rule.is_gradient:
        if bias is not None:
            engine.ledger.keep(share, bias, out)
        return out
    ledger = engine.ledger

    def back(gradient: Tensor, inputs: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        """Pass to x rho(w) its share of the stabilised denominator."""
        absorbed = bias if rule.bias == "absorb" else None
        denominator = inputs if absorbed is None else inputs + absorbed
        received = out * gradient
        passed = received / stabilised(denominator, rule.epsilon)
        zero = passed.new_zeros((), dtype=torch.float64)
        to_bias = zero if absorbed is None else product_sum(absorbed, passed)
        ledger.add(share, to_bias)
        ledger.add("epsilon", (received - inputs * passed).sum().double() - to_bias)
        return passed

    return ruled(carrier, out, back, carrier, out.detach(), bias)


@register_rule("mul")
def mul(engine: Engine, function: Any, input: Any, other: Any) -> Tensor:
    """Linear for a constant factor; of two live factors, one is a gate or each gets half."""
    first, second = engine.without_gates([input, other])
    out: Tensor = function(first, second)
    return scaled_gradient(out, 0.5) if is_live(first) and is_live(second) else out


@register_rule(*PRODUCTS)
def multilinear(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Linear in each live factor: each gets an equal share."""
    flat = [part for a in args for part in (a if isinstance(a, list | tuple) else [a])]  # lists, as in einsum
    factors = iter(engine.without_gates([*flat, *kwargs.values()]))
    args = tuple([next(factors) for _ in a] if isinstance(a, list | tuple) else next(factors) for a in args)
    kwargs = dict(zip(kwargs, factors, strict=True))
    n_live = len(live_tensors(args)) + len(live_tensors(kwargs))
    if n_live > 1:
        return scaled_gradient(function(*args, **kwargs), 1.0 / n_live)
    out: Tensor = function(*args, **kwargs)
    weights = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and not is_live(a)]
    if not weights or engine.name_of_parameter(weights[0]) is None:  # weighted by constants, like attention
        return apply_affine(engine, out, out, None, engine.composite.attention)
    weight, rule = weights[0], engine.rule_for(weights[0])  # a linear layer without a bias
    if not rule.gamma:
        return apply_affine(engine, out, out, None, rule)
    stretched = weight + rule.gamma * weight.clamp(min=0)
    named = {key: stretched if value is weight else value for key, value in kwargs.items()}
    carrier = function(*(stretched if a is weight else a for a in args), **named)
    return apply_affine(engine, carrier, out, None, rule)


@register_rule("div")
def div(engine: Engine, function: Function, input: Any, other: Any, **kwargs: Any) -> Tensor:
    """The denominator is a constant normaliser. A rounded fraction is a step function: constant."""
    if kwargs.get("rounding_mode") is not None:
        with torch.no_grad():
            return function(input, other, **kwargs)
    if (sigmoid := logistic(engine, input, other, lambda: function(input, other))) is not None:
        return sigmoid
    return function(input, other.detach() if is_live(other) else other)


@register_rule("rdiv", "reciprocal", "rsqrt", "inverse", "linalg_inv", "pinverse", "linalg_pinv")
def normaliser(engine: Engine, function: Function, *args: Any, **kwargs: Any) -> Tensor:
    """One over a live tensor is a constant normaliser."""
    if name_of(function) in ("rdiv", "reciprocal"):
        numerator = args[1] if len(args) > 1 else 1
        sigmoid = logistic(engine, numerator, args[0], lambda: function(*args, **kwargs))
        if sigmoid is not None:
            return sigmoid
    with torch.no_grad():
        return function(*args, **kwargs)


@register_rule("pow", "square", "sqrt", "float_power")
def power(engine: Engine, function: Any, input: Any, exponent: Any = None) -> Tensor:
    """Homogeneous of degree p: gradient / p conserves relevance; a negative power is a normaliser."""
    degree = {"square": 2.0, "sqrt": 0.5}.get(function.__name__, exponent)
    args = (input,) if exponent is None else (input, exponent)
    if isinstance(degree, Tensor) and not is_live(degree) and degree.numel() and is_live(input):
        if bool((degree > 0).all()):  # such as the learned exponent of a generalised mean
            out: Tensor = function(*args)
            return ruled(out, out, lambda gradient, degree: gradient / degree, degree)
        degree = -1.0 if bool((degree < 0).all()) else degree
    if not isinstance(degree, int | float) or degree == 0:
        engine.refuse(function, "with an exponent that depends on the input, is zero or has both signs")
    if degree < 0:
        constant: Tensor = normaliser(engine, function, *args)
        return constant
    return scaled_gradient(function(*args), 1.0 / degree)


@register_rule("var", "var_mean")
def variance(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Homogeneous of degree two; the mean of `var_mean` is of degree one."""
    out = function(*args, **kwargs)
    return scaled_gradient(out, 0.5) if isinstance(out, Tensor) else (scaled_gradient(out[0], 0.5), out[1])


@register_rule("prod")
def product(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """An equal share for each factor."""
    out: Tensor = function(input, *args, **kwargs)
    return scaled_gradient(out, out.numel() / max(1, input.numel()))


@register_rule("cumprod")
def cumulative_product(
    engine: Engine, function: Any, input: Tensor, dim: int, *args: Any, **kwargs: Any
) -> Tensor:
    """An equal share for each factor up to that position."""
    out: Tensor = function(input, dim, *args, **kwargs)
    shape = [1] * out.ndim
    shape[dim] = -1
    factors = torch.arange(1, out.shape[dim] + 1, device=out.device).reshape(shape)
    return ruled(out, out, lambda gradient, factors: gradient / factors, factors)


@register_rule("cov", "corrcoef")
def covariance(engine: Engine, function: Any, input: Tensor, **kwargs: Any) -> Tensor:
    """Homogeneous of degree two; the deviations in a correlation are constants."""
    out: Tensor = function(input, **kwargs)
    if name_of(function) == "cov":
        return scaled_gradient(out, 0.5)
    with torch.no_grad():
        products = torch.cov(input)
        ratio = out / stabilised(products, 0.0)
    return with_gradient_of(scaled_gradient(torch.cov(input), 0.5) * ratio, out)


@register_rule("log_softmax", "special_log_softmax")
def log_softmax(
    engine: Engine, function: Any, input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """x - logsumexp(x), by the rules of its parts."""
    dim = (0 if input.ndim in (0, 1, 3) else 1) if dim is None else dim  # torch's default
    with torch.no_grad():
        out = function(input, dim, *args, **kwargs)
    return by_parts(
        engine, out, lambda: input.to(out.dtype) - torch.logsumexp(input.to(out.dtype), dim, True)
    )


@register_rule("logaddexp")
def logaddexp(engine: Engine, function: Any, input: Tensor, other: Tensor) -> Tensor:
    """`logsumexp` of the two."""
    with torch.no_grad():
        out = function(input, other)
    return by_parts(
        engine, out, lambda: torch.logsumexp(torch.stack(torch.broadcast_tensors(input, other)), 0)
    )


@register_rule("grid_sample")
def grid_sample(engine: Engine, function: Any, input: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Linear in the image; the sampled positions are constants."""
    return function(input, grid.detach(), *args, **kwargs)


@register_rule("bilinear")
def bilinear(
    engine: Engine, function: Any, first: Tensor, second: Tensor, weight: Tensor, bias: Any = None
) -> Tensor:
    """Half for each input; the bias keeps its share."""
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
    return by_parts(engine, out, lambda: signal * torch.sigmoid(gate))


def by_parts(engine: Engine, out: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """The value `out`, with the gradient of `compute`, whose operations each follow their own rule."""
    with engine:
        carrier = compute()
    return with_gradient_of(carrier, out) if is_live(carrier) else out


# Other operations that are linear, or homogeneous in all arguments.


@register_rule("linalg_solve", "linalg_solve_triangular", "cholesky_solve")
def solve(engine: Engine, function: Function, *args: Any, **kwargs: Any) -> Tensor:
    """Linear in the right-hand side; the matrix is a constant, like a denominator."""
    values = {name: kwargs.pop(name) for name in ("A", "B", "L") if name in kwargs}
    matrix, right = (*args[:2], *(values[name] for name in sorted(values)))
    if function.__name__ == "cholesky_solve":
        matrix, right = right, matrix
    if is_live(matrix):
        matrix = matrix.detach()
    pair = (right, matrix) if function.__name__ == "cholesky_solve" else (matrix, right)
    return function(*pair, *args[2:], **kwargs)


@register_rule("lerp")
def lerp(engine: Engine, function: Any, input: Tensor, end: Tensor, weight: Any) -> Tensor:
    """(1 - w) a + w b, by the rules of its parts."""
    with torch.no_grad():
        out = function(input, end, weight)
    return by_parts(engine, out, lambda: (1 - weight) * input + weight * end)


@register_rule("addcmul", "addcdiv")
def addcmul(
    engine: Engine, function: Any, input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1
) -> Tensor:
    """a + value b c, or b / c, by the rules of its parts."""
    with torch.no_grad():
        out = function(input, tensor1, tensor2, value=value)
    if function.__name__ == "addcmul":
        return by_parts(engine, out, lambda: input + value * (tensor1 * tensor2))
    return by_parts(engine, out, lambda: input + value * (tensor1 / tensor2))


@register_rule("scatter_reduce", "index_reduce")
def scatter_reduce(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Sums, means and extremes into a tensor: homogeneous in the target and the source together."""
    if "prod" in (*args, *kwargs.values()):
        engine.refuse(function, "with reduce='prod'")
    return jointly_homogeneous(engine, function, *args, **kwargs)


@register_rule("cdist", "dist", "pdist", "hypot", "block_diag", "cartesian_prod", "meshgrid")
def distance(engine: Engine, function: Function, *args: Any, **kwargs: Any) -> Tensor:
    """Jointly homogeneous in all points."""
    values = [v for v in (*args, *kwargs.values()) if not isinstance(v, bool)]
    if any(isinstance(v, int | float) and v == 0 for v in values):
        with torch.no_grad():  # p = 0 counts: a step function
            return function(*args, **kwargs)
    return jointly_homogeneous(engine, function, *args, **kwargs)


@register_rule("norm", "vector_norm", "linalg_norm", "linalg_vector_norm")
def norm(engine: Engine, function: Function, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Homogeneous of degree one, except the norm of order zero, which counts."""
    order = [kwargs[key] for key in ("ord", "p") if key in kwargs] or args[:1]
    if any(not isinstance(value, Tensor) and value == 0 for value in order):
        with torch.no_grad():
            return function(input, *args, **kwargs)
    return function(input, *args, **kwargs)


@register_rule("pairwise_distance")
def pairwise_distance(
    engine: Engine,
    function: Any,
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    eps: float = 1e-6,
    keepdim: bool = False,
) -> Tensor:
    """The norm of x - y + eps."""
    with torch.no_grad():
        out = function(x1, x2, p, eps, keepdim)
    norm = partial(torch.linalg.vector_norm, ord=p, dim=-1, keepdim=keepdim)
    return by_parts(engine, out, lambda: norm(x1 - x2 + eps))


def jointly_homogeneous(engine: Engine, function: Function, *args: Any, **kwargs: Any) -> Tensor:
    """f(t x, t y) = t f(x, y): the gradient is the rule, and constants keep constant times gradient."""
    anchor = (live_tensors(args) + live_tensors(kwargs))[0]

    def accounted(value: Any) -> Any:
        constant = isinstance(value, Tensor) and value.is_floating_point() and not is_live(value)
        return engine.accounted(value, anchor) if constant else value

    return function(*map(accounted, args), **{name: accounted(v) for name, v in kwargs.items()})


@register_rule("cosine_similarity")
def cosine_similarity(
    engine: Engine, function: Any, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8
) -> Tensor:
    """A product of two directions, whose lengths are constants."""
    with torch.no_grad():
        out = function(x1, x2, dim, eps)
    direction = partial(F.normalize, dim=dim, eps=eps)
    return by_parts(engine, out, lambda: (direction(x1) * direction(x2)).sum(dim=dim))


@register_rule("index_fill")
def index_fill(engine: Engine, function: Any, input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """The filled-in constant keeps its share."""
    out: Tensor = function(input, dim, index, value)
    return engine.keep_constants(out, lambda x, v: x.index_fill(dim, index, v), input, value)


@register_rule("fill_diagonal")
def fill_diagonal(
    engine: Engine, function: Any, input: Tensor, fill_value: Any, wrap: bool = False
) -> Tensor:
    """The filled-in constant keeps its share."""
    out: Tensor = function(input, fill_value, wrap)
    return engine.keep_constants(out, lambda x, v: function(x, v, wrap), input, fill_value)


@register_rule("fill", "zero")
def fill(engine: Engine, function: Function, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Overwrite with a constant or a live value; the old values get nothing."""
    with torch.set_grad_enabled(bool(live_tensors([args, kwargs]))):
        return function(input, *args, **kwargs)


@register_rule("complex")
def complex_of(engine: Engine, function: Any, real: Tensor, imag: Tensor) -> Tensor:
    """Two real tensors side by side."""
    return engine.keep_constants(function(real, imag), function, real, imag)
