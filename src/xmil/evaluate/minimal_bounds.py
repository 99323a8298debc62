"""How few instances must leave a bag before a difference of outputs can turn positive: proofs, not searches.

For models that pool by a softmax, what a bag's head sees is a weighted mean of its instances. Where the head
is affine the sign of any difference of outputs is that of a sum over instances, so that the fewest to remove
are the most negative ones: the bound is exact. Behind ReLU layers the head is bounded from above by an affine
function on the box that the mean cannot leave when so many instances go (Zhang et al., "Efficient Neural
Network Robustness Certification with General Activation Functions", 2018), and the same sum decides. A
maximum can fall no lower than the next largest values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xmil.methods.coalitions import (
    Coalitions,
    Layers,
    MaxCoalitions,
    PooledCoalitions,
    affine_head,
    relu_layers,
)

SLACK = 1e-6  # of the largest term: what rounding in the model may add to a difference


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

    def order(self, d: Tensor) -> Tensor | None:
        """Instances by how much their removal should help, the first most; None where nothing tells."""
        return None if len(d) else d

    def fewest(self, d: Tensor, at_most: int) -> int:
        """The smallest number, up to `at_most`, of instances to remove that is not excluded."""
        if not self.single(d):
            return self.n
        low, high = 1, at_most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.possible(d, middle) else (middle + 1, high)
        return low


class SumBound(Bound):
    """One attention branch, and a head of linear and ReLU layers."""

    def __init__(self, game: PooledCoalitions, weights: Tensor, h: Tensor, layers: Layers) -> None:
        super().__init__(game.n)
        self.weights, self.layers = weights, layers
        first, constant = layers[0]
        self.inner = h @ first.T + constant  # (n, e1): what the first layer makes of each instance
        self._boxes: dict[int, tuple[Tensor, Tensor]] = {}

    def possible(self, d: Tensor, removed: int) -> bool:
        terms = self._terms(d, removed)
        worst = terms.clamp(max=0).neg().topk(min(removed, self.n - 1)).values
        return bool(terms.sum() + worst.sum() >= -SLACK * float((terms.abs()).sum()))

    def single(self, d: Tensor) -> bool:
        if len(self.layers) > 1:
            return True
        terms = self._terms(d, self.n - 1)
        return bool((terms >= -SLACK * terms.abs().max()).any())

    def order(self, d: Tensor) -> Tensor:
        return self._terms(d, max(1, self.n // 10)).argsort(stable=True)

    def _terms(self, d: Tensor, removed: int) -> Tensor:
        """Terms (n,) whose sum over a sub-bag is positive wherever its difference is."""
        last, constant = self.layers[-1]
        slope, shift = d @ last, d @ constant
        if len(self.layers) == 1:
            return self.weights * (self.inner @ d)
        boxes = self._layer_boxes(removed)
        for (low, high), (matrix, bias) in zip(boxes[::-1], self.layers[-2::-1], strict=True):
            slope, added = relaxed_relu(slope, low, high)
            shift = shift + added
            if matrix is not self.layers[0][0]:
                slope, shift = slope @ matrix, shift + slope @ bias
        return self.weights * (self.inner @ slope + shift)

    def _layer_boxes(self, removed: int) -> list[tuple[Tensor, Tensor]]:
        """Bounds of what each hidden layer sees before its ReLU, once so many are removed."""
        if removed not in self._boxes:
            high = highest_mean(self.weights, self.inner, removed)
            self._boxes[removed] = (-highest_mean(self.weights, -self.inner, removed), high)
        boxes = [self._boxes[removed]]
        for matrix, bias in self.layers[1:-1]:
            low, high = (edge.clamp(min=0) for edge in boxes[-1])
            up, down = matrix.clamp(min=0), matrix.clamp(max=0)
            boxes.append((up @ low + down @ high + bias, up @ high + down @ low + bias))
        return boxes


class BranchBound(Bound):
    """Several attention branches and an affine head: each branch at its best by itself."""

    def __init__(self, game: PooledCoalitions, weights: Tensor, values: Tensor, constant: Tensor) -> None:
        super().__init__(game.n)
        self.weights, self.values, self.constant = weights, values, constant  # (n, k), (n, k, c), (c,)

    def possible(self, d: Tensor, removed: int) -> bool:
        each = self.values @ d  # (n, k)
        best = [
            highest_mean(w, v.unsqueeze(1), removed)[0] for w, v in zip(self.weights.T, each.T, strict=True)
        ]
        return bool(sum(best) + d @ self.constant >= -SLACK * float(each.abs().max()))


class MaxBound(Bound):
    """The maximum of each feature falls to the next largest value at most."""

    def __init__(self, game: MaxCoalitions, matrix: Tensor, constant: Tensor) -> None:
        super().__init__(game.n)
        self.sorted = game.h.double().sort(dim=0, descending=True).values  # (n, e)
        self.matrix, self.constant = matrix, constant  # (e, c), (c,)

    def possible(self, d: Tensor, removed: int) -> bool:
        slope = self.matrix @ d
        values = torch.where(slope > 0, self.sorted[0], self.sorted[min(removed, self.n - 1)])
        terms = slope * values
        return bool(terms.sum() + d @ self.constant >= -SLACK * float(terms.abs().sum()))


def bound_of(game: Coalitions) -> Bound:
    """What can be proved of the model."""
    if isinstance(game, PooledCoalitions):
        return _pooled_bound(game)
    if isinstance(game, MaxCoalitions):
        head = affine_head(game.model, game.h.new_zeros(1, 1, game.h.shape[1]))  # type: ignore[arg-type]
        if head is not None:
            return MaxBound(game, head[0][0], head[1])
    return Bound(game.n)


def _pooled_bound(game: PooledCoalitions) -> Bound:
    h = game.model.embed(game.x)
    a = game.model.attend(h)[0].double()
    weights = (a - a.amax(dim=0)).exp()  # (n, k)
    if weights.shape[1] == 1:
        layers = relu_layers(game.model, h.new_zeros(1, 1, h.shape[-1]))
        return Bound(game.n) if layers is None else SumBound(game, weights[:, 0], h[0].double(), layers)
    if game.head is not None:
        values = torch.einsum("ne,kec->nkc", h[0].double(), game.head[0])
        return BranchBound(game, weights, values, game.head[1])
    return Bound(game.n)


def highest_mean(weights: Tensor, values: Tensor, removed: int) -> Tensor:
    """The highest weighted means (m,) of values (n, m) once up to so many of the rows are left out.

    Dinkelbach's iteration: leave out the rows furthest below the mean so far, until none helps.

    >>> highest_mean(torch.ones(3), torch.tensor([[0.0], [1.0], [5.0]]), 1)
    tensor([3.])
    """
    removed = min(removed, len(values) - 1)
    mean = (weights @ values) / weights.sum()
    while removed > 0:
        below = (weights.unsqueeze(1) * (mean - values)).clamp(min=0)
        worst = below.topk(removed, dim=0)
        out = (worst.values > 0) * weights[worst.indices]
        rest = weights.sum() - out.sum(dim=0)
        better = (weights @ values - (out * values.gather(0, worst.indices)).sum(dim=0)) / rest
        if not bool((better > mean + 1e-12 * (1 + mean.abs())).any()):
            break
        mean = torch.maximum(mean, better)
    return mean


def relaxed_relu(slope: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """An affine bound from above of slope @ relu(y) for y in [low, high]: its slope (e,) and constant."""
    crossing = (low < 0) & (high > 0)
    chord = torch.where(crossing, high / (high - low).clamp(min=1e-30), (low >= 0).to(high.dtype))
    beneath = torch.where(crossing, (high > -low).to(high.dtype), chord)
    constant = torch.where(crossing, -chord * low, torch.zeros_like(low))
    positive = slope.clamp(min=0)
    return positive * chord + slope.clamp(max=0) * beneath, positive @ constant
