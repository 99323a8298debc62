"""How few instances must leave a bag before a difference of outputs can turn positive: proofs, not searches.

For models that pool by a softmax, what a bag's head sees is a weighted mean of its instances. Where the head
is affine the sign of any difference of outputs is that of a sum over instances, so that the fewest to remove
are the most negative ones: the bound is exact. Behind ReLU layers the head is bounded from above by an affine
function on the box that the mean cannot leave when so many instances go (Zhang et al., "Efficient Neural
Network Robustness Certification with General Activation Functions", 2018), and the same sum decides. A
maximum can fall no lower than the next largest values. Every number is raised by what rounding may have taken
from it, so that rounding can weaken a bound and never make a false one.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

import torch
from torch import Tensor

from xmil.subsets.closed_forms import Layers, MaxSubsets, PooledSubsets, affine_head
from xmil.subsets.engine import Subsets

Affine = tuple[Tensor, Tensor]  # weights (k, e, c) and constants (c,) of a head
SLACK = 1e-6  # what rounding in the model may add to a number, as a share of the terms it is a sum of
ROUNDS = 60  # of an iteration, before it falls back to the largest value


class Bound:
    """For a difference d of outputs, (c,), whether removing so many of n instances can make it positive.

    Of a model without a bound of its own nothing is excluded.
    """

    def __init__(self, n: int) -> None:
        self.n = n

    def possible(self, d: Tensor, removed: int) -> bool:
        """False only where no removal of so many instances, or fewer, makes outputs @ d positive."""
        return len(d) > 0 and removed > 0

    def single(self, d: Tensor) -> bool:
        """False only where no sub-bag at all has a positive difference."""
        return self.possible(d, self.n - 1)

    def order(self, d: Tensor) -> Tensor | None:  # noqa: ARG002 - the bounds of models use it
        """Instances by how much their removal should help, the first most; None where nothing tells."""
        return None

    def fewest(self, d: Tensor, at_most: int) -> int:
        """The smallest number, up to `at_most`, of instances to remove that is not excluded."""
        if not self.single(d):
            return self.n
        return 1 + bisect_left(range(1, at_most), True, key=partial(self.possible, d))


class SumBound(Bound):
    """One attention branch, and a head of linear and ReLU layers."""

    def __init__(self, game: PooledSubsets, weights: Weights, h: Tensor, layers: Layers) -> None:
        super().__init__(game.n)
        self.weights, self.layers = weights, layers
        first, constant = layers[0]
        self.inner = h @ first.T + constant  # (n, e1): what the first layer makes of each instance
        self.size = h.abs() @ first.abs().T + constant.abs()  # of the terms that these are sums of
        self._boxes: dict[int, tuple[Tensor, Tensor]] = {}

    def possible(self, d: Tensor, removed: int) -> bool:
        terms = self.weights.highest(self._values(d, removed)).sort().values
        leaving = min(removed, self.n - 1, int((terms < 0).sum()))
        return bool(terms[leaving:].sum() >= 0)  # what stays, summed by itself: differences would cancel

    def single(self, d: Tensor) -> bool:
        return len(self.layers) > 1 or bool((self._values(d, self.n - 1) >= 0).any())

    def order(self, d: Tensor) -> Tensor:
        slope, shift = self._slope(d, max(1, self.n // 10))
        return (self.weights.middle * (self.inner @ slope + shift)).argsort(stable=True)

    def _values(self, d: Tensor, removed: int) -> Tensor:
        """Values (n,), raised by what rounding may do; their mean is positive wherever the difference is."""
        slope, shift = self._slope(d, removed)
        size = self.size
        for matrix, bias in self.layers[1:]:
            size = size @ matrix.abs().T + bias.abs()
        size = size @ d.abs()
        return self.inner @ slope + shift + SLACK * size + 1e-12 * size.max()

    def _slope(self, d: Tensor, removed: int) -> tuple[Tensor, Tensor]:
        """An affine bound from above of the difference: its slope (e1,) after the first layer, a constant."""
        if len(self.layers) == 1:
            return d, d.new_zeros(())
        last, constant = self.layers[-1]
        slope, shift = d @ last, d @ constant
        boxes = self._layer_boxes(removed)
        for (low, high), (matrix, bias) in zip(boxes[::-1], self.layers[-2::-1], strict=True):
            slope, added = relaxed_relu(slope, low, high)
            shift = shift + added
            if matrix is not self.layers[0][0]:
                slope, shift = slope @ matrix, shift + slope @ bias
        return slope, shift

    def _layer_boxes(self, removed: int) -> list[tuple[Tensor, Tensor]]:
        """Bounds of what each hidden layer sees before its ReLU, once so many are removed."""
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
    """Several attention branches and an affine head: each branch at its best by itself."""

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
    """The maximum of each feature falls to the next largest value at most."""

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
    """Attention weights (n,) of one branch, and what rounding of their logits may make of them.

    A logit is known to a share of its size, so that a weight lies within `low` and `high`.
    """

    def __init__(self, logits: Tensor) -> None:
        shifted = logits - logits.max()
        error = SLACK * (1 + logits.abs())
        self.middle, self.low, self.high = shifted.exp(), (shifted - error).exp(), (shifted + error).exp()

    def highest(self, values: Tensor) -> Tensor:
        """The highest products with values (n,) or (n, m)."""
        low, high = (w if values.dim() == 1 else w.unsqueeze(1) for w in (self.low, self.high))
        return torch.where(values > 0, high, low) * values


def bound_of(game: Subsets) -> Bound:
    """What can be proved of the model."""
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
    """No weighted mean of values (n, m) is higher (m,), once up to so many of the rows are left out.

    Dinkelbach's iteration, with a proof at its end: a mean can reach `t` only where the terms w * (v - t) of
    what stays, without those furthest below, add up to zero or more. It goes up by a `margin` (m,) at least,
    and never takes differences of sums, where a heavy row that leaves would cancel with itself.

    >>> even = Weights(torch.zeros(3, dtype=torch.float64))
    >>> values = torch.tensor([[0.0], [1.0], [5.0]]).double()
    >>> highest_mean(even, values, 1, torch.tensor([1e-9])).round(decimals=4)
    tensor([3.], dtype=torch.float64)
    """
    removed, top = min(removed, len(values) - 1), values.amax(dim=0) + margin
    bound = (weights.middle @ values) / weights.middle.sum() + margin
    for _ in range(ROUNDS):
        terms = weights.highest(values - bound)  # (n, m)
        lowest = terms.topk(removed, dim=0, largest=False)
        leaves = torch.zeros_like(terms, dtype=torch.bool).scatter_(0, lowest.indices, lowest.values < 0)
        staying = torch.where(leaves, 0.0, terms)
        above, below = staying.clamp(min=0).sum(dim=0), staying.clamp(max=0).sum(dim=0).neg()
        open_ = (above * (1 + 1e-9) >= below) & (bound < top)
        if not bool(open_.any()):
            return torch.minimum(bound, top)
        chosen = torch.where(values > bound, weights.high.unsqueeze(1), weights.low.unsqueeze(1))
        chosen = torch.where(leaves, 0.0, chosen)
        mean = (chosen * values).sum(dim=0) / chosen.sum(dim=0)
        bound = torch.where(open_, torch.maximum(mean, bound) + margin, bound)
    return torch.where(open_, top, torch.minimum(bound, top))


def relaxed_relu(slope: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """An affine bound from above of slope @ relu(y) for y in [low, high]: its slope (e,) and constant."""
    crossing = (low < 0) & (high > 0)
    chord = torch.where(crossing, high / (high - low).clamp(min=1e-30), (low >= 0).to(high.dtype))
    beneath = torch.where(crossing, (high > -low).to(high.dtype), chord)
    constant = torch.where(crossing, -chord * low, torch.zeros_like(low))
    positive = slope.clamp(min=0)
    return positive * chord + slope.clamp(max=0) * beneath, positive @ constant
