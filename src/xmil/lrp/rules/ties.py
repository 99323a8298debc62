"""Selections by rank: equal values share alike, where autograd gives all to the one that was picked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xmil.lrp.operations import dim_of, name_of, register_rule

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine

_PLACES = {"topk": 1, "kthvalue": 1}  # of `dim`, behind the tensor


@register_rule("topk", "sort", "kthvalue", "mode", "median", "nanmedian", "msort")
def ranked(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A selection; what the picked ones receive is the mean over all that are equal to them."""
    name = name_of(function)
    default = {"median": None, "nanmedian": None, "msort": 0}.get(name, -1)
    dim = dim_of(args, kwargs, place=_PLACES.get(name, 0), default=default)
    if dim is None or input.ndim == 0 or not input.numel():  # of all elements: autograd shares already
        return function(input, *args, **kwargs)
    return function(_Tied.apply(input, dim), *args, **kwargs)  # type: ignore[no-untyped-call]


@register_rule(*[f"adaptive_max_pool{n}d{end}" for n in (1, 2, 3) for end in ("", "_with_indices")])
def pooled(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Over all places: as `amax`. Over windows a tie goes to the first."""
    out = function(input, *args, **kwargs)
    values = out if isinstance(out, Tensor) else out[0]
    dims = tuple(range(-int(name_of(function).partition("pool")[2][0]), 0))
    if any(values.shape[dim] != 1 for dim in dims):
        return out
    largest = input.amax(dims, keepdim=True)
    return largest if isinstance(out, Tensor) else (largest.clone(), *out[1:])


class _Tied(torch.autograd.Function):
    """The tensor itself; gradients become their mean over equal values along a dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.dim = dim
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,), dim = ctx.saved_tensors, ctx.dim
        order, group = _groups(x, dim)
        wide = torch.promote_types(x.dtype, torch.float32)  # half precision cannot count far
        zeros = torch.zeros_like(x, dtype=wide)
        sums = zeros.scatter_add(dim, group, gradients[0].to(wide).gather(dim, order))
        counts = zeros.scatter_add(dim, group, torch.ones_like(zeros))
        means = (sums / counts.clamp(min=1)).gather(dim, group)
        return zeros.scatter(dim, order, means).to(x.dtype), None


def _groups(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The order of the values along a dimension, and each one's group of equals, in that order."""
    ordered, order = x.sort(dim)
    n = x.shape[dim]
    steps = ordered.narrow(dim, 1, n - 1) != ordered.narrow(dim, 0, n - 1)
    return order, torch.cat([torch.zeros_like(order.narrow(dim, 0, 1)), steps.cumsum(dim)], dim)
