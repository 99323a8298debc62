"""Autograd functions the rules share: a value with another's gradient, and a scaled gradient."""

from __future__ import annotations

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
