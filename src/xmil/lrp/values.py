"""What rules are made of: values with another gradient, the account of what stays, the flow of the rest.

With a reference pass, activations are measured from it: what f(x) has over f(x0) goes to what x has over x0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor


def ruled(x: Tensor, out: Tensor, back: Callable[..., Tensor], *saved: Any) -> Tensor:
    """The value `out`, bit for bit; of its gradient, x gets back(gradient, *saved)."""
    return _apply(_Ruled, x, out.detach(), back, *saved)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)
    return out


class _Ruled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, back: Callable[..., Tensor], *saved: Any) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.back = back
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return ctx.back(gradients[0], *saved), *[None] * (2 + len(saved))


def with_gradient_of(carrier: Tensor, value: Tensor) -> Tensor:
    """The value, bit for bit, with the gradient of the carrier."""
    return ruled(carrier, value, lambda gradient: gradient)


def scaled_gradient(tensor: Tensor, factor: float) -> Tensor:
    """The tensor, with its gradient times a factor."""
    return ruled(tensor, tensor, lambda gradient: gradient * factor)


def contiguous_gradient(tensor: Tensor) -> Tensor:
    """The tensor, with its gradient laid out contiguously (convolutions are far slower on others)."""
    return ruled(tensor, tensor, Tensor.contiguous)


def stabilised(denominator: Tensor, epsilon: float) -> Tensor:
    """denominator + epsilon * sign, with sign(0) = 1; where all is zero, one (nothing is to be shared)."""
    sign = 2 * (denominator >= 0).to(denominator.dtype) - 1
    total = denominator + epsilon * sign
    return torch.where(total == 0, torch.ones_like(total), total)


def accounted(constant: Tensor, anchor: Tensor, book: Callable[[Tensor], None]) -> Tensor:
    """The constant as a live tensor whose gradient is given to `book` in the backward pass.

    `anchor` is any live tensor of the same operation: without it the backward pass would not come by.
    """
    return _apply(_Accounted, constant, anchor, book)


def without_rule(out: Any, message: str) -> Any:
    """A result that may go anywhere but on the way from the input to the explained output."""
    if isinstance(out, Tensor):
        return _apply(_WithoutRule, out, message) if out.requires_grad else out
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


# The account of a backward pass: what does not go on towards the input.

SHARES = ("class_token", "bias", "epsilon", "cut")


class Ledger:
    """Adds up the shares of relevance that constants and stabilisers keep, on the tensors' own device."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Start the next backward pass."""
        self._totals.clear()

    def add(self, share: str, amount: Tensor) -> None:
        """Book an amount (a scalar tensor)."""
        amount = amount.detach().double()
        self._totals[share] = self._totals[share] + amount if share in self._totals else amount

    def totals(self, *scalars: Tensor) -> tuple[dict[str, float], list[float]]:
        """The shares by name, and other scalars with them: the device is waited for once."""
        numbers = fetch([*self._totals.values(), *(scalar.detach().double() for scalar in scalars)])
        shares = dict.fromkeys(SHARES, 0.0) | dict(zip(self._totals, numbers, strict=False))
        return shares, numbers[len(self._totals) :]

    def keep(self, share: str, constant: Tensor | float, out: Tensor) -> None:
        """Book what a constant term of `out` will receive: the sum of constant times gradient."""
        if not out.requires_grad:  # computed under no_grad: nothing will come back
            return
        if isinstance(constant, Tensor):
            constant = constant.detach()
        out.register_hook(lambda gradient: self.add(share, product_sum(constant, gradient)))


def fetch(scalars: Sequence[Tensor]) -> list[float]:
    """Scalars as numbers, with one copy from each device they are on."""
    numbers = [0.0] * len(scalars)
    for device in {scalar.device for scalar in scalars}:
        at = [i for i, scalar in enumerate(scalars) if scalar.device == device]
        for i, number in zip(at, torch.stack([scalars[i] for i in at]).tolist(), strict=True):
            numbers[i] = number
    return numbers


def product_sum(constant: Tensor | float, gradient: Tensor) -> Tensor:
    """Sum of constant * gradient; the constant broadcasts, infinities count nothing.

    An infinite constant only ever stands where a softmax leaves no gradient.
    """
    if not isinstance(constant, Tensor):  # no tensor is made: that would wait for the device
        value = float(constant)
        return gradient.real.sum().double() * (value if math.isfinite(value) else 0.0)
    if gradient.is_complex() or constant.is_complex():  # gradients of real and imaginary part as one number
        return (gradient.conj() * constant).real.sum().double()
    constant = constant.to(gradient.dtype).nan_to_num(posinf=0.0, neginf=0.0)
    if constant.shape == gradient.shape:
        return (gradient * constant).sum()
    return (gradient.sum_to_size(constant.shape).double() * constant.double()).sum()


# Relevance at a tensor: its values times their gradient under the rules.

BLOCK_ROWS = {"cpu": 4096, "cuda": 65_536}  # what fits a cache, and what keeps a GPU busy


