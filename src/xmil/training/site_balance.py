"""Site-balanced sampling: what tells sites apart cannot tell labels apart.

A site is drawn by how many bags of its rarer label it has, then one bag of each of its labels. Within a group
the site says nothing about the label, so that a model gains nothing from knowing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError
from xmil.training.targets import Rows


@dataclass(frozen=True, eq=False)
class SiteGroups:
    """Rows of the training bags by site and label, and the chance of each site."""

    rows: tuple[tuple[Rows, ...], ...]
    chances: npt.NDArray[np.float64]
    n: int

    @classmethod
    def of(cls, rows: Rows, sites: Sequence[str | None], labels: Sequence[str]) -> SiteGroups:
        """The groups of some rows; sites with one label alone are never drawn.

        >>> groups = SiteGroups.of(np.arange(5), ["a", "a", "a", "b", "b"], ["0", "0", "1", "0", "1"])
        >>> groups.chances.tolist()
        [0.5, 0.5]
        """
        held: dict[str, dict[str, list[int]]] = {}
        for row in rows.tolist():
            site = sites[row]
            if site is None:
                raise InputError(f"Bag {row} of the training set has no site; fill in the column of sites.")
            held.setdefault(site, {}).setdefault(labels[row], []).append(row)
        mixed = [by_label for _, by_label in sorted(held.items()) if len(by_label) > 1]
        if not mixed:
            raise InputError(
                f"Site-balanced sampling needs a site with two labels, and each of the {len(held)} sites has "
                "one: site and label cannot be told apart."
            )
        weights = np.array([min(map(len, by_label.values())) for by_label in mixed], dtype=np.float64)
        groups = tuple(
            tuple(np.array(members, dtype=np.int64) for _, members in sorted(by_label.items()))
            for by_label in mixed
        )
        return cls(groups, weights / weights.sum(), len(rows))

    def draw(self, seed: tuple[int, int]) -> list[int]:
        """An epoch: as many bags as there are, group by group, in an order that the seed decides."""
        rng = np.random.default_rng(seed)
        order: list[int] = []
        while len(order) < self.n:
            labels = self.rows[int(rng.choice(len(self.rows), p=self.chances))]
            order += [int(rng.choice(labels[i])) for i in rng.permutation(len(labels))]
        return order[: self.n]
