"""Closed forms of v(S), for models whose pooling lets the parts of a bag share almost all work."""

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
from xmil.subsets.engine import SLAB, Subsets, check_finite

Layers = list[tuple[Tensor, Tensor]]  # weights (out, in) and biases (out,) of linear layers
WIDEST = 600.0  # attention logits with a wider range underflow in double precision
NARROW = 60.0  # the same in single precision
DOMINANT = 1e-9  # if less of a sum's weight remains, the subtraction has lost its digits
BLOCK = 512  # instances summed at once, which fit a processor's cache
LINEAR = {  # operations that keep a function of its input affine, and accesses to shapes
    *("linear", "conv1d", "cat", "stack", "sum", "dropout", "__getitem__", "__get__", "__len__", "size"),
    *("dim", "flatten", "squeeze", "unsqueeze", "reshape", "view", "permute", "transpose", "contiguous"),
}


class PooledSubsets(Subsets):
    """Means weighted by a softmax: sums of weights and of weighted instances, in double precision.

    The head's linear part is applied to the instances before the sum: the full head if it is affine, so that
    a part is a sum of c numbers, or the first layer of a chain of linear and ReLU layers.
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
        """The terms of each instance in a part's sums, (n, k + k * width): weights, then weighted values."""
        batches = self.batches(self.n, 1)
        return torch.cat([self._terms(self.h[0][batch], self.weights[batch]) for batch in batches])

    @cached_property
    def term0(self) -> Tensor:
        """The terms of a masked instance, (1, k + k * width)."""
        return self._terms(self.h0[0], self.weight0)

    @property
    def _plain0(self) -> Tensor:
        """The terms of a masked instance before the head."""
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
        if (
            self.affine is None and 8 * len(masks) < self.n
        ):  # too few parts to apply the head to all instances
            weights = masks.unsqueeze(1) * self.weights.T  # (b, k, n)
            sums = torch.cat([weights.sum(dim=2), (weights @ self.h[0].double()).flatten(1)], dim=1)
            return self._head(self._means(sums + self._masked(counts, self._plain0, mode)))
        return self._read(masks.double() @ self.terms + self._masked(counts, self.term0, mode))

    def _masked(self, counts: Tensor, term: Tensor, mode: str) -> Tensor | float:
        """The terms of so many masked instances (b,)."""
        return counts.unsqueeze(1) * term if mode == "mask" else 0.0

    def around(self, masks: Tensor, rows: Tensor, choices: Tensor) -> Tensor:
        """Like `Subsets.around`; all choices share the sum over the other rows."""
        others = masks.index_fill(1, rows, False)
        sizes = (others.sum(dim=1, keepdim=True) + choices.sum(dim=2)).unsqueeze(-1)  # (b, m, 1)
        sums = (others.double() @ self.terms).unsqueeze(1) + choices.double() @ self.terms[rows]
        return check_finite(self, self._with_ends(sizes, self._read(sums)), sizes.squeeze(-1))

    def toggled(self, mask: Tensor, rows: Tensor) -> Tensor:
        """Like `Subsets.toggled`; add or subtract one term of the sums."""
        signs = 1.0 - 2.0 * mask[rows].double().unsqueeze(1)
        total = mask.double() @ self.terms
        out, imprecise = [], []
        for batch in self.batches(len(rows), 1):
            sums = total + signs[batch] * self.terms[rows[batch]]
            out.append(self._read(sums))
            k = self.weights.shape[1]
            imprecise.append((sums[:, :k] < DOMINANT * total[:k]).any(dim=1))
        sizes = int(mask.sum()) + signs
        outputs, rerun = self._with_ends(sizes, torch.cat(out)), torch.cat(imprecise) & (sizes[:, 0] > 0)
        if bool(rerun.any()):
            outputs[rerun] = super().toggled(mask, rows[rerun])
        return check_finite(self, outputs, sizes.squeeze(1).long())

    def joined(self, company: Tensor, rows: Tensor) -> Tensor:
        """Like `Subsets.joined`; add one term to the sums."""
        return self.toggled(torch.isin(torch.arange(self.n, device=rows.device), company), rows)

    def _with_ends(self, sizes: Tensor, inner: Tensor) -> Tensor:
        """Replace the outputs of empty and full parts by their exact values."""
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

        def terms(rows: Tensor) -> Tensor:
            return _weighted(self.weights[rows], self.h[0][rows].double().unsqueeze(1))

        masked = self._masked(self.n - counts, self._plain0, mode)
        sums = [_running(order, sizes, terms) + masked for order in orders]
        return torch.stack([self._head(self._means(part)) for part in sums])

    def _prefixes(self, orders: Tensor) -> Tensor:
        """Like `Subsets._prefixes`, in the model's precision if the head is not affine and it suffices."""
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
            by_head: Tensor = self._head(means.flatten(0, -3)).unflatten(0, means.shape[:-2])
            return by_head
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
    """Apply `read` to the sums of terms over the first m instances of an order, for ascending sizes m."""
    out, previous = [], None
    for start in range(0, sizes[-1], BLOCK):
        block = terms(order[start : start + BLOCK])
        if previous is not None:
            block[:1] += previous
        sums = block.cumsum(dim=0)
        previous = sums[-1:]
        index = [
            m - start - 1 for m in sizes[bisect_right(sizes, start) : bisect_right(sizes, start + BLOCK)]
        ]
        if index:
            out.append(read(sums if len(index) == len(sums) else sums[index]))
    return torch.cat(out)