class Entry(NamedTuple):
    """The output of a linear layer of the explained input, before its bias.

    What reaches this output, times the output, adds up to the relevance of the instance, so the way back need
    not go through the layer's weights. It does only for single features, or if a rule divides by numbers that
    may be small.
    """

    out: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Flow:
    """A tensor and its gradient under the rules; their product is its relevance.

    `direct` is the gradient that does not come by an entry; None if nothing does.
    """

    tensor: Tensor
    direct: Tensor | None
    ways: Sequence[tuple[Entry, Tensor | None]] = ()

    @cached_property
    def gradient(self) -> Tensor | None:
        """The full gradient; None if nothing comes back."""
        return self._sum(lambda entry, gradient: gradient @ entry.weight, lambda gradient: gradient)

    @property
    def features(self) -> Tensor:
        """Relevance of every number of the tensor."""
        return torch.zeros_like(self.tensor) if self.gradient is None else self.tensor * self.gradient

    @cached_property
    def instances(self) -> Tensor:
        """Relevance summed over the last dimension."""
        total = self._sum(
            lambda entry, gradient: _product_rows(entry.out.detach(), gradient),
            lambda gradient: _product_rows(self.tensor, gradient),
        )
        return self.tensor.new_zeros(self.tensor.shape[:-1]) if total is None else total

    def against(self, baseline: Tensor) -> Tensor:
        """What instances that equal the baseline would get in these places: baseline . gradient, (b, n)."""
        total = self._sum(
            lambda entry, gradient: _scores(gradient, baseline @ entry.weight.mT),
            lambda gradient: _scores(gradient, baseline),
        )
        return self.tensor.new_zeros(self.tensor.shape[:-1]) if total is None else total

    def _sum(
        self, entered: Callable[[Entry, Tensor], Tensor], direct: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """The sum over all ways by which something comes back; None if nothing does."""
        parts = [entered(entry, gradient) for entry, gradient in self.ways if gradient is not None]
        parts += [] if self.direct is None else [direct(self.direct)]
        return reduce(torch.add, parts) if parts else None


def _product_rows(tensor: Tensor, gradient: Tensor) -> Tensor:
    """Their product, summed over the last dimension."""
    block = BLOCK_ROWS.get(tensor.device.type, BLOCK_ROWS["cpu"])
    rows = zip(tensor.split(block, dim=-2), gradient.split(block, dim=-2), strict=True)
    return torch.cat([(t * g).sum(dim=-1) for t, g in rows], dim=-1)


def _scores(gradient: Tensor, baseline: Tensor) -> Tensor:
    return gradient @ baseline if baseline.ndim == 1 else (gradient * baseline).sum(dim=-1)


# Activations against a reference pass. The tangent rules measure every neuron from zero. With a baseline,
# instances are measured from an ordinary one, and so must neurons be: else one that fires for the baseline as
# well keeps a share of it, or loses one.

_NAMES = "relu leaky_relu gelu silu mish elu selu celu softplus tanh softsign tanhshrink hardswish"
ELEMENTWISE = frozenset(_NAMES.split())
ReferencePass = list[tuple[str, Tensor]]  # what each activation got, in order
CLOSE = 1e-4  # x and x0 nearer than this have the tangent for a secant


class Activations(ABC):
    """What an engine asks at each activation."""

    @abstractmethod
    def __call__(self, ledger: Ledger, function: Any, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """A ruled result, or None for the rule that the engine has."""

    def ahead(self, k: int) -> ReferencePass | None:  # noqa: ARG002  # of the Secants
        """The references of the next k activations, if they hold for every part of a sequence."""
        return None


class Recorder(Activations):
    """Keeps what the activations of a reference pass get, in order."""

    def __init__(self) -> None:
        self.inputs: ReferencePass = []

    def __call__(self, ledger: Ledger, function: Any, name: str, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        """Keep the input; the engine's own rule applies."""
        self.inputs.append((name, args[0].detach()))


class Secants(Activations):
    """Plays the reference pass back: the k-th activation has the k-th reference, if their shapes agree."""

    def __init__(self, reference: ReferencePass) -> None:
        self._inputs = reference
        self._next = 0

    @property
    def matched(self) -> bool:
        """Whether as many activations were met as recorded."""
        return self._next == len(self._inputs)

    def ahead(self, k: int) -> ReferencePass | None:
        """The references of the next k activations, if each is of one instance alone."""
        following = self._inputs[self._next : self._next + k]
        alone = all(reference.ndim == 3 and reference.shape[1] == 1 for _, reference in following)
        return following if alone and len(following) == k else None

    def skip(self, k: int) -> None:
        """Leave the next k activations to whoever took their references."""
        self._next += k

    def __call__(self, ledger: Ledger, function: Any, name: str, args: Any, kwargs: Any) -> Tensor | None:
        k, self._next = self._next, self._next + 1
        if k >= len(self._inputs) or self._inputs[k][0] != name:
            return None
        x, reference = args[0], self._inputs[k][1]
        if reference.ndim != x.ndim:
            return None
        if any(r not in (1, s) for r, s in zip(reference.shape, x.shape, strict=True)):
            return None

        def back(gradient: Tensor, x: Tensor, out: Tensor, slope: Tensor) -> Tensor:
            ledger.add("bias", product_sum(out - slope * x, gradient))
            return gradient * slope

        with torch.no_grad():
            out, slope = _secant(lambda t: function(t, *args[1:], **kwargs), x, reference)
        return ruled(x, out, back, x, out, slope)


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
