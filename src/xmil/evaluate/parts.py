"""Outputs of a bag's nested parts, from instances that are embedded once.

A part is the first m instances of a sequence, laid out in the order of the bag; the others are removed, or
masked: their features become zeros in place. Models that pool by a softmax, a mean or a maximum give all
parts from running sums in one pass; AddMIL keeps its attention and first layer; other models, TransMIL
among them, are run on the embedded instances, the parts of one length of all sequences as one batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.methods.network import Network
from xmil.models.addmil import AddMIL
from xmil.models.base import PooledMIL
from xmil.models.pooling import MaxPool
from xmil.nn.frozen import frozen

MODES = ("remove", "mask")
BLOCK = 128  # parts that are summed at once; the temporaries grow with its square
LARGE = 1 << 18  # numbers in a bag from which batches of masked bags do not pay


class Parts(ABC):
    """The parts of one bag (1, n, d); `full` and `empty` are the logits (1, c) of all and of none of it."""

    def __init__(self, network: Network, x: Tensor, mode: str) -> None:
        self.network, self.x, self.mode = network, x, mode
        self.n = x.shape[1]
        self.full = self._full()

    @cached_property
    def empty(self) -> Tensor:
        """The logits (1, c) of none of the bag, once they are asked for."""
        with frozen(self.network.module), torch.no_grad():
            return self._empty()

    def nested(self, sequences: Tensor, sizes: Sequence[int]) -> Tensor:
        """Logits (q, len(sizes), c) of the first m instances of sequences (q, n), for each size m."""
        alike = (len(sequences), 1, -1)
        known = {self.n: self.full.expand(alike)}
        if 0 in sizes:
            known[0] = self.empty.expand(alike)
        inner = sorted({m for m in sizes if 0 < m < self.n})
        if inner:
            known.update(zip(inner, self._together(sequences, inner).split(1, dim=1), strict=True))
        return torch.cat([known[m] for m in sizes], dim=1)

    def _together(self, sequences: Tensor, sizes: list[int]) -> Tensor:
        """Logits (q, len(sizes), c) of the parts of several sequences, one after another."""
        return torch.stack([self._nested(sequence, sizes) for sequence in sequences])

    def _full(self) -> Tensor:
        return self.network(self.x)

    def _empty(self) -> Tensor:
        """The empty bag is n zero vectors."""
        return self.network(torch.zeros_like(self.x))

    @abstractmethod
    def _nested(self, sequence: Tensor, sizes: list[int]) -> Tensor:
        """Logits of the parts with the given sizes, ascending and within (0, n)."""


class PooledParts(Parts):
    """Softmax-weighted means: running sums in double precision, scaled by the running maximum."""

    def __init__(self, network: Network, x: Tensor, mode: str) -> None:
        self.model = cast(PooledMIL, network.model)
        self.h = self.model.embed(x)[0]  # (n, e)
        self.a = self.model.attend(self.h.unsqueeze(0))[0]  # (n, k)
        zero = self.model.embed(torch.zeros_like(x[:, :1]))
        self.h0, self.a0 = zero[0, 0].double(), self.model.attend(zero)[0, 0].double()  # (e,), (k,)
        super().__init__(network, x, mode)

    def _full(self) -> Tensor:
        return self.model.head((F.softmax(self.a, dim=0).T @ self.h).unsqueeze(0))

    def _empty(self) -> Tensor:
        """Equal instances share the weight: n zero vectors have the mean of one."""
        return self.model.head(self.h0.to(self.h.dtype).expand(1, len(self.a0), -1))

    def _nested(self, sequence: Tensor, sizes: list[int]) -> Tensor:
        start, pooled = 0, []
        carried = _Sums(
            top=torch.full_like(self.a0, float("-inf")).unsqueeze(0),
            total=torch.zeros_like(self.a0).unsqueeze(0),
            mean=self.h0.new_zeros(1, len(self.a0), len(self.h0)),
        )
        for block in _blocks(sizes):
            sums = self._segment_sums(sequence, [start, *block]).running(carried)
            pooled.append(self._means(sums, block))
            start, carried = block[-1], sums.last
        return self.model.head(torch.cat(pooled).to(self.h.dtype))

    def _segment_sums(self, sequence: Tensor, bounds: list[int]) -> _Sums:
        """Sums over the instances between the bounds, each scaled by its own largest attention."""
        rows, real = _segments(sequence, bounds)
        a = self.a[rows].double().masked_fill(~real.unsqueeze(-1), float("-inf"))  # (s, l, k)
        top = a.amax(dim=1)  # (s, k)
        weights = (a - top.unsqueeze(1)).exp()
        return _Sums(top, weights.sum(dim=1), weights.transpose(1, 2) @ self.h[rows].double())

    def _means(self, sums: _Sums, sizes: list[int]) -> Tensor:
        """The weighted means (s, k, e), once the masked instances, all alike, have joined."""
        if self.mode == "remove":
            return sums.mean / sums.total.unsqueeze(-1)
        n_masked = self.n - torch.tensor(sizes, device=sums.top.device, dtype=sums.top.dtype).unsqueeze(1)
        top = torch.maximum(sums.top, self.a0)
        kept, joined = (sums.top - top).exp(), n_masked * (self.a0 - top).exp()  # (s, k)
        mean = sums.mean * kept.unsqueeze(-1) + joined.unsqueeze(-1) * self.h0
        return mean / (sums.total * kept + joined).unsqueeze(-1)


@dataclass(frozen=True)
class _Sums:
    """Sums of exp(a - top) and of exp(a - top) h, for each row, with the top of each: (s, k), (s, k, e)."""

    top: Tensor
    total: Tensor
    mean: Tensor

    @property
    def last(self) -> _Sums:
        return _Sums(self.top[-1:], self.total[-1:], self.mean[-1:])

    def running(self, before: _Sums) -> _Sums:
        """Each row with all rows before it, and with what came before them all."""
        top, total, mean = (
            torch.cat([getattr(before, name), getattr(self, name)]) for name in ("top", "total", "mean")
        )
        highest = top.cummax(dim=0).values
        scale = (top.unsqueeze(0) - highest.unsqueeze(1)).exp()  # (s, s, k): earlier sums on a later scale
        scale = scale.permute(2, 0, 1).tril()  # (k, s, s)
        totals = (scale @ total.T.unsqueeze(-1)).squeeze(-1).T
        means = (scale @ mean.transpose(0, 1)).transpose(0, 1)
        return _Sums(highest[1:], totals[1:], means[1:])


class MaxParts(Parts):
    """The running maximum of each feature."""

    def __init__(self, network: Network, x: Tensor, mode: str) -> None:
        self.model = cast(MaxPool, network.model)
        self.h = self.model.embed(x)[0]  # (n, e)
        self.h0 = self.model.embed(torch.zeros_like(x[:, :1]))[0, 0]
        super().__init__(network, x, mode)

    def _full(self) -> Tensor:
        return self.model.head(self.h.amax(dim=0, keepdim=True))

    def _empty(self) -> Tensor:
        return self.model.head(self.h0.unsqueeze(0))

    def _nested(self, sequence: Tensor, sizes: list[int]) -> Tensor:
        start, pooled = 0, []
        top = self.h0.unsqueeze(0) if self.mode == "mask" else torch.full_like(self.h[:1], float("-inf"))
        for block in _blocks(sizes):
            rows, _ = _segments(sequence, [start, *block])
            highest = torch.cat([top, self.h[rows].amax(dim=1)]).cummax(dim=0).values
            pooled.append(highest[1:])
            start, top = block[-1], highest[-1:]
        return self.model.head(torch.cat(pooled))


class AdditiveParts(Parts):
    """Attention logits and the classifier's first product once; the rest of the classifier for each part.

    An instance enters the classifier times its attention, which every removal changes for all, so that no
    running sum is exact.
    """

    def __init__(self, network: Network, x: Tensor, mode: str) -> None:
        self.model = cast(AddMIL, network.model)
        first = self.model.classifier[0]
        h = self.model.embed(x)
        self.a = self.model.attend(h)[0, :, 0].double()  # (n,)
        self.a0 = self.model.attend(torch.zeros_like(h[:, :1]))[0, 0, 0].double()
        self.u = F.linear(h[0], first.weight)  # type: ignore[arg-type]  # (n, hidden), before bias and attention
        super().__init__(network, x, mode)

    def _full(self) -> Tensor:
        return self._sum(self.a, self.u, 0).unsqueeze(0)

    def _empty(self) -> Tensor:
        """Zero vectors contribute alike, whatever their attention."""
        return self._rest(torch.zeros_like(self.u[:1])) * self.n

    def _nested(self, sequence: Tensor, sizes: list[int]) -> Tensor:
        a, u = self.a[sequence], self.u[sequence]
        outside = [self.n - m if self.mode == "mask" else 0 for m in sizes]
        logits = [self._sum(a[:m], u[:m], r) for m, r in zip(sizes, outside, strict=True)]
        return torch.stack(logits)

    def _sum(self, a: Tensor, u: Tensor, n_masked: int) -> Tensor:
        top = torch.maximum(a.max(), self.a0) if n_masked else a.max()
        weights = (a - top).exp()
        weights = weights / (weights.sum() + n_masked * (self.a0 - top).exp())
        scaled = weights.to(u.dtype).unsqueeze(-1)
        parts = [self._rest(scaled[b] * u[b]).sum(dim=0) for b in self.network.batches(len(u), 1)]
        return torch.stack(parts).sum(dim=0) + n_masked * self._rest(torch.zeros_like(u[:1]))[0]

    def _rest(self, u: Tensor) -> Tensor:
        """The classifier behind its first product."""
        first, *others = self.model.classifier
        out = u if first.bias is None else u + first.bias  # type: ignore[operator]
        for layer in others:
            out = layer(out)
        return out


class RunParts(Parts):
    """Any other model: each part is run, on embedded instances where the model embeds them one by one."""

    def __init__(self, network: Network, x: Tensor, mode: str) -> None:
        self.h = network.embed(x)[0]  # (n, e)
        self.h0 = network.embed(torch.zeros_like(x[:, :1]))[0, 0]
        super().__init__(network, x, mode)

    def _full(self) -> Tensor:
        return self.network.aggregate(self.h.unsqueeze(0))

    def _empty(self) -> Tensor:
        return self.network.aggregate(self.h0.expand(1, self.n, -1))

    def _nested(self, sequence: Tensor, sizes: list[int]) -> Tensor:
        return self._together(sequence.unsqueeze(0), sizes)[0]

    def _together(self, sequences: Tensor, sizes: list[int]) -> Tensor:
        """Parts of one length are one batch, whichever sequence they belong to."""
        if self.mode == "remove":
            return torch.stack([self._removed(sequences[:, :m]) for m in sizes], dim=1)
        if self.h.numel() > LARGE and not self.h.is_cuda:
            return torch.stack([self._masked_in_turn(sequence, sizes) for sequence in sequences])
        ranks = torch.argsort(sequences, dim=1)
        limits = torch.tensor(sizes, device=ranks.device)
        which = torch.arange(len(ranks) * len(sizes), device=ranks.device)

        def masked(batch: slice) -> Tensor:
            at = which[batch]
            kept = ranks[at // len(sizes)] < limits[at % len(sizes)].unsqueeze(1)  # (b, n)
            return torch.where(kept.unsqueeze(-1), self.h, self.h0)

        logits = self.network.aggregate_batches(len(which), self.n, masked)
        return logits.reshape(len(sequences), len(sizes), -1)

    def _removed(self, kept: Tensor) -> Tensor:
        """Logits (q, c) of the bags of the kept instances (q, m), each laid out in the order of the bag."""
        rows = kept.sort(dim=1).values
        batches = self.network.batches(len(rows), rows.shape[1])
        return torch.cat([self.network.aggregate(self.h[rows[b]], None, rows[b]) for b in batches])

    def _masked_in_turn(self, sequence: Tensor, sizes: list[int]) -> Tensor:
        """One bag that fills up: no copies of large bags."""
        bag, start, logits = self.h0.repeat(1, self.n, 1), 0, []
        for size in sizes:
            joining = sequence[start:size]
            bag[0, joining] = self.h[joining]
            logits.append(self.network.aggregate(bag))
            start = size
        return torch.cat(logits)


CLOSED_FORMS: dict[str, type[Parts]] = {"softmax": PooledParts, "max": MaxParts, "additive": AdditiveParts}


def parts_of(network: Network, x: Tensor, mode: str) -> Parts:
    """The quickest exact way for the model, by how it says it pools."""
    pooling = None if network.model is None else network.model.pooling
    return CLOSED_FORMS.get(pooling or "", RunParts)(network, x, mode)


def _blocks(sizes: list[int]) -> Iterator[list[int]]:
    return (sizes[i : i + BLOCK] for i in range(0, len(sizes), BLOCK))


def _segments(sequence: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor]:
    """Instances between consecutive bounds as rows (s, l), filled up with their first, and which are real."""
    edges = torch.tensor(bounds, device=sequence.device)
    low, high = edges[:-1].unsqueeze(1), edges[1:].unsqueeze(1)
    places = low + torch.arange(int((high - low).max()), device=sequence.device)
    real = places < high
    return sequence[torch.where(real, places, low)], real
