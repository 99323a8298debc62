"""Sums, joins and selections: constants keep their shares, equal values get equal shares."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xmil.core.errors import UnsupportedError
from xmil.lrp.operations import dim_of, is_live, name_of, register_rule
from xmil.lrp.values import product_sum, ruled

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine


@register_rule("add", "sub", "rsub")
def add(engine: Engine, function: Any, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """A live term gets what it adds; the share of a constant term goes to the bias."""
    extra = {} if alpha == 1 else {"alpha": alpha}
    name = function.__name__
    signs = (1.0, -alpha if name in ("sub", "subtract") else alpha)
    if name in ("__rsub__", "rsub"):
        signs = (-alpha, 1.0)
    constants = [(sign, term) for sign, term in zip(signs, (input, other), strict=True) if not is_live(term)]
    shares = [engine.share_of(term) for _, term in constants]
    constants = [(sign, term.clone() if isinstance(term, Tensor) else term) for sign, term in constants]
    out: Tensor = function(input, other, **extra)
    for share, (sign, term) in zip(shares, constants, strict=True):
        engine.ledger.keep(share, sign * term, out)
    return out


@register_rule("cat")
def cat(engine: Engine, function: Any, tensors: Any, dim: int = 0, *, axis: int | None = None) -> Tensor:
    """Constants joined to live tensors are the model's own tokens, such as the class token."""
    tensors, dim = list(tensors), dim if axis is None else axis
    out: Tensor = function(tensors, dim)
    ends = torch.tensor([tensor.shape[dim] if tensor.numel() else 0 for tensor in tensors]).cumsum(0).tolist()
    tokens = [
        (end, t.detach(), engine.share_of(t, "class_token"))
        for end, t in zip(ends, tensors, strict=True)
        if not is_live(t) and t.numel()
    ]

    def book(gradient: Tensor) -> None:
        for end, token, share in tokens:
            part = gradient.narrow(dim, end - token.shape[dim], token.shape[dim])
            engine.ledger.add(share, product_sum(token, part))

    if tokens and out.requires_grad:
        out.register_hook(book)
    return out


