"""Activations against a reference pass: what f(x) has over f(x0) goes to what x has over x0.

The tangent rules measure every neuron from zero. With a baseline, instances are measured from an ordinary
one, and so must neurons be: else one that fires for the baseline as well keeps a share of it, or loses one.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from xmil.lrp.ledger import Ledger, product_sum

_NAMES = "relu leaky_relu gelu silu mish elu selu celu softplus tanh softsign tanhshrink hardswish"
ELEMENTWISE = frozenset(_NAMES.split())
Recording = list[tuple[str, Tensor]]
CLOSE = 1e-4  # x and x0 nearer than this have the tangent for a secant


class Activations(Protocol):
    """What an engine asks at each activation: a ruled result, or None for the rule it has."""

    def __call__(
        self, ledger: Ledger, function: Any, name: str, args: Any, kwargs: Any, /
    ) -> Tensor | None: ...


class Recorder:
    """Keeps what the activations of a reference pass see, in order."""

    def __init__(self) -> None:
        self.seen: Recording = []

    def __call__(self, _ledger: Ledger, _function: Any, name: str, args: Any, _kwargs: Any) -> None:
        self.seen.append((name, args[0].detach()))


class Secants:
    """Plays the recording back: the k-th activation has the k-th reference, where their shapes agree."""

    def __init__(self, seen: Recording) -> None:
        self._seen = seen
        self._next = 0

    @property
    def matched(self) -> bool:
        """Whether as many activations were met as recorded."""
        return self._next == len(self._seen)

    def __call__(self, ledger: Ledger, function: Any, name: str, args: Any, kwargs: Any) -> Tensor | None:
        k, self._next = self._next, self._next + 1
        if k >= len(self._seen) or self._seen[k][0] != name:
            return None
        x, reference = args[0], self._seen[k][1]
        if not _fits(reference.shape, x.shape):
            return None
        with torch.no_grad():
            out, slope = _secant(lambda t: function(t, *args[1:], **kwargs), x, reference)
        ruled: Tensor = _Secant.apply(x, out, slope, ledger)  # type: ignore[no-untyped-call]
        return ruled


def _fits(reference: torch.Size, shape: torch.Size) -> bool:
    """Whether a reference broadcasts to a shape."""
    return len(reference) == len(shape) and all(r in (1, s) for r, s in zip(reference, shape, strict=True))


def _secant(function: Any, x: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """f(x), and its slope from the reference to x; the tangent where the two are close."""
    out = function(x)
    step = x - reference
    slope = (out - function(reference)) / step
    if x.device.type == "cuda":  # all tangents are sooner there than the places of a few
        h = CLOSE * (1 + x.abs())
        tangent = (function(x + h) - function(x - h)) / (2 * h)
        return out, torch.where(step.abs() <= CLOSE * (1 + reference.abs()), tangent, slope)
    close = (step.abs() <= CLOSE * (1 + reference.abs())).nonzero(as_tuple=True)  # few: x is seldom so near
    if len(close[0]):
        near = x[close]
        h = CLOSE * (1 + near.abs())
        slope[close] = (function(near + h) - function(near - h)) / (2 * h)
    return out, slope


class _Secant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, slope: Tensor, ledger: Ledger) -> Tensor:
        ctx.save_for_backward(x, out, slope)
        ctx.ledger = ledger
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        x, out, slope = ctx.saved_tensors
        ctx.ledger.add("bias", product_sum(out - slope * x, gradient))
        return gradient * slope, None, None, None
