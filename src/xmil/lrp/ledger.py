"""The account of a backward pass: what did not go on towards the input."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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

    def totals(self, *others: Tensor) -> tuple[dict[str, float], list[float]]:
        """The shares by name, and other scalars with them: the device is waited for once."""
        held = [*self._totals.values(), *(other.detach().double() for other in others)]
        numbers = fetched(held)
        shares = dict.fromkeys(SHARES, 0.0) | dict(zip(self._totals, numbers, strict=False))
        return shares, numbers[len(self._totals) :]

    def keep(self, share: str, constant: Tensor | float, out: Tensor) -> None:
        """Book what a constant term of `out` will receive: the sum of constant times gradient."""
        if not out.requires_grad:  # computed under no_grad: nothing will come back
            return
        if isinstance(constant, Tensor):
            constant = constant.detach()
        out.register_hook(lambda gradient: self.add(share, product_sum(constant, gradient)))


def fetched(scalars: Sequence[Tensor]) -> list[float]:
    """Scalars as numbers, with one copy from each device they are on."""
    found = [0.0] * len(scalars)
    for device in {scalar.device for scalar in scalars}:
        at = [i for i, scalar in enumerate(scalars) if scalar.device == device]
        for i, number in zip(at, torch.stack([scalars[i] for i in at]).tolist(), strict=True):
            found[i] = number
    return found


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
