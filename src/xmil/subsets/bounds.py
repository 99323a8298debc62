"""Prove how many instances must leave a bag, at least, before a difference of outputs can turn positive.

Models that pool by a softmax classify a weighted mean of the instances. If the head is affine, the sign of a
difference of outputs is that of a sum over instances, and removing the most negative ones takes the fewest
removals: the bound is exact. A head with ReLU layers is bounded from above by an affine function on the box
that contains the mean after so many removals (Zhang et al., "Efficient Neural Network Robustness
Certification with General Activation Functions", 2018); then the same sum decides. A maximum falls at most to
the next largest value. Every number is raised by its possible rounding error, so that rounding can weaken a
bound but never make it wrong.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

import torch
from torch import Tensor

from xmil.subsets.closed_forms import Layers, MaxSubsets, PooledSubsets, affine_head
from xmil.subsets.engine import Subsets

Affine = tuple[Tensor, Tensor]  # weights (k, e, c) and constants (c,) of a head
SLACK = 1e-6  # rounding error of a number in the model, relative to the size of the terms in its sum
ROUNDS = 60  # iterations before falling back to the largest value


class Bound:
    """Whether removing some of n instances can make a difference d of outputs, (c,), positive.

    This class serves models without a bound: it excludes nothing.
    """

    def __init__(self, n: int) -> None:
        self.n = n

    def possible(self, d: Tensor, removed: int) -> bool:
        """False only if no removal of up to `removed` instances makes outputs @ d positive."""
        return len(d) > 0 and removed > 0

    def single(self, d: Tensor) -> bool:
        """False only if no sub-bag has a positive difference."""
        return self.possible(d, self.n - 1)

    def order(self, d: Tensor) -> Tensor | None:  # noqa: ARG002 - for subclasses
        """Instances by how much their removal should help, the best first; None if unknown."""
        return None

    def fewest(self, d: Tensor, at_most: int) -> int:
        """The smallest number of removals, up to `at_most`, that is not excluded."""
        if not self.single(d):
            return self.n
        return 1 + bisect_left(range(1, at_most), True, key=partial(self.possible, d))


class SumBound(Bound):
    """Bound for one attention branch and a head of linear and ReLU layers."""

    def __init__(self, game: PooledSubsets, weights: Weights, h: Tensor, layers: Layers) -> None:
        super().__init__(game.n)
        self.weights, self.layers = weights, layers
        first, constant = layers[0]
        self.inner = h @ first.T + constant  # (n, e1): outputs of the first layer
        self.size = h.abs() @ first.abs().T + constant.abs()  # size of the terms in these sums
        self._boxes: dict[int, tuple[Tensor, Tensor]] = {}

    def possible(self, d: Tensor, removed: int) -> bool:
        terms = self.weights.highest(self._values(d, removed)).sort().values
        n_removed = min(removed, self.n - 1, int((terms < 0).sum()))
        return bool(terms[n_removed:].sum() >= 0)  # sum what remains: subtracting would cancel digits

    def single(self, d: Tensor) -> bool:
        return len(self.layers) > 1 or bool((self._values(d, self.n - 1) >= 0).any())

    def order(self, d: Tensor) -> Tensor:
        slope, shift = self._slope(d, max(1, self.n // 10))
        return (self.weights.middle * (self.inner @ slope + shift)).argsort(stable=True)

    def _values(self, d: Tensor, removed: int) -> Tensor:
        """Values (n,), raised by the rounding error; their mean is positive whenever the difference is."""
        slope, shift = self._slope(d, removed)
        size = self.size
        for matrix, bias in self.layers[1:]:
            size = size @ matrix.abs().T + bias.abs()
        size = size @ d.abs()
        return self.inner @ slope + shift + SLACK * size + 1e-12 * size.max()

    def _slope(self, d: Tensor, removed: int) -> tuple[Tensor, Tensor]:
        """An affine upper bound of the difference: its slope (e1,) after the first layer, and a constant."""
        if len(self.layers) == 1:
            return d, d.new_zeros(())
        last, constant = self.layers[-1]
        slope, shift = d @ last, d @ constant
        boxes = self._layer_boxes(removed)
        for (low, high), (matrix, bias) in zip(boxes[::-1], self.layers[-2::-1], strict=True):
            slope, constant = relaxed_relu(slope, low, high)
            shift = shift + constant
            if matrix is not self.layers[0][0]:
                slope, shift = slope @ matrix, shift + slope @ bias
        return slope, shift

    def _layer_boxes(self, removed: int) -> list[tuple[Tensor, Tensor]]:
        """Bounds of each hidden layer's input to its ReLU after so many removals."""
        size = self.size.amax(dim=0)
        if removed not in self._boxes:
            high = highest_mean(self.weights, self.inner, removed, SLACK * size)
            self._boxes[removed] = (-highest_mean(self.weights, -self.inner, removed, SLACK * size), high)
        boxes = [self._boxes[removed]]
        for matrix, bias in self.layers[1:-1]:
            low, high = (edge.clamp(min=0) for edge in boxes[-1])
            up, down = matrix.clamp(min=0), matrix.clamp(max=0)
            size = matrix.abs() @ size + bias.abs()
            lowest, highest = up @ low + down @ high + bias, up @ high + down @ low + bias
            boxes.append((lowest - SLACK * size, highest + SLACK * size))
        return boxes


