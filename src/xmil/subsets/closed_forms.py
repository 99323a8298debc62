"""Closed forms of v(S): models whose pooling lets the parts of a bag share almost all of the work."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmil.models import AddMIL, MaxPool, PooledMIL
from xmil.network import Network, Watch
from xmil.subsets.engine import SLAB, Subsets

Layers = list[tuple[Tensor, Tensor]]  # weights (out, in) and biases (out,) of linear layers
WIDEST = 600.0  # attention logits that lie further apart lose their weight in double precision
NARROW = 60.0  # and in single precision
DOMINANT = 1e-9  # of a sum's weight: where less is left of it, the difference has lost its digits
BLOCK = 512  # instances that are summed at once, so that a processor's cache holds them
LINEAR = {  # operations, and looks at shapes, that keep a function of their input affine
    *("linear", "conv1d", "cat", "stack", "sum", "dropout", "__getitem__", "__get__", "__len__", "size"),
    *("dim", "flatten", "squeeze", "unsqueeze", "reshape", "view", "permute", "transpose", "contiguous"),
}


class PooledSubsets(Subsets):
    """Means weighted by a softmax: sums of weights and of weighted instances, in double precision.

    What the head does first to a mean is done to the instances, before they are summed: all of it if the head
    is affine, so that a part is a sum of c numbers, or the first of its layers if it is a chain of linear and
    ReLU layers.
    """

    model: PooledMIL

    def __init__(self, network: Network, x: Tensor, fill: Tensor | None = None) -> None:
        super().__init__(network, x, fill)
        a, a0 = self.attention[0].double(), self.model.attend(self.h0)[0].double()  # (n, k), (1, k)
        top = torch.maximum(a.amax(dim=0), a0)
        self.spread = float((top - torch.minimum(a.amin(dim=0), a0)).max())
        self.weights, self.weight0 = (a - top).exp(), (a0 - top).exp()
        self.affine = affine_head(self.model.head, self._means_of_zeros())
        self.cost = "head" if self.affine is None else "sum"

    @cached_property
    def layers(self) -> Layers | None:
        """The layers of a head that is a chain of linear and ReLU layers."""
        return relu_layers(self.model.head, self._means_of_zeros())

    def _means_of_zeros(self) -> Tensor:
        return self.h.new_zeros(1, self.attention.shape[-1], self.h.shape[-1])

    @cached_property
    def attention(self) -> Tensor:
        """Attention logits (1, n, k)."""
        return self.model.attend(self.h)

    def _aggregate_all(self) -> Tensor:
        return self.model.pool_weighted(self.h, self.attention)

    def _aggregate_none(self) -> Tensor:
        return self.network.aggregate(self.h0)  # the mean of equal instances is one of them

    @cached_property
    def terms(self) -> Tensor:
        """What each instance adds to a part's sums, (n, k + k * width): weights, then weighted values."""
        batches = self.batches(self.n, 1)
        return torch.cat([self._terms(self.h[0][batch], self.weights[batch]) for batch in batches])

    @cached_property
    def term0(self) -> Tensor:
        """What a masked instance adds to them, (1, k + k * width)."""
        return self._terms(self.h0[0], self.weight0)

    @property
    def _plain0(self) -> Tensor:
        """The same before the head."""
        return _weighted(self.weight0, self.h0.double())

    def _terms(self, h: Tensor, weights: Tensor) -> Tensor:
        if self.affine is not None:
            return _weighted(weights, torch.einsum("ne,kec->nkc", h.double(), self.affine[0]))
        if self.layers is not None:
            first = self.layers[0][0].unflatten(1, (weights.shape[1], -1))  # (width, k, e)
            return _weighted(weights, torch.einsum("ne,wke->nkw", h.double(), first))
        return _weighted(weights, h.double().unsqueeze(1))

    def _run(self, masks: Tensor, mode: str) -> Tensor:
        counts = self.n - masks.sum(dim=1)
        if self.affine is None and 8 * len(masks) < self.n:  # too few parts to take the head to all instances
            weights = masks.unsqueeze(1) * self.weights.T  # (b, k, n)
            sums = torch.cat([weights.sum(dim=2), (weights @ self.h[0].double()).flatten(1)], dim=1)
            return self._head(self._means(sums + self._masked(counts, self._plain0, mode)))
        return self._read(masks.double() @ self.terms + self._masked(counts, self.term0, mode))

    def _masked(self, counts: Tensor, term: Tensor, mode: str) -> Tensor | float:
        """What so many masked instances (b,) add to the sums."""
        return counts.unsqueeze(1) * term if mode == "mask" else 0.0

    def around(self, masks: Tensor, rows: Tensor, choices: Tensor) -> Tensor:
        """As for any model; the sum over what stays is shared."""
        staying = masks.index_fill(1, rows, False)
        sizes = (staying.sum(dim=1, keepdim=True) + choices.sum(dim=2)).unsqueeze(-1)  # (b, m, 1)
        sums = (staying.double() @ self.terms).unsqueeze(1) + choices.double() @ self.terms[rows]
        return self._between(sizes, self._read(sums))

    def toggled(self, mask: Tensor, rows: Tensor) -> Tensor:
        """As for any model: one term of the sums comes or goes."""
        signs = 1.0 - 2.0 * mask[rows].double().unsqueeze(1)
        before = mask.double() @ self.terms
        out, lost = [], []
        for batch in self.batches(len(rows), 1):
            sums = before + signs[batch] * self.terms[rows[batch]]
            out.append(self._read(sums))
            k = self.weights.shape[1]
            lost.append((sums[:, :k] < DOMINANT * before[:k]).any(dim=1))
        sizes = int(mask.sum()) + signs
        outputs, again = self._between(sizes, torch.cat(out)), torch.cat(lost) & (sizes[:, 0] > 0)
        if bool(again.any()):
            outputs[again] = super().toggled(mask, rows[again])
        return outputs

    def joined(self, company: Tensor, rows: Tensor) -> Tensor:
        """As for any model: one term of the sums comes."""
        return self.toggled(torch.isin(torch.arange(self.n, device=rows.device), company), rows)

    def _between(self, sizes: Tensor, inner: Tensor) -> Tensor:
        """Outputs of parts, those of the empty and the full one in their places."""
        if bool((sizes == 0).any()):
            inner = torch.where(sizes == 0, self.empty, inner)
        return torch.where(sizes == self.n, self.full, inner) if bool((sizes == self.n).any()) else inner

    def _nested(self, orders: Tensor, sizes: list[int], mode: str) -> Tensor:
        counts = torch.tensor(sizes, device=orders.device)
        if self.affine is not None:
            masked = self._masked(self.n - counts, self.term0, mode)
            parts = orders[:, : sizes[-1]].split(max(1, SLAB // (8 * self.terms.numel())))
            sums = [self.terms[part].cumsum(dim=1)[:, counts - 1] for part in parts]  # (q, s, t)
            return self._read(torch.cat(sums) + masked)

        def plain(rows: Tensor) -> Tensor:
            return _weighted(self.weights[rows], self.h[0][rows].double().unsqueeze(1))

        masked = self._masked(self.n - counts, self._plain0, mode)
        sums = [_running(order, sizes, plain) + masked for order in orders]
        return torch.stack([self._head(self._means(part)) for part in sums])

    def _prefixes(self, orders: Tensor) -> Tensor:
        """As for any model; unless the head is affine, in the model's precision if that holds the weights."""
        if self.affine is not None:
            return super()._prefixes(orders)
        terms, read = self.terms, self._read
        if self.layers is not None and self.weights.shape[1] == 1:
            terms = torch.cat([terms[:, :1], terms[:, 1:] + terms[:, :1] * self.layers[0][1]], dim=1)
            read = self._read_shifted
        terms = terms.to(self.x.dtype) if self.spread < NARROW else terms
        sizes = range(1, self.n)
        return torch.stack([_running(order, sizes, terms.__getitem__, read) for order in orders])

    def _means(self, sums: Tensor) -> Tensor:
        """Weighted means (..., k, width) from sums (..., k + k * width)."""
        k = self.weights.shape[1]
        means: Tensor = sums[..., k:].unflatten(-1, (k, -1)) / sums[..., :k].unsqueeze(-1)
        return means

    def _head(self, means: Tensor) -> Tensor:
        return self.model.head(means.to(self.x.dtype)).double()

    def _read(self, sums: Tensor) -> Tensor:
        """Outputs (..., c) from sums of the terms (..., k + k * width)."""
        means = self._means(sums)
        if self.affine is not None:
            outputs: Tensor = means.sum(dim=-2) + self.affine[1]
            return outputs
        if self.layers is None:
            apart: Tensor = self._head(means.flatten(0, -3)).unflatten(0, means.shape[:-2])
            return apart
        inner: Tensor = means.sum(dim=-2) + self.layers[0][1].to(means.dtype)
        for matrix, bias in self.layers[1:]:
            inner = F.linear(inner.relu_(), matrix.to(means.dtype), bias.to(means.dtype))
        return inner.double()

    def _read_shifted(self, sums: Tensor) -> Tensor:
        """Outputs (m, c) from sums (m, 1 + width) that hold the first bias: relu(a / w) = relu(a) / w."""
        assert self.layers is not None  # noqa: S101  # narrows the type for mypy
        (first, shift), *others = [(m.to(sums.dtype), b.to(sums.dtype)) for m, b in self.layers[1:]]
        inner = F.linear(sums[:, 1:].relu(), first) / sums[:, :1] + shift
        for matrix, bias in others:
            inner = F.linear(inner.relu_(), matrix, bias)
        return inner.double()


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Weights (n, k), then values (n, k or 1, width) times them: (n, k + k * width)."""
    return torch.cat([weights, (weights.unsqueeze(-1) * values).flatten(1)], dim=1)


def _running(
    order: Tensor,
    sizes: Sequence[int],
    terms: Callable[[Tensor], Tensor],
    read: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:
    """What is read from the sums of terms over the first m instances of an order, for ascending sizes m."""
    out, before = [], None
    for start in range(0, sizes[-1], BLOCK):
        block = terms(order[start : start + BLOCK])
        if before is not None:
            block[:1] += before
        sums = block.cumsum(dim=0)
        before = sums[-1:]
        here = [m - start - 1 for m in sizes[bisect_right(sizes, start) : bisect_right(sizes, start + BLOCK)]]
        if here:
            out.append(read(sums if len(here) == len(sums) else sums[here]))
    return torch.cat(out)


class MaxSubsets(Subsets):
    """The largest value of each feature."""

    cost = "head"
    model: MaxPool

    def _aggregate_none(self) -> Tensor:
        return self.network.aggregate(self.h0)

    _run = Subsets._by_size  # masked instances, too

    def _rows(self, rows: Tensor, mode: str) -> Tensor:
        return self._head(self.h[0][rows].amax(dim=1), mode)

    def _nested(self, orders: Tensor, sizes: list[int], mode: str) -> Tensor:
        lengths, out = [b - a for a, b in pairwise([0, *sizes])], []
        for order in orders[:, : sizes[-1]]:
            h = self.h[0][order]
            if 4 * len(sizes) > self.n:
                tops = h.cummax(dim=0).values[[m - 1 for m in sizes]]
            else:
                tops = torch.stack([part.amax(dim=0) for part in h.split(lengths)]).cummax(dim=0).values
            out.append(self._head(tops, mode))
        return torch.stack(out)

    def toggled(self, mask: Tensor, rows: Tensor) -> Tensor:
        """As for any model: only the instance that holds a feature's maximum changes it by leaving."""
        if int(mask.sum()) < 2:
            return super().toggled(mask, rows)
        h = self.h[0]
        top, owner = h.masked_fill(~mask.unsqueeze(1), float("-inf")).topk(2, dim=0)  # (2, e)
        out = []
        for batch in self.batches(len(rows), 1):
            part = rows[batch]
            left = torch.where(owner[0] == part.unsqueeze(1), top[1], top[0])
            joined = torch.maximum(top[0], h[part])
            out.append(self._head(torch.where(mask[part].unsqueeze(1), left, joined), "remove"))
        return torch.cat(out)

    joined = PooledSubsets.joined  # one instance may raise the maxima

    def _head(self, tops: Tensor, mode: str) -> Tensor:
        tops = torch.maximum(tops, self.h0[0]) if mode == "mask" else tops
        return self.model.head(tops).double()


class AdditiveSubsets(Subsets):
    """Sums of instance outputs: attention logits and the classifier's first product are computed once.

    An instance enters the classifier times its attention, which every removal changes for all, so that no
    running sum is exact.
    """

    model: AddMIL

    def __init__(self, network: Network, x: Tensor, fill: Tensor | None = None) -> None:
        super().__init__(network, x, fill)
        first = cast(nn.Linear, self.model.classifier[0])
        self.a, self.a0 = (self.model.attend(h)[0, :, 0].double() for h in (self.h, self.h0))  # (n,), (1,)
        self.u, self.u0 = (F.linear(h[0], first.weight) for h in (self.h, self.h0))  # (n, hidden)

    _run = Subsets._by_size  # masked instances, too

    def _rows(self, rows: Tensor, mode: str) -> Tensor:
        outside = self.n - rows.shape[1] if mode == "mask" else 0
        a = self.a[rows]  # (b, m)
        top = a.amax(dim=1, keepdim=True)
        top = torch.maximum(top, self.a0) if outside else top
        weights, weight0 = (a - top).exp(), (self.a0 - top).exp()
        total = weights.sum(dim=1, keepdim=True) + outside * weight0
        scaled = self.u[rows].mul_((weights / total).to(self.u.dtype).unsqueeze(-1))
        out: Tensor = self._classify(scaled.flatten(0, 1)).unflatten(0, rows.shape).sum(dim=1)
        if outside:
            out = out + outside * self._classify((weight0 / total).to(self.u.dtype) * self.u0)
        return out

    def _classify(self, u: Tensor) -> Tensor:
        """Outputs (m, c) of instances behind the first product of the classifier (m, hidden)."""
        first, *others = self.model.classifier
        out = []
        for batch in self.batches(len(u), 1):
            inner = u[batch] if first.bias is None else u[batch] + first.bias  # type: ignore[operator]
            for layer in others:
                inner = layer(inner)
            out.append(inner)
        return torch.cat(out)


def affine_head(head: Callable[[Tensor], Tensor], zero: Tensor) -> tuple[Tensor, Tensor] | None:
    """Weights (k, e, c) and constants (c,) of a head without activations; None for any other head.

    `zero` (1, k, e) is what the head takes.
    """
    z = zero.requires_grad_(True)
    with torch.enable_grad(), _Trace() as trace:
        outputs = head(z)[0]
    if not set(trace.names) <= LINEAR:
        return None
    with torch.enable_grad():
        rows = [torch.autograd.grad(out, z, retain_graph=True)[0][0] for out in outputs.unbind()]
    return torch.stack(rows, dim=-1).double(), outputs.detach().double()


def relu_layers(head: Callable[[Tensor], Tensor], zero: Tensor) -> Layers | None:
    """The layers of a head that is a chain of linear and ReLU layers; None for any other.

    `zero` (1, k, e) is what the head takes.
    """
    with _Trace() as trace:
        head(zero)
    steps = [name for name in trace.names if name in ("linear", "relu")]
    chained = steps == ["linear", *["relu", "linear"] * (len(steps) // 2)]
    if not chained or not set(trace.names) <= LINEAR | {"relu"}:
        return None
    probe = torch.randn(8, *zero.shape[1:], generator=torch.Generator().manual_seed(0)).to(zero)
    out = probe.flatten(1).double()
    for i, (matrix, bias) in enumerate(trace.layers):
        out = F.linear(F.relu(out) if i else out, matrix, bias)
    same = torch.allclose(out, head(probe).double(), rtol=1e-3, atol=1e-4)
    return trace.layers if same else None


class _Trace(Watch):
    """Notes operations in their order, and the weights of linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.layers: Layers = []

    def see(self, function: Any, args: Sequence[Any], *_: Any) -> None:
        """Note one operation."""
        self.names.append(function.__name__)
        if function.__name__ == "linear":
            _, matrix, *bias = args
            constant = bias[0] if bias and bias[0] is not None else matrix.new_zeros(len(matrix))
            self.layers.append((matrix.detach().double(), constant.detach().double()))
