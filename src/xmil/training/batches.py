"""Batches of bags: shuffled and sampled each epoch, or whole; each process takes its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from xmil.core.errors import InputError, XmilError
from xmil.core.interpreter import safe_path
from xmil.core.text import counted, shorten
from xmil.data.dataset import BagDataset, Draw, EpochSampler
from xmil.training.loop import padded
from xmil.training.training_set import Rows

Item = tuple[Tensor, int, Tensor | None]  # features (n, d), the row of the bag, coordinates (n, 2)
SHOWN = 12  # sites that a message lists
NUMBERS = 1 << 22  # numbers in an evaluation batch of bags of one size


class TrainingBags(Dataset[Item | XmilError]):
    """Features of a dataset's bags; refuses files with values that are not finite.

    Errors are returned as items: a worker process would bury them in its traceback.
    """

    def __init__(self, bags: BagDataset) -> None:
        self.bags = bags
        self._checked = bags.preloaded
        if self._checked:
            for row in range(len(bags)):
                check_finite(bags, row, bags[row].features)

    def __getitem__(self, which: Draw) -> Item | XmilError:
        try:
            bag = self.bags[which].bag
            features = torch.from_numpy(bag.features)
            if not self._checked:
                check_finite(self.bags, which[1], features)
        except XmilError as error:
            return error
        return features, which[1], None if bag.coords is None else torch.from_numpy(bag.coords)

    def drawing(self, draw: int | None, *, seed: int) -> TrainingBags:
        """The same bags with another `draw`, without checking them again."""
        other = TrainingBags.__new__(TrainingBags)
        other.bags, other._checked = self.bags.drawing(draw, seed=seed), self._checked
        return other


class Batches(Sampler[list[Draw]]):
    """The batches of one epoch; a process takes every `world`-th bag of each, or the first as a stand-in."""

    def __init__(
        self,
        rows: Rows,
        batch: int,
        *,
        seed: int,
        shuffle: bool,
        groups: SiteGroups | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.rows, self.batch, self.rank, self.world = rows, batch, rank, world
        self.groups, self.seed = groups, seed
        self._order = EpochSampler(len(rows), seed=seed, shuffle=shuffle)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self._order.set_epoch(epoch)

    def plan(self) -> list[list[int]]:
        """The rows of each batch over all processes."""
        if self.groups is None:
            order = [int(self.rows[i]) for _, i in self._order]
        else:
            order = self.groups.draw((self.seed, self._order.epoch))
        return [order[i : i + self.batch] for i in range(0, len(order), self.batch)]

    def __iter__(self) -> Iterator[list[Draw]]:
        for batch in self.plan():
            own = batch[self.rank :: self.world] or batch[:1]
            yield [(self._order.epoch, row) for row in own]


def equal_sizes(rows: Rows, bags: BagDataset) -> list[list[Draw]]:
    """Batches of whole bags of equal size, limited by memory."""
    by_size: dict[int, list[int]] = {}
    for row in rows.tolist():
        by_size.setdefault(len(bags.headers[row]), []).append(row)
    batches: list[list[Draw]] = []
    for n, members in by_size.items():
        step = max(1, NUMBERS // max(1, n * bags.dim))
        batches += [[(0, row) for row in members[i : i + step]] for i in range(0, len(members), step)]
    return batches


class Loader:
    """Lists of items, batch by batch; bags in memory need no worker processes."""

    def __init__(
        self, bags: TrainingBags, batches: Iterable[list[Draw]], *, workers: int, pin: bool = False
    ) -> None:
        workers = 0 if bags.bags.preloaded else workers
        self._loader: DataLoader[Any] = DataLoader(
            bags,
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=list,
            persistent_workers=workers > 0,
            pin_memory=pin,
            generator=torch.Generator(),  # so that the loader does not advance the generator of dropout
        )

    def __iter__(self) -> Iterator[list[Item]]:
        with safe_path():
            batches = iter(self._loader)  # starts the worker processes
        for items in batches:
            for item in items:
                if isinstance(item, XmilError):
                    raise item
            yield items


def padded_coords(bags: BagDataset, items: Sequence[Item]) -> Tensor:
    """Pad coordinates like `padded` to (b, n, 2); refuse a file without them."""
    for _, row, coords in items:
        if coords is None:
            raise InputError(
                f"{bags.headers[row].path}: has no level-0 coordinates, which the model needs; choose a "
                "simple scan without positions, or features with coordinates."
            )
    return padded([coords for _, _, coords in items if coords is not None])[0]


def check_finite(bags: BagDataset, row: int, features: Tensor) -> None:
    """Refuse a bag that holds NaN or infinity."""
    if not bool(torch.isfinite(features).all()):
        raise InputError(f"{bags.headers[row].path}: holds features that are not finite; extract them again.")


@dataclass(frozen=True, eq=False)
class SiteGroups:
    """Rows of the training bags by site and label, and the probability of each site.

    A group has one bag of each label of a site, so that within a group the site does not reveal the label.
    Over an epoch, sites and labels are not balanced: of more than two labels, those at more sites come more
    often. `notes` list the sites that are never drawn because they have only one label.
    """

    rows: tuple[tuple[Rows, ...], ...]
    chances: npt.NDArray[np.float64]
    n: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        rows: Rows,
        sites: Sequence[str | None],
        labels: Sequence[str],
        classes: Sequence[Collection[str]] | None = None,
    ) -> SiteGroups:
        """Group rows; sites with only one label are never drawn.

        `classes` names the classes of each bag, by default its label. A class that would never be drawn is an
        error, which lists the counts of every site.

        >>> groups = SiteGroups.of(np.arange(5), ["a", "a", "a", "b", "b"], ["0", "0", "1", "0", "1"])
        >>> groups.chances.tolist()
        [0.5, 0.5]
        """
        by_site: dict[str, dict[str, list[int]]] = {}
        for row in rows.tolist():
            site = sites[row]
            if site is None:
                raise InputError(f"Bag {row} of the training set has no site; fill in the column of sites.")
            by_site.setdefault(site, {}).setdefault(labels[row], []).append(row)
        by_site = dict(sorted(by_site.items()))
        mixed = [by_label for by_label in by_site.values() if len(by_label) > 1]
        if not mixed:
            raise InputError(
                "Site-balanced sampling needs a site with two labels, but each of the "
                f"{len(by_site)} sites has one; set train.sampling to 'shuffled'."
            )
        own = [(label,) for label in labels] if classes is None else classes
        counts = {
            site: Counter(name for members in by_label.values() for row in members for name in own[row])
            for site, by_label in by_site.items()
        }
        one_label = [site for site, by_label in by_site.items() if len(by_label) == 1]
        _check_classes(counts, one_label)
        weights = np.array([min(map(len, by_label.values())) for by_label in mixed], dtype=np.float64)
        groups = tuple(
            tuple(np.array(members, dtype=np.int64) for _, members in sorted(by_label.items()))
            for by_label in mixed
        )
        bags = sum(len(members) for site in one_label for members in by_site[site].values())
        listing = _count_sites({site: counts[site] for site in one_label})
        note = f"site-balanced sampling never draws the {counted(bags, 'bag')} of "
        note += f"{counted(len(one_label), 'site')} with one label ({listing})"
        return cls(groups, weights / weights.sum(), len(rows), (note,) if one_label else ())

    def draw(self, seed: tuple[int, int]) -> list[int]:
        """Draw an epoch: as many bags as in the training set, group by group, in a seeded order."""
        rng = np.random.default_rng(seed)
        order: list[int] = []
        while len(order) < self.n:
            labels = self.rows[int(rng.choice(len(self.rows), p=self.chances))]
            order += [int(rng.choice(labels[i])) for i in rng.permutation(len(labels))]
        return order[: self.n]


def _check_classes(counts: Mapping[str, Counter[str]], one_label: Sequence[str]) -> None:
    """Refuse classes that only occur at sites with one label, which would never be drawn."""
    drawn = {name for site, own in counts.items() if site not in one_label for name in own}
    classes = {name for own in counts.values() for name in own}
    if missing := sorted(classes - drawn):
        sites = [site for site in one_label if any(name in counts[site] for name in missing)]
        raise InputError(
            f"Site-balanced sampling would never draw {', '.join(map(repr, missing))}, which only occurs at "
            f"sites with one label ({', '.join(sites)}). Bags by site: {_count_sites(counts)}. Set "
            "train.sampling to 'shuffled', or add bags of other labels at these sites."
        )


def _count_sites(counts: Mapping[str, Counter[str]]) -> str:
    cells = {site: ", ".join(f"{name} {own[name]}" for name in sorted(own)) for site, own in counts.items()}
    return shorten([f"{site}: {cell}" for site, cell in cells.items()], SHOWN, comma=";")
