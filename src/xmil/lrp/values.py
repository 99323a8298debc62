"""Building blocks of rules: values with a replaced gradient, the ledger, and relevance at a tensor.

With a reference pass, activations are measured from it: f(x) - f(x0) goes to x - x0.
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
    """The value `out`, bit for bit, whose backward gives x back(gradient, *saved)."""
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
    """The tensor, with its gradient laid out contiguously (convolutions are far slower otherwise)."""
    return ruled(tensor, tensor, Tensor.contiguous)


def stabilised(denominator: Tensor, epsilon: float) -> Tensor:
    """denominator + epsilon * sign, with sign(0) = 1; one if that is zero, as nothing is shared there."""
    sign = 2 * (denominator >= 0).to(denominator.dtype) - 1
    total = denominator + epsilon * sign
    return torch.where(total == 0, torch.ones_like(total), total)


def accounted(constant: Tensor, anchor: Tensor, book: Callable[[Tensor], None]) -> Tensor:
    """Make a constant a live tensor; the backward pass calls `book` with its gradient.

    `anchor` is any live tensor of the same operation: without one the backward pass would not reach it.
    """
    return _apply(_Accounted, constant, anchor, book)


def without_rule(out: Any, message: str) -> Any:
    """Mark a result with an error that is raised if relevance would pass it."""
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


# The ledger of a backward pass: relevance that does not reach the input.

SHARES = ("class_token", "bias", "epsilon", "cut")


class Ledger:
    """Sums of the relevance that constants and stabilisers keep, on the tensors' own device."""

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
        """Fetch the shares by name and other scalars together, with one wait for the device."""
        numbers = fetch([*self._totals.values(), *(scalar.detach().double() for scalar in scalars)])
        shares = dict.fromkeys(SHARES, 0.0) | dict(zip(self._totals, numbers, strict=False))
        return shares, numbers[len(self._totals) :]

    def keep(self, share: str, constant: Tensor | float, out: Tensor) -> None:
        """Book what a constant term of `out` will receive: the sum of constant times gradient."""
        if not out.requires_grad:  # computed under no_grad: no gradient will come
            return
        if isinstance(constant, Tensor):
            constant = constant.detach()
        out.register_hook(lambda gradient: self.add(share, product_sum(constant, gradient)))


def fetch(scalars: Sequence[Tensor]) -> list[float]:
    """Scalars as numbers, with one copy from each device they are on."""
    numbers = [0.0] * len(scalars)
    for device in {scalar.device for scalar in scalars}:
        index = [i for i, scalar in enumerate(scalars) if scalar.device == device]
        for i, number in zip(index, torch.stack([scalars[i] for i in index]).tolist(), strict=True):
            numbers[i] = number
    return numbers


def product_sum(constant: Tensor | float, gradient: Tensor) -> Tensor:
    """Sum of constant * gradient; the constant broadcasts, infinities count as zero.

    An infinite constant only occurs at entries that get no gradient from a softmax.
    """
    if not isinstance(constant, Tensor):  # a tensor would wait for the device
        value = float(constant)
        return gradient.real.sum().double() * (value if math.isfinite(value) else 0.0)
    if gradient.is_complex() or constant.is_complex():  # both parts' gradients in one number
        return (gradient.conj() * constant).real.sum().double()
    constant = constant.to(gradient.dtype).nan_to_num(posinf=0.0, neginf=0.0)
    if constant.shape == gradient.shape:
        return (gradient * constant).sum()
    return (gradient.sum_to_size(constant.shape).double() * constant.double()).sum()


# Relevance at a tensor: its values times their gradient under the rules.

BLOCK_ROWS = {"cpu": 4096, "cuda": 65_536}  # fits the cache; keeps a GPU busy


