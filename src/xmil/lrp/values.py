"""What rules are made of: a value with another's gradient, a scaled gradient, a constant with an account."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_gradient_of(carrier: Tensor, value: Tensor) -> Tensor:
    """The value, bit for bit, with the gradient of the carrier."""
    out: Tensor = _Value.apply(carrier, value.detach())  # type: ignore[no-untyped-call]
    return out


def scaled_gradient(tensor: Tensor, factor: float) -> Tensor:
    """The tensor, with its gradient times a factor."""
    out: Tensor = _Scale.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return out


def contiguous_gradient(tensor: Tensor) -> Tensor:
    """The tensor, with its gradient laid out contiguously (convolutions are far slower on others)."""
    out: Tensor = _Contiguous.apply(tensor)  # type: ignore[no-untyped-call]
    return out


def accounted(constant: Tensor, anchor: Tensor, book: Callable[[Tensor], None]) -> Tensor:
    """The constant as a live tensor whose gradient is given to `book` in the backward pass.

    `anchor` is any live tensor of the same operation: without it the backward pass would not come by.
    """
    out: Tensor = _Accounted.apply(constant, anchor, book)  # type: ignore[no-untyped-call]
    return out


def without_rule(out: Any, message: str) -> Any:
    """A result that may go anywhere but on the way from the input to the explained output."""
    if isinstance(out, Tensor):
        return _WithoutRule.apply(out, message) if out.requires_grad else out  # type: ignore[no-untyped-call]
    if isinstance(out, list | tuple):
        parts = [without_rule(part, message) for part in out]
        return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)
    return out


def message_of(node: Any) -> str | None:
    """The message that `without_rule` left at a node of the graph."""
    return node.message if getattr(type(node), "_forward_cls", None) is _WithoutRule else None


class _Accounted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, constant: Tensor, anchor: Tensor, book: Callable[[Tensor], None]) -> Tensor:
        ctx.book = book
        return constant.view_as(constant)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.book(gradients[0])
        return None, None, None


class _WithoutRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, message: str) -> Tensor:
        ctx.message = message
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()