@register_rule("stack", "hstack", "vstack", "dstack", "column_stack")
def stack(engine: Engine, function: Any, tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Like `cat`."""

    def join(*values: Any) -> Tensor:
        joined: Tensor = function(list(values), *args, **kwargs)
        return joined

    tensors = list(tensors)
    return engine.keep_constants(join(*tensors), join, *tensors, share="class_token")


@register_rule("where")
def where(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A choice between two values; a chosen constant keeps its share."""
    values = [kwargs[name] for name in ("condition", "input", "self", "other") if name in kwargs]
    condition, first, other = (*args, *values)
    if function is Tensor.where:  # x.where(condition, other)
        condition, first = first, condition
    out = torch.where(condition, first, other)
    return engine.keep_constants(out, lambda a, b: torch.where(condition, a, b), first, other)


@register_rule("max", "min", "maximum", "minimum", "fmax", "fmin")
def extremum(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Along a dimension ties share equally; of two tensors, a chosen constant keeps its share."""
    out = function(input, *args, **kwargs)
    other = args[0] if args else kwargs.get("other")
    if not isinstance(out, Tensor):  # autograd would give all to one of several equal values
        dim, extreme = dim_of(args, kwargs), torch.amax if name_of(function) == "max" else torch.amin
        values = extreme(input, dim, keepdim=out[0].ndim == input.ndim)
        return type(out)((values.clone(), out[1]))  # a copy: autograd needs the values unchanged
    if isinstance(other, Tensor):
        with torch.no_grad():
            for term in (input, other):
                if not is_live(term):
                    engine.ledger.keep(engine.share_of(term), torch.where(out == term, out, 0.0), out)
    return out


@register_rule("masked_fill")
def masked_fill(engine: Engine, function: Any, input: Tensor, mask: Tensor, value: Any) -> Tensor:
    """The filled-in constant keeps its share."""
    out: Tensor = function(input, mask, value)
    return engine.keep_constants(out, lambda x, v: x.masked_fill(mask, v), input, value)


@register_rule("pad")
def pad(
    engine: Engine, function: Any, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> Tensor:
    """Padding with a constant other than zero keeps its share."""
    out: Tensor = function(input, pad, mode, value)
    return engine.keep_constants(out, lambda x, v: function(x, pad, mode, v), input, value or 0.0)


@register_rule("copy_")
def copy(engine: Engine, function: Any, target: Tensor, source: Tensor, *args: Any) -> Tensor:
    """Write into a tensor or a part of it; the unwritten part of a constant target keeps its share."""
    out: Tensor = _written(engine, target, source, lambda tensor, value: function(tensor, value, *args))
    if is_live(source):
        engine.marks.follow(source, out)
    return out


@register_rule("__setitem__")
def setitem(engine: Engine, function: Any, target: Tensor, index: Any, value: Any) -> None:
    """Write into a tensor; a constant buffer becomes live, and its unwritten part keeps its share."""
    _written(engine, target, value, lambda tensor, new: function(tensor, index, new))


def _written(engine: Engine, target: Tensor, value: Any, write: Callable[[Tensor, Any], Any]) -> Any:
    """Write into a tensor or a part of it; book the constants that remain and those written."""
    base = target if target._base is None else target._base
    layout = (target.shape, target.stride(), target.storage_offset() - base.storage_offset())
    share = None if base.requires_grad else engine.share_of(base)
    values = base.detach().clone()
    out = write(target, value)
    if not base.requires_grad:
        return out
    engine.marks.write(value, base, was_live=share is None)
    with torch.no_grad():
        if share is not None:
            zero = torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
            remaining = values.clone()
            write(remaining if base is target else remaining.as_strided(*layout), zero)
            engine.ledger.keep(share, remaining, base)
        if not is_live(value):
            constants = torch.zeros_like(values)
            write(constants if base is target else constants.as_strided(*layout), value)
            engine.ledger.keep(engine.share_of(value), constants, base)
    return out


@register_rule(
    "scatter", "index_put", "index_copy", "index_add", "scatter_add", "select_scatter", "slice_scatter",
    "diagonal_scatter", "masked_scatter",
)  # fmt: skip
def scatter(engine: Engine, function: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Write values into a tensor; constants in the target or among the values keep their shares."""
    if kwargs.get("reduce") is not None:
        raise UnsupportedError(
            f"No LRP rule for 'scatter' with reduce=, which torch cannot differentiate, {engine.where()}; "
            "use scatter_reduce."
        )
    names = [name for name, value in kwargs.items() if _is_value(value)]
    value_indices = [i for i, value in enumerate(args) if _is_value(value)]
    values = [target, *(args[i] for i in value_indices), *(kwargs[name] for name in names)]

    def write(target: Any, *values: Any) -> Tensor:
        """Repeat the call with other values."""
        positional = list(args)
        for i, value in zip(value_indices, values, strict=False):
            positional[i] = value
        named = {**kwargs, **dict(zip(names, values[len(value_indices) :], strict=True))}
        written: Tensor = function(target, *positional, **named)
        return written

    return engine.keep_constants(write(*values), write, *values)


def _is_value(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


_DIM_PLACES = {"topk": 1, "kthvalue": 1}  # of `dim` among the arguments after the tensor


@register_rule("topk", "sort", "kthvalue", "mode", "median", "nanmedian", "msort")
def ranked(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A selection; all values equal to a picked one share its relevance."""
    name = name_of(function)
    default = {"median": None, "nanmedian": None, "msort": 0}.get(name, -1)
    dim = dim_of(args, kwargs, place=_DIM_PLACES.get(name, 0), default=default)
    if dim is None or input.ndim == 0 or not input.numel():  # over all elements autograd shares equally
        return function(input, *args, **kwargs)
    return function(ruled(input, input, partial(_mean_over_ties, dim=dim), input), *args, **kwargs)


def _mean_over_ties(gradient: Tensor, x: Tensor, dim: int) -> Tensor:
    """Average gradients over equal values of x along a dimension."""
    ordered, order = x.sort(dim)
    n = x.shape[dim]
    steps = ordered.narrow(dim, 1, n - 1) != ordered.narrow(dim, 0, n - 1)
    # the group of equal values that each belongs to, in sorted order
    group = torch.cat([torch.zeros_like(order.narrow(dim, 0, 1)), steps.cumsum(dim)], dim)
    wide = torch.promote_types(x.dtype, torch.float32)  # half precision counts too few
    zeros = torch.zeros_like(x, dtype=wide)
    sums = zeros.scatter_add(dim, group, gradient.to(wide).gather(dim, order))
    counts = zeros.scatter_add(dim, group, torch.ones_like(zeros))
    means = (sums / counts.clamp(min=1)).gather(dim, group)
    return zeros.scatter(dim, order, means).to(x.dtype)


@register_rule(*[f"adaptive_max_pool{n}d{end}" for n in (1, 2, 3) for end in ("", "_with_indices")])
def pooled(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Over all positions like `amax`; over windows a tie goes to the first."""
    out = function(input, *args, **kwargs)
    values = out if isinstance(out, Tensor) else out[0]
    dims = tuple(range(-int(name_of(function).partition("pool")[2][0]), 0))
    if any(values.shape[dim] != 1 for dim in dims):
        return out
    largest = input.amax(dims, keepdim=True)
    return largest if isinstance(out, Tensor) else (largest.clone(), *out[1:])
