"""Interactions of few players from sampled coalitions, each of which counts for every pair.

The interaction index is a sum over sizes of differences of means: v over the coalitions of one size that hold
both of a pair, one of them, or none. Every sampled coalition is in one such stratum of each pair, so that
all pairs share it; Kolpaczki et al., "SVARM-IQ", AISTATS 2024, sample strata in this way. Here only the
distance from a surrogate is sampled: samples come in two halves, and the surrogate of each is fitted to the
other. Sizes of few coalitions are run in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb

import torch
from torch import Tensor

from xmil.methods.surrogate import Surrogate, columns

MOST = 50  # players: the strata of a pair grow with them, and so do the samples that fill each
HITS = 4  # coalitions that the scarcest stratum of a pair gets in the first round, in the mean
SPARED = 4  # a size is run in full where that costs this share of its samples at most
FITTED = 4, 8  # coalitions per column of a surrogate: the fewest, and the most that it is fitted to
PATTERNS = ((1, 1), (1, 0), (0, 1), (0, 0))
Runs = tuple[Tensor, Tensor]  # coalitions (b, n) and their values (b,)


@dataclass(frozen=True)
class Moments:
    """Of one size: the number of coalitions (k, k) of a pattern, and sums of values and of squares."""

    counts: Tensor
    sums: Tensor
    squares: Tensor

    def mean_and_variance(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """The stratum's mean with its variance; that of the whole size where it has one sample or none."""
        counts = self.counts.round().clamp(min=1)
        mean = self.sums / counts
        spread = (self.squares - counts * mean.square()).clamp(min=0) / (counts - 1).clamp(min=1)
        return mean, torch.where(self.counts.round() >= 2, spread, pooled) / counts


class Strata:
    """The coalitions of n players that were run: those of whole sizes, and two halves of samples."""

    def __init__(self, n: int, budget: int, rng: torch.Generator) -> None:
        self.n, self.rng = n, rng
        weights = {s: _hardness(n, s) for s in range(3, n - 2)}
        total = sum(weights.values()) or 1.0
        self.shares = {s: w / total for s, w in weights.items() if not _few(n, s, budget * w / total)}
        self.whole = [s for s in range(n + 1) if s not in self.shares]
        self.full: list[Runs] = []
        self.halves: tuple[list[Runs], list[Runs]] = ([], [])

    def within(self, budget: int) -> bool:
        """Whether a budget of coalitions fills the strata."""
        return self.enumerated + self.first <= budget

    @property
    def first(self) -> int:
        """Coalitions of the first round."""
        if not self.shares:
            return 0
        pairs = self.n * (self.n - 1)
        hit = max(HITS * pairs / _rarest(self.n, s) / share for s, share in self.shares.items())
        return max(round(hit), 2 * FITTED[0] * columns(self.n))

    @property
    def enumerated(self) -> int:
        """Coalitions of the sizes that are run in full."""
        return sum(comb(self.n, s) for s in self.whole)

    def every(self) -> Tensor:
        """The coalitions of the sizes that are run in full."""
        return torch.cat([_all_of(self.n, s) for s in self.whole])

    def draw(self, count: int) -> Tensor:
        """So many coalitions, about, more of the sizes in which pairs are hard to meet; in random order."""
        drawn = [self._of_size(s, max(2, round(count * share))) for s, share in self.shares.items()]
        found = torch.cat(drawn)
        return found[torch.randperm(len(found), generator=self.rng)]

    def add_full(self, masks: Tensor, values: Tensor) -> None:
        """Take up what the coalitions of whole sizes gave."""
        self.full.append((masks, values))

    def add(self, masks: Tensor, values: Tensor) -> None:
        """Take up what drawn coalitions gave."""
        for part, half in enumerate(self.halves):
            half.append((masks[part::2], values[part::2]))

    def estimate(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Interaction indices and standard errors (k, k) of the chosen players."""
        mean, variance = self._sum(_joined(self.full), None, chosen)
        if self.shares:
            halves = [_joined(half) for half in self.halves]
            found = [
                self._sum(half, self._fitted(other), chosen)
                for half, other in zip(halves, halves[::-1], strict=True)
            ]
            mean = mean + (found[0][0] + found[1][0]) / 2
            variance = (found[0][1] + found[1][1]) / 4
        return mean / (self.n - 1), variance.sqrt() / (self.n - 1)

    def _fitted(self, runs: Runs) -> Surrogate:
        most = FITTED[1] * columns(self.n)
        return Surrogate.fit(runs[0][:most], runs[1][:most])

    def _sum(self, runs: Runs, near: Surrogate | None, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """What the sizes at hand add to the sum over sizes, and its variance; none of whole sizes."""
        masks, values = runs
        rest, sizes = values if near is None else values - near(masks), masks.sum(dim=1)
        total = variance = torch.zeros(len(chosen), len(chosen), dtype=torch.float64, device=chosen.device)
        for size in sizes.unique().tolist():
            at = sizes == size
            for (p, q), found in _moments(masks[at][:, chosen].double(), rest[at]).items():
                if p + q <= size <= self.n - 2 + p + q:
                    mean, doubt = found.mean_and_variance(rest[at].square().mean())
                    known = 0.0 if near is None else near.mean(size, p, q)[chosen][:, chosen]
                    total = total + (1 if p == q else -1) * (mean + known)
                    variance = variance + (0.0 if near is None else doubt)
        return total, variance

    def _of_size(self, size: int, count: int) -> Tensor:
        members = torch.rand(count, self.n, generator=self.rng).argsort(dim=1)[:, :size]
        return torch.zeros(count, self.n, dtype=torch.bool).scatter_(1, members, True)


def _joined(runs: list[Runs]) -> Runs:
    masks, values = zip(*runs, strict=True)
    return torch.cat(masks), torch.cat(values).double()


def _moments(held: Tensor, rest: Tensor) -> dict[tuple[int, int], Moments]:
    """Of each pattern, whether a pair's first and second are held (b, k)."""
    tables: dict[tuple[int, int], list[Tensor]] = {pattern: [] for pattern in PATTERNS}
    for weights in (torch.ones_like(rest), rest, rest.square()):
        both = held.T @ (weights[:, None] * held)
        one, every = weights @ held, weights.sum()
        tables[1, 1].append(both)
        tables[1, 0].append(one[:, None] - both)
        tables[0, 1].append(one[None, :] - both)
        tables[0, 0].append(every - one[:, None] - one[None, :] + both)
    return {pattern: Moments(*parts) for pattern, parts in tables.items()}


def _all_of(n: int, size: int) -> Tensor:
    """All coalitions of a size, (b, n)."""
    rows = torch.tensor(list(combinations(range(n), size)), dtype=torch.int64).view(comb(n, size), size)
    return torch.zeros(len(rows), n, dtype=torch.bool).scatter_(1, rows, True)


def _few(n: int, size: int, samples: float) -> bool:
    return SPARED * comb(n, size) <= samples


def _rarest(n: int, size: int) -> int:
    return min(size * (size - 1), (n - size) * (n - size - 1))


def _hardness(n: int, size: int) -> float:
    """Samples that a size needs, in proportion: the root of the sum of one over each stratum's share."""
    both, none = size * (size - 1), (n - size) * (n - size - 1)
    return float((1 / both + 2 / (size * (n - size)) + 1 / none) ** 0.5)
