"""More that is linear, or homogeneous in all its arguments: solving, mixing, reducing, distances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.lrp.operations import is_live, live_tensors, register_rule
from xmil.lrp.values import with_gradient_of

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine


@register_rule("linalg_solve", "linalg_solve_triangular", "cholesky_solve")
def solve(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Linear in the right-hand side; the matrix is a constant, as a denominator is."""
    values = {name: kwargs.pop(name) for name in ("A", "B", "L") if name in kwargs}
    matrix, right = (*args[:2], *(values[name] for name in sorted(values)))
    if function.__name__ == "cholesky_solve":
        matrix, right = right, matrix
    if is_live(matrix):
        matrix = matrix.detach()
    pair = (right, matrix) if function.__name__ == "cholesky_solve" else (matrix, right)
    out: Tensor = function(*pair, *args[2:], **kwargs)
    return out


@register_rule("lerp")
def lerp(engine: Engine, function: Any, input: Tensor, end: Tensor, weight: Any) -> Tensor:
    """(1 - w) a + w b, by the rules of its parts."""
    with torch.no_grad():
        out = function(input, end, weight)
    with engine:
        carrier = (1 - weight) * input + weight * end
    return with_gradient_of(carrier, out) if is_live(carrier) else out


@register_rule("addcmul", "addcdiv")
def addcmul(
    engine: Engine, function: Any, input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1
) -> Tensor:
    """a + value b c, or b / c, by the rules of its parts."""
    with torch.no_grad():
        out = function(input, tensor1, tensor2, value=value)
    with engine:
        part = tensor1 * tensor2 if function.__name__ == "addcmul" else tensor1 / tensor2
        carrier = input + value * part
    return with_gradient_of(carrier, out) if is_live(carrier) else out


@register_rule("scatter_reduce", "index_reduce")
def scatter_reduce(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Sums, means and extremes into a tensor: homogeneous in what is there and what comes."""
    if "prod" in (*args, *kwargs.values()):
        engine.refuse(function, "with reduce='prod'")
    return jointly_homogeneous(engine, function, *args, **kwargs)


@register_rule("cdist", "dist", "pdist", "hypot", "block_diag", "cartesian_prod", "meshgrid")
def distance(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Homogeneous in all places together: each gets what its own slope says."""
    if 0 in _numbers(args, kwargs):
        return counted(engine, function, *args, **kwargs)
    return jointly_homogeneous(engine, function, *args, **kwargs)


@register_rule("norm", "vector_norm", "linalg_norm", "linalg_vector_norm")
def norm(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Homogeneous of degree one, but for the norm of order zero, which counts."""
    order = [kwargs[key] for key in ("ord", "p") if key in kwargs] or args[:1]
    if any(not isinstance(value, Tensor) and value == 0 for value in order):
        return counted(engine, function, input, *args, **kwargs)
    out: Tensor = function(input, *args, **kwargs)
    return out


def counted(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A number of places: constant between its steps."""
    with torch.no_grad():
        out: Tensor = function(*args, **kwargs)
    return out


def _numbers(args: Any, kwargs: Any) -> list[float]:
    return [v for v in (*args, *kwargs.values()) if isinstance(v, int | float) and not isinstance(v, bool)]


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
    with engine:
        carrier = torch.linalg.vector_norm(x1 - x2 + eps, ord=p, dim=-1, keepdim=keepdim)
    return with_gradient_of(carrier, out)


def jointly_homogeneous(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """f(t x, t y) = t f(x, y): the gradient is the rule, and constants keep what their gradient gives."""
    anchor = (live_tensors(args) + live_tensors(kwargs))[0]

    def accounted(value: Any) -> Any:
        constant = isinstance(value, Tensor) and value.is_floating_point() and not is_live(value)
        return engine.accounted(value, anchor) if constant else value

    out: Tensor = function(*map(accounted, args), **{name: accounted(v) for name, v in kwargs.items()})
    return out


@register_rule("cosine_similarity")
def cosine_similarity(
    engine: Engine, function: Any, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8
) -> Tensor:
    """A product of two directions, whose lengths are constants."""
    with torch.no_grad():
        out = function(x1, x2, dim, eps)
    with engine:
        carrier = (F.normalize(x1, dim=dim, eps=eps) * F.normalize(x2, dim=dim, eps=eps)).sum(dim=dim)
    return with_gradient_of(carrier, out)


@register_rule("index_fill")
def index_fill(engine: Engine, function: Any, input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """The filled-in constant keeps its share."""
    out: Tensor = function(input, dim, index, value)
    engine.keep_constants(out, lambda x, v: x.index_fill(dim, index, v), input, value)
    return out


@register_rule("fill_diagonal")
def fill_diagonal(
    engine: Engine, function: Any, input: Tensor, fill_value: Any, wrap: bool = False
) -> Tensor:
    """The filled-in constant keeps its share."""
    out: Tensor = function(input, fill_value, wrap)
    engine.keep_constants(out, lambda x, v: function(x, v, wrap), input, fill_value)
    return out


@register_rule("fill", "zero")
def fill(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Written over with a constant; a live one goes on as itself."""
    with torch.set_grad_enabled(bool(live_tensors([args, kwargs]))):
        out: Tensor = function(input, *args, **kwargs)
    return out


@register_rule("complex")
def complex_of(engine: Engine, function: Any, real: Tensor, imag: Tensor) -> Tensor:
    """Two real tensors side by side."""
    out: Tensor = function(real, imag)
    engine.keep_constants(out, function, real, imag)
    return out
