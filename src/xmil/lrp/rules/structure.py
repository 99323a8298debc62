"""Sums, joins and selections with constants: the constants' shares are booked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xmil.lrp.ledger import product_sum
from xmil.lrp.operations import is_live, register_rule

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine


@register_rule("add", "sub", "rsub")
def add(engine: Engine, function: Any, first: Any, second: Any, *, alpha: float = 1) -> Tensor:
    """A live term gets what it adds; a constant term's share is the bias's."""
    extra = {} if alpha == 1 else {"alpha": alpha}
    signs = _signs(function.__name__, alpha)
    constants = [(sign, term) for sign, term in zip(signs, (first, second), strict=True) if not is_live(term)]
    constants = [(sign, term.clone() if isinstance(term, Tensor) else term) for sign, term in constants]
    out: Tensor = function(first, second, **extra)
    for sign, term in constants:
        engine.ledger.keep("bias", sign * term, out)
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
    tokens = [(end, t.detach()) for end, t in zip(ends, tensors, strict=True) if not is_live(t) and t.numel()]

    def book(gradient: Tensor) -> None:
        for end, token in tokens:
            part = gradient.narrow(dim, end - token.shape[dim], token.shape[dim])
            engine.ledger.add("class_token", product_sum(token, part))

    if tokens and out.requires_grad:
        out.register_hook(book)
    return out


@register_rule("stack", "hstack", "vstack", "dstack", "column_stack")
def stack(engine: Engine, function: Any, tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
    """As `cat`."""
    tensors = list(tensors)
    out: Tensor = function(tensors, *args, **kwargs)
    if not all(is_live(tensor) for tensor in tensors):
        with torch.no_grad():
            tokens = function([t.detach() * 0 if is_live(t) else t for t in tensors], *args, **kwargs)
        engine.ledger.keep("class_token", tokens, out)
    return out


@register_rule("where")
def where(engine: Engine, function: Any, condition: Tensor, first: Any, second: Any) -> Tensor:
    """A choice; where it falls on a constant, that keeps the share."""
    out: Tensor = function(condition, first, second)
    with torch.no_grad():
        constant = function(condition, _zero_if_live(first), _zero_if_live(second))
    engine.ledger.keep("bias", constant, out)
    return out


@register_rule("max", "min", "maximum", "minimum", "fmax", "fmin")
def extremum(engine: Engine, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Along a dimension: a selection. Of two tensors: a choice, where a constant may keep the share."""
    out = function(input, *args, **kwargs)
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor):
        with torch.no_grad():
            constants = torch.zeros_like(out)
            for term in (input, other):
                if not is_live(term):
                    constants = torch.where(out == term, out, constants)
        engine.ledger.keep("bias", constants, out)
    return out


@register_rule("masked_fill")
def masked_fill(engine: Engine, function: Any, input: Tensor, mask: Tensor, value: Any) -> Tensor:
    """The filled-in constant keeps its share."""
    if is_live(value):
        engine.refuse(function, "with a value that depends on the input")
    out: Tensor = function(input, mask, value)
    engine.ledger.keep(
        "bias", torch.where(mask, torch.as_tensor(value, dtype=out.dtype, device=out.device), 0.0), out
    )
    return out


@register_rule("pad")
def pad(
    engine: Engine, function: Any, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> Tensor:
    """Padding with a constant other than zero keeps its share."""
    out: Tensor = function(input, pad, mode, value)
    if value:
        with torch.no_grad():
            engine.ledger.keep("bias", function(torch.zeros_like(input), pad, mode, value), out)
    return out


@register_rule("copy_")
def copy(engine: Engine, function: Any, target: Tensor, source: Tensor, *args: Any) -> Tensor:
    """Writing into a tensor, or a part of one; what of a constant remains around it keeps its share."""
    base = target._base if target._is_view() and target._base is not None else target
    was_live, rest = base.requires_grad, base.detach().clone()
    out: Tensor = function(target, source, *args)
    if base is not target and not was_live:
        rest.as_strided(
            target.shape, target.stride(), target.storage_offset() - base.storage_offset()
        ).zero_()
        engine.ledger.keep("bias", rest, base)
    return out


@register_rule("__setitem__")
def setitem(engine: Engine, function: Any, target: Tensor, index: Any, value: Any) -> None:
    """Writing into a constant buffer makes it live; what of the buffer remains keeps its share."""
    before = target.detach().clone()
    was_live = target.requires_grad
    function(target, index, value)
    with torch.no_grad():
        kept = torch.zeros_like(before) if was_live else before
        function(kept, index, 0.0 if is_live(value) else value)
    if target.requires_grad:
        engine.ledger.keep("bias", kept, target)


@register_rule(
    "scatter",
    "index_put",
    "index_copy",
    "index_add",
    "scatter_add",
)
def scatter(engine: Engine, function: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Writing live values into a tensor; a constant target's remainder keeps its share."""
    constant = not is_live(target)
    before = target.detach().clone() if constant else target
    out: Tensor = function(target, *args, **kwargs)
    if constant:
        blank = [a.detach() * 0 if is_live(a) else a for a in args]
        with torch.no_grad():
            rest = function(
                before, *blank, **{k: v.detach() * 0 if is_live(v) else v for k, v in kwargs.items()}
            )
        engine.ledger.keep("bias", rest, out)
    return out


def _zero_if_live(value: Any) -> Any:
    return torch.zeros_like(value) if is_live(value) else value