class MaxSubsets(Subsets):
    """Maxima of each feature."""

    cost = "head"
    model: MaxPool

    def _aggregate_none(self) -> Tensor:
        return self.network.aggregate(self.h0)

    _run = Subsets._by_size  # also for masked instances

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
        """Like `Subsets.toggled`; only removing the instance with a feature's maximum changes it."""
        if int(mask.sum()) < 2:
            return super().toggled(mask, rows)
        h = self.h[0]
        top, owner = h.masked_fill(~mask.unsqueeze(1), float("-inf")).topk(2, dim=0)  # (2, e)
        out = []
        for batch in self.batches(len(rows), 1):
            part = rows[batch]
            without = torch.where(owner[0] == part.unsqueeze(1), top[1], top[0])
            joined = torch.maximum(top[0], h[part])
            out.append(self._head(torch.where(mask[part].unsqueeze(1), without, joined), "remove"))
        sizes = mask.sum() + torch.where(mask[rows], -1, 1)
        return check_finite(self, torch.cat(out), sizes)

    joined = PooledSubsets.joined  # one instance may raise the maxima

    def _head(self, tops: Tensor, mode: str) -> Tensor:
        tops = torch.maximum(tops, self.h0[0]) if mode == "mask" else tops
        return self.model.head(tops).double()


class AdditiveSubsets(Subsets):
    """Sums of instance outputs: attention logits and the classifier's first product are computed once.

    The classifier takes each instance times its attention. Every removal changes all attention weights, so
    that running sums would not be exact.
    """

    model: AddMIL

    def __init__(self, network: Network, x: Tensor, fill: Tensor | None = None) -> None:
        super().__init__(network, x, fill)
        first = cast(nn.Linear, self.model.classifier[0])
        self.a, self.a0 = (self.model.attend(h)[0, :, 0].double() for h in (self.h, self.h0))  # (n,), (1,)
        self.u, self.u0 = (F.linear(h[0], first.weight) for h in (self.h, self.h0))  # (n, hidden)

    _run = Subsets._by_size  # also for masked instances

    def _rows(self, rows: Tensor, mode: str) -> Tensor:
        outside = self.n - rows.shape[1] if mode == "mask" else 0
        a = self.a[rows]  # (b, m)
        top = a.amax(dim=1, keepdim=True)
        top = torch.maximum(top, self.a0) if outside else top
        weights, weight0 = (a - top).exp(), (self.a0 - top).exp()
        total = weights.sum(dim=1, keepdim=True)
        if outside:  # otherwise this weight could be infinite
            total = total + outside * weight0
        scaled = self.u[rows].mul_((weights / total).to(self.u.dtype).unsqueeze(-1))
        out: Tensor = self._classify(scaled.flatten(0, 1)).unflatten(0, rows.shape).sum(dim=1)
        if outside:
            out = out + outside * self._classify((weight0 / total).to(self.u.dtype) * self.u0)
        return out

    def _classify(self, u: Tensor) -> Tensor:
        """Outputs (m, c) of instances from the classifier's first product (m, hidden)."""
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

    `zero` (1, k, e) has the shape of the head's input.
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

    `zero` (1, k, e) has the shape of the head's input.
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
    agrees = torch.allclose(out, head(probe).double(), rtol=1e-3, atol=1e-4)
    return trace.layers if agrees else None


class _Trace(Watch):
    """Records operations in order, and the weights of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.layers: Layers = []

    def see(self, function: Any, args: Sequence[Any], *_: Any) -> None:
        """Record one operation."""
        self.names.append(function.__name__)
        if function.__name__ == "linear":
            _, matrix, *bias = args
            constant = bias[0] if bias and bias[0] is not None else matrix.new_zeros(len(matrix))
            self.layers.append((matrix.detach().double(), constant.detach().double()))
