"""A simple game close to the one at hand: its means over any stratum are known, and only the rest is sampled.

Its value of a coalition is a level for each size, a sum over members whose slopes are parabolas in the size,
and a sum over pairs of members. Memberships count from the coalition's share of all players.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

POWERS = 3  # of the size, in the slopes of members
RIDGE = 1e-9  # in shares of the mean square of the columns, some of which depend on each other


def columns(n: int) -> int:
    """The numbers that make such a game of n players."""
    return n + 1 + POWERS * n + n * (n - 1) // 2


@dataclass(frozen=True)
class Surrogate:
    """Levels (n + 1,), slopes (3, n), and what pairs add (n, n), symmetric with an empty diagonal."""

    levels: Tensor
    slopes: Tensor
    pairs: Tensor

    @classmethod
    def fit(cls, masks: Tensor, values: Tensor) -> Surrogate:
        """The one with the least squared distance from values (b,) of coalitions (b, n)."""
        n = masks.shape[1]
        x = _table(masks)
        gram = x.T @ x
        gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()))
        found = torch.linalg.solve(gram, x.T @ values)
        levels, slopes, added = found.split([n + 1, POWERS * n, n * (n - 1) // 2])
        i, j = torch.triu_indices(n, n, offset=1, device=masks.device)
        pairs = masks.new_zeros(n, n, dtype=torch.float64).index_put_((i, j), added)
        return cls(levels, slopes.view(POWERS, n), pairs + pairs.T)

    @property
    def n(self) -> int:
        """Players."""
        return len(self.pairs)

    def __call__(self, masks: Tensor) -> Tensor:
        """Values (b,) of coalitions (b, n)."""
        sizes = masks.sum(dim=1)
        share = sizes.double() / self.n
        held = masks.double() - share[:, None]
        powers = torch.stack([share**p for p in range(POWERS)], dim=1)
        members = (held * (powers @ self.slopes)).sum(dim=1)
        return self.levels[sizes] + members + ((held @ self.pairs) * held).sum(dim=1) / 2

    def mean(self, size: int, p: int, q: int) -> Tensor:
        """Means (n, n) over the coalitions of a size that hold i (p = 1) or not (0), and j (q)."""
        share, rest, n = size / self.n, size - p - q, self.n
        one = rest / max(1, n - 2)
        both = rest * (rest - 1) / max(1, (n - 2) * (n - 3))
        other, two = one - share, both - 2 * share * one + share**2  # of one and of two other players
        first, second = p - share, q - share
        slopes = sum(share**k * self.slopes[k] for k in range(POWERS))
        assert isinstance(slopes, Tensor)  # noqa: S101  # narrows the type for mypy
        b, i, j = slopes, self.rows[:, None], self.rows[None, :]
        alone = first * b[:, None] + second * b[None, :] + other * (b.sum() - b[:, None] - b[None, :])
        beside = other * (first * (i - self.pairs) + second * (j - self.pairs))
        apart = two * (self.rows.sum() / 2 - i - j + self.pairs)
        found: Tensor = self.levels[size] + alone + first * second * self.pairs + beside + apart
        return found

    @cached_property
    def rows(self) -> Tensor:
        """What each player adds with all others, (n,)."""
        return self.pairs.sum(dim=1)


def _table(masks: Tensor) -> Tensor:
    """The columns (b, m) of coalitions (b, n)."""
    n, sizes = masks.shape[1], masks.sum(dim=1)
    share = (sizes.double() / n)[:, None]
    held = masks.double() - share
    i, j = torch.triu_indices(n, n, offset=1, device=masks.device)
    levels = torch.eye(n + 1, dtype=torch.float64, device=masks.device)[sizes]
    return torch.cat([levels, *(held * share**p for p in range(POWERS)), held[:, i] * held[:, j]], dim=1)