class Entry(NamedTuple):
    """The output of a linear layer of the explained input, before its bias.

    The gradient at this output, times the output, sums to the relevance of the instance, so the backward pass
    can stop here. It goes through the layer's weights only for single features, or if a rule divides by
    numbers that may be small.
    """

    out: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Flow:
    """A tensor and its gradient under the rules; their product is its relevance.

    `direct` is the gradient that reaches the tensor without passing an entry, or None.
    """

    tensor: Tensor
    direct: Tensor | None
    by_entry: Sequence[tuple[Entry, Tensor | None]] = ()

    @cached_property
    def gradient(self) -> Tensor | None:
        """The full gradient; None if no gradient reaches the tensor."""
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
        """Relevance of the baseline in place of each instance: baseline . gradient, (b, n)."""
        total = self._sum(
            lambda entry, gradient: _scores(gradient, baseline @ entry.weight.mT),
            lambda gradient: _scores(gradient, baseline),
        )
        return self.tensor.new_zeros(self.tensor.shape[:-1]) if total is None else total

    def _sum(
        self, entered: Callable[[Entry, Tensor], Tensor], direct: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """The sum over all gradients that reach the tensor; None if none does."""
        parts = [entered(entry, gradient) for entry, gradient in self.by_entry if gradient is not None]
        parts += [] if self.direct is None else [direct(self.direct)]
        return reduce(torch.add, parts) if parts else None


def _product_rows(tensor: Tensor, gradient: Tensor) -> Tensor:
    """The product summed over the last dimension."""
    block = BLOCK_ROWS.get(tensor.device.type, BLOCK_ROWS["cpu"])
    rows = zip(tensor.split(block, dim=-2), gradient.split(block, dim=-2), strict=True)
    return torch.cat([(t * g).sum(dim=-1) for t, g in rows], dim=-1)


def _scores(gradient: Tensor, baseline: Tensor) -> Tensor:
    return gradient @ baseline if baseline.ndim == 1 else (gradient * baseline).sum(dim=-1)


# Activations against a reference pass. The tangent rules measure every neuron from zero. With a baseline,
# instances are measured from an ordinary one, and neurons must be too: otherwise one that also fires for the
# baseline keeps or loses a share of it.

_NAMES = "relu leaky_relu gelu silu mish elu selu celu softplus tanh softsign tanhshrink hardswish"
ELEMENTWISE = frozenset(_NAMES.split())
ReferencePass = list[tuple[str, Tensor]]  # name and input of each activation, in order
CLOSE = 1e-4  # if x and x0 are closer, the tangent replaces the secant


class Activations(ABC):
    """Override for the engine's rules of activations."""

    @abstractmethod
    def __call__(self, ledger: Ledger, function: Any, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Return a ruled result, or None for the engine's own rule."""

    def ahead(self, k: int) -> ReferencePass | None:  # noqa: ARG002  # used by Secants
        """The references of the next k activations, if each applies to any part of a sequence."""
        return None


class Recorder(Activations):
    """Records the inputs of the activations of a reference pass, in order."""

    def __init__(self) -> None:
        self.inputs: ReferencePass = []

    def __call__(self, ledger: Ledger, function: Any, name: str, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        """Record the input; the engine's own rule applies."""
        self.inputs.append((name, args[0].detach()))


class Secants(Activations):
    """Measures the k-th activation from the k-th of the reference pass, if their shapes agree."""

    def __init__(self, reference: ReferencePass) -> None:
        self._inputs = reference
        self._next = 0

    @property
    def matched(self) -> bool:
        """Whether the pass ran as many activations as were recorded."""
        return self._next == len(self._inputs)

    def ahead(self, k: int) -> ReferencePass | None:
        """The references of the next k activations, if each is of a single instance."""
        references = self._inputs[self._next : self._next + k]
        single = all(reference.ndim == 3 and reference.shape[1] == 1 for _, reference in references)
        return references if single and len(references) == k else None

    def skip(self, k: int) -> None:
        """Skip the references of the next k activations, which the caller handles."""
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
    """f(x), and its slope from the reference to x; the tangent if the two are close."""
    out = function(x)
    step = x - reference
    slope = (out - function(reference)) / step
    if x.device.type == "cuda":  # all tangents are faster there than an index of a few
        h = CLOSE * (1 + x.abs())
        tangent = (function(x + h) - function(x - h)) / (2 * h)
        return out, torch.where(step.abs() <= CLOSE * (1 + reference.abs()), tangent, slope)
    close = (step.abs() <= CLOSE * (1 + reference.abs())).nonzero(as_tuple=True)  # few
    if len(close[0]):
        points = x[close]
        h = CLOSE * (1 + points.abs())
        slope[close] = (function(points + h) - function(points - h)) / (2 * h)
    return out, slope
