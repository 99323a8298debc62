"""Sums, joins and selections with constants: the constants' shares are booked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xmil.core.errors import UnsupportedError
from xmil.lrp.ledger import product_sum
from xmil.lrp.operations import dim_of, is_live, name_of, register_rule

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine


@register_rule("add", "sub", "rsub")
def add(engine: Engine, function: Any, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """A live term gets what it adds; a constant term's share is the bias's."""
    extra = {} if alpha == 1 else {"alpha": alpha}
    signs = _signs(function.__name__, alpha)
    constants = [(sign, term) for sign, term in zip(signs, (input, other), strict=True) if not is_live(term)]
    shares = [engine.share_of(term) for _, term in constants]
    constants = [(sign, term.clone() if isinstance(term, Tensor) else term) for sign, term in constants]
    out: Tensor = function(input, other, **extra)
    for share, (sign, term) in zip(shares, constants, strict=True):
        engine.ledger.keep(share, sign * term, out)
    return out


def _signs(name: str, alpha: float) -> tuple[float, float]:
    if name in ("__rsub__", "rsub"):
        return -alpha, 1.0
    return 1.0, -alpha if name in ("sub", "subtract") else alpha


@register_rule("cat")
def cat(engine: Engine, function: Any, tensors: Any, dim: int = 0, *, axis: int | None = None) -> Tensor:
    """Constants joined to live tensors are tokens of the model's own, such as the class token."""
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
    """As `cat`."""
    tensors = list(tensors)
    out: Tensor = function(tensors, *args, **kwargs)
    engine.keep_constants(
        out, lambda *values: function(list(values), *args, **kwargs), *tensors, share="class_token"
    )
    return out


@register_rule("where")
def where(engine: Engine, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A choice; where it falls on a constant, that keeps the share."""
    values = [kwargs[name] for name in ("condition", "input", "self", "other") if name in kwargs]
    chosen, first, other = (*args, *values)
    if function is Tensor.where:  # x.where(condition, other)
        chosen, first = first, chosen
    out = torch.where(chosen, first, other)
    engine.keep_constants(out, lambda one, two: torch.where(chosen, one, two), first, other)
    return out


@register_rule("max", "min", "maximum", "minimum", "fmax", "fmin")
def extremum(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Along a dimension: ties share alike. Of two tensors: a choice, where a constant may keep the share."""
    out = function(input, *args, **kwargs)
    other = args[0] if args else kwargs.get("other")
    if not isinstance(out, Tensor):  # autograd would give a tie to one of them
        dim, extreme = dim_of(args, kwargs), torch.amax if name_of(function) == "max" else torch.amin
        values = extreme(input, dim, keepdim=out[0].ndim == input.ndim)
        return type(out)((values.clone(), out[1]))  # a copy: autograd needs the values as they are
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
    engine.keep_constants(out, lambda x, v: x.masked_fill(mask, v), input, value)
    return out


@register_rule("pad")
def pad(
    engine: Engine, function: Any, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> Tensor:
    """Padding with a constant other than zero keeps its share."""
    out: Tensor = function(input, pad, mode, value)
    engine.keep_constants(out, lambda x, v: function(x, pad, mode, v), input, value or 0.0)
    return out


@register_rule("copy_")
def copy(engine: Engine, function: Any, target: Tensor, source: Tensor, *args: Any) -> Tensor:
    """Writing into a tensor, or a part of one; what of a constant remains around it keeps its share."""
    base, part = _whole(target)
    before = _before(engine, base)
    out: Tensor = function(target, source, *args)
    _keep_written(engine, base, before, source, lambda kept, value: part(kept).copy_(value))
    if is_live(source):
        engine.marks.follow(source, out)
    return out


def _whole(target: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The tensor that `target` is a part of, and the same part of a copy of it."""
    base = target._base
    if base is None:
        return target, lambda kept: kept
    shape, stride = target.shape, target.stride()
    offset = target.storage_offset() - base.storage_offset()
    return base, lambda kept: kept.as_strided(shape, stride, offset)


@register_rule("__setitem__")
def setitem(engine: Engine, function: Any, target: Tensor, index: Any, value: Any) -> None:
    """Writing into a constant buffer makes it live; what of the buffer remains keeps its share."""
    base, part = _whole(target)
    before = _before(engine, base)
    function(target, index, value)
    _keep_written(engine, base, before, value, lambda kept, one: function(part(kept), index, one))


def _before(engine: Engine, target: Tensor) -> tuple[Tensor, str | None]:
    """The values of a tensor about to be written into, and their share if they are constants."""
    share = None if target.requires_grad else engine.share_of(target)
    return target.detach().clone(), share


def _keep_written(
    engine: Engine,
    target: Tensor,
    before: tuple[Tensor, str | None],
    value: Any,
    write: Callable[[Tensor, Any], object],
) -> None:
    """Book the constants in a tensor that was written into: its own that are left, and those written."""
    if not target.requires_grad:
        return
    kept, share = before
    engine.marks.write(value, target, was_live=share is None)
    with torch.no_grad():
        if share is not None:
            rest = kept.clone()
            write(rest, torch.zeros_like(value) if isinstance(value, Tensor) else 0.0)
            engine.ledger.keep(share, rest, target)
        if not is_live(value):
            written = torch.zeros_like(kept)
            write(written, value)
            engine.ledger.keep(engine.share_of(value), written, target)


@register_rule(
    "scatter",
    "index_put",
    "index_copy",
    "index_add",
    "scatter_add",
    "select_scatter",
    "slice_scatter",
    "diagonal_scatter",
    "masked_scatter",
)
def scatter(engine: Engine, function: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Writing values into a tensor: constants, in the target or written, keep their shares."""
    if kwargs.get("reduce") is not None:
        raise UnsupportedError(
            f"No LRP rule for 'scatter' with reduce=, which torch cannot differentiate, {engine.where()}; "
            "use scatter_reduce."
        )
    flat, rebuilt = _values_of(target, args, kwargs)
    out: Tensor = function(target, *args, **kwargs)
    engine.keep_constants(out, lambda *values: rebuilt(function, values), *flat)
    return out


def _values_of(
    target: Tensor, args: Any, kwargs: Any
) -> tuple[list[Any], Callable[[Any, Sequence[Any]], Tensor]]:
    """The arguments of a call that are values, and the call with others in their place."""
    names = [name for name, value in kwargs.items() if _is_value(value)]
    places = [i for i, value in enumerate(args) if _is_value(value)]
    values = [target, *(args[i] for i in places), *(kwargs[name] for name in names)]

    def rebuilt(function: Any, given: Sequence[Any]) -> Tensor:
        first, *others = given
        positional = list(args)
        for i, value in zip(places, others, strict=False):
            positional[i] = value
        named = {**kwargs, **dict(zip(names, others[len(places) :], strict=True))}
        out: Tensor = function(first, *positional, **named)
        return out

    return values, rebuilt


def _is_value(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