class BranchBound(Bound):
    """Bound for several attention branches and an affine head: the best of each branch by itself."""

    def __init__(self, game: PooledSubsets, weights: list[Weights], h: Tensor, head: Affine) -> None:
        super().__init__(game.n)
        matrix, self.constant = head  # (k, e, c), (c,)
        self.weights = weights
        self.values = torch.einsum("ne,kec->nkc", h, matrix)
        self.size = torch.einsum("ne,kec->nkc", h.abs(), matrix.abs()).amax(dim=0)  # (k, c)

    def possible(self, d: Tensor, removed: int) -> bool:
        values, margins = (self.values @ d).T.unsqueeze(-1), SLACK * (self.size @ d.abs())  # (k, n, 1), (k,)
        best = [
            highest_mean(w, v, removed, margin.view(1))[0]
            for w, v, margin in zip(self.weights, values, margins, strict=True)
        ]
        return bool(sum(best) + d @ self.constant + SLACK * (d.abs() @ self.constant.abs()) >= 0)


class MaxBound(Bound):
    """Bound for maxima: each feature falls at most to its next largest value."""

    def __init__(self, game: MaxSubsets, matrix: Tensor, constant: Tensor) -> None:
        super().__init__(game.n)
        self.sorted = game.h[0].double().sort(dim=0, descending=True).values  # (n, e)
        self.matrix, self.constant = matrix, constant  # (e, c), (c,)

    def possible(self, d: Tensor, removed: int) -> bool:
        slope = self.matrix @ d
        values = torch.where(slope > 0, self.sorted[0], self.sorted[min(removed, self.n - 1)])
        size = (self.matrix.abs() @ d.abs()) @ values.abs() + d.abs() @ self.constant.abs()
        return bool(slope @ values + d @ self.constant + SLACK * size >= 0)


class Weights:
    """Attention weights (n,) of one branch, with bounds on the rounding error of their logits.

    The error of a logit is relative to its size, so that a weight lies within `low` and `high`.
    """

    def __init__(self, logits: Tensor) -> None:
        shifted = logits - logits.max()
        error = SLACK * (1 + logits.abs())
        self.middle, self.low, self.high = shifted.exp(), (shifted - error).exp(), (shifted + error).exp()

    def highest(self, values: Tensor) -> Tensor:
        """Upper bounds of the products with values (n,) or (n, m)."""
        low, high = (w if values.dim() == 1 else w.unsqueeze(1) for w in (self.low, self.high))
        return torch.where(values > 0, high, low) * values


def bound_of(game: Subsets) -> Bound:
    """The tightest bound for the model."""
    if isinstance(game, PooledSubsets):
        weights = [Weights(column) for column in game.attention[0].double().unbind(dim=1)]
        if len(weights) == 1 and game.layers is not None:
            return SumBound(game, weights[0], game.h[0].double(), game.layers)
        if len(weights) > 1 and game.affine is not None:
            return BranchBound(game, weights, game.h[0].double(), game.affine)
    if isinstance(game, MaxSubsets):
        head = affine_head(game.model.head, game.h.new_zeros(1, 1, game.h.shape[-1]))
        if head is not None:
            return MaxBound(game, head[0][0], head[1])
    return Bound(game.n)


def highest_mean(weights: Weights, values: Tensor, removed: int, margin: Tensor) -> Tensor:
    """An upper bound (m,) of the weighted means of values (n, m) after leaving out up to `removed` rows.

    Dinkelbach's iteration, which ends with a proof: a mean can reach `t` only if the remaining terms
    w * (v - t), without the lowest ones, sum to zero or more. Each step raises the bound by at least `margin`
    (m,). It never subtracts sums, in which a heavy removed row would cancel the digits.

    >>> even = Weights(torch.zeros(3, dtype=torch.float64))
    >>> values = torch.tensor([[0.0], [1.0], [5.0]]).double()
    >>> highest_mean(even, values, 1, torch.tensor([1e-9])).round(decimals=4)
    tensor([3.], dtype=torch.float64)
    """
    removed, top = min(removed, len(values) - 1), values.amax(dim=0) + margin
    bound = (weights.middle @ values) / weights.middle.sum() + margin
    for _ in range(ROUNDS):
        terms = weights.highest(values - bound)  # (n, m)
        lowest = terms.topk(removed, dim=0, largest=False, sorted=False)
        left_out = torch.zeros_like(terms, dtype=torch.bool).scatter_(0, lowest.indices, lowest.values < 0)
        remaining = torch.where(left_out, 0.0, terms)
        above, below = remaining.clamp(min=0).sum(dim=0), remaining.clamp(max=0).sum(dim=0).neg()
        open_ = (above * (1 + 1e-9) >= below) & (bound < top)
        if not bool(open_.any()):
            return torch.minimum(bound, top)
        chosen = torch.where(values > bound, weights.high.unsqueeze(1), weights.low.unsqueeze(1))
        chosen = torch.where(left_out, 0.0, chosen)
        mean = (chosen * values).sum(dim=0) / chosen.sum(dim=0)
        bound = torch.where(open_, torch.maximum(mean, bound) + margin, bound)
    return torch.where(open_, top, torch.minimum(bound, top))


def relaxed_relu(slope: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """An affine upper bound of slope @ relu(y) for y in [low, high]: its slope (e,) and constant."""
    crossing = (low < 0) & (high > 0)
    chord = torch.where(crossing, high / (high - low).clamp(min=1e-30), (low >= 0).to(high.dtype))
    lower = torch.where(crossing, (high > -low).to(high.dtype), chord)
    constant = torch.where(crossing, -chord * low, torch.zeros_like(low))
    positive = slope.clamp(min=0)
    return positive * chord + slope.clamp(max=0) * lower, positive @ constant
