"""Relevance at a tensor: its values times their gradient under the rules.

A linear layer of the explained input is an entry: what reaches its output before the bias, times that output,
adds up to the relevance of the instance, so that the way back need not go through the layer's weights. Only
where single features are asked for does it, or where a rule divides by numbers that may be small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_ROWS = {"cpu": 4096, "cuda": 65_536}  # what fits a cache, and what keeps a GPU busy


class Entry(NamedTuple):
    """The output of a linear layer of the explained input, before its bias."""

    out: Tensor
    weight: Tensor

    def instances(self, gradient: Tensor) -> Tensor:
        """Relevance of each instance that came this way."""
        return _product_rows(self.out.detach(), gradient)


@dataclass(frozen=True)
class Flow:
    """A tensor and its gradient under the rules; their product is its relevance.

    `direct` is the gradient that does not come by an entry; None where nothing does.
    """

    tensor: Tensor
    direct: Tensor | None
    ways: Sequence[tuple[Entry, Tensor | None]] = ()

    @cached_property
    def gradient(self) -> Tensor | None:
        """The whole gradient; None where nothing comes back."""
        parts = [gradient @ entry.weight for entry, gradient in self._entered]
        parts += [] if self.direct is None else [self.direct]
        return reduce(torch.add, parts) if parts else None

    @property
    def features(self) -> Tensor:
        """Relevance of every number of the tensor."""
        return torch.zeros_like(self.tensor) if self.gradient is None else self.tensor * self.gradient

    @cached_property
    def instances(self) -> Tensor:
        """Relevance summed over the last dimension."""
        found = [entry.instances(gradient) for entry, gradient in self._entered]
        found += [] if self.direct is None else [_product_rows(self.tensor, self.direct)]
        return reduce(torch.add, found) if found else self._nothing

    def against(self, baseline: Tensor) -> Tensor:
        """What instances that equal the baseline would get in these places: baseline . gradient, (b, n)."""
        found = [_scores(gradient, baseline @ entry.weight.mT) for entry, gradient in self._entered]
        found += [] if self.direct is None else [_scores(self.direct, baseline)]
        return reduce(torch.add, found) if found else self._nothing

    @property
    def _entered(self) -> Iterator[tuple[Entry, Tensor]]:
        return ((entry, gradient) for entry, gradient in self.ways if gradient is not None)

    @property
    def _nothing(self) -> Tensor:
        return self.tensor.new_zeros(self.tensor.shape[:-1])


def _product_rows(tensor: Tensor, gradient: Tensor) -> Tensor:
    """Their product, summed over the last dimension."""
    block = BLOCK_ROWS.get(tensor.device.type, BLOCK_ROWS["cpu"])
    rows = zip(tensor.split(block, dim=-2), gradient.split(block, dim=-2), strict=True)
    return torch.cat([(t * g).sum(dim=-1) for t, g in rows], dim=-1)


def _scores(gradient: Tensor, baseline: Tensor) -> Tensor:
    return gradient @ baseline if baseline.ndim == 1 else (gradient * baseline).sum(dim=-1)
