"""Bags for training, sampled each epoch from a seed; whole bags for validation and test."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Sampler

from xmil.core.bag import Bag, IntArray
from xmil.core.errors import InputError, StrPath, bad_parameter, unknown_name
from xmil.data.bags import JoinedHeader, open_bag
from xmil.data.header import Header

logger = logging.getLogger(__name__)
Draw = tuple[int, int]  # (epoch, row of the dataset)


@dataclass(frozen=True)
class Sample:
    """One bag with its target."""

    bag: Bag
    target: Any

    @property
    def features(self) -> torch.Tensor:
        """Features (n, d) as a tensor that shares the bag's memory."""
        return torch.from_numpy(self.bag.features)


@dataclass(frozen=True)
class InstanceFilter:
    """Select instances by annotation columns: any of `has` above zero, none of `lacks`.

    Names are columns of the bag, `annotation:<class>` for the paper's annotations.
    """

    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def rows(self, header: Header) -> IntArray:
        """The rows of a bag that pass, in order; an error if there are none."""
        keep = np.ones(len(header), bool)
        if self.has:
            keep &= np.any([_column(header, name) > 0 for name in self.has], axis=0)
        for name in self.lacks:
            keep &= ~(_column(header, name) > 0)
        if not keep.any():
            raise InputError(f"{header.path}: no patch passes the filter; leave the slide out or widen it.")
        return np.flatnonzero(keep).astype(np.int64)


@dataclass(frozen=True)
class LeftOut:
    """The number of instances of a slide that `max_instances` leaves out."""

    slide_id: str
    instances: int
    kept: int


@dataclass
class BagDataset(Dataset[Sample]):
    """Bags in files with their targets, read on demand.

    For training, set `draw`: each epoch samples that many instances per bag, in file order, by a generator
    seeded with (seed, epoch, row); index with (epoch, row), as `EpochSampler` does. Without `draw` a bag is
    whole, or the same `max_instances` of it every time; `left_out` reports the others. Up to `preload` bytes
    of features stay in memory. An entry of `paths` with several paths is a case, its slides joined in order.
    """

    paths: Sequence[StrPath | Sequence[StrPath]]
    targets: Sequence[Any]
    draw: int | None = None
    max_instances: int | None = None
    instances: InstanceFilter | None = None
    preload: int = 0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.targets):
            raise InputError(
                f"There are {len(self.paths)} bags but {len(self.targets)} targets; each bag needs one."
            )
        _check_count("draw", self.draw)
        _check_count("max_instances", self.max_instances)
        self.headers = [
            open_bag(entry, **self.options)
            if isinstance(entry, str | PathLike)
            else JoinedHeader([open_bag(path, **self.options) for path in entry])
            for entry in self.paths
        ]
        first = next((header for header in self.headers if len(header)), None)
        for header in self.headers:
            if first is not None and len(header) and header.dim != first.dim:
                raise InputError(
                    f"{header.path}: has width {header.dim} but {first.path} has {first.dim}; "
                    "a dataset needs features of one encoder."
                )
        filters = self.instances
        self._rows = [None if filters is None else filters.rows(header) for header in self.headers]
        self.left_out = self._left_out()
        self._bags = self._preloaded()

    def __len__(self) -> int:
        return len(self.headers)

    def __getitem__(self, which: int | Draw) -> Sample:
        epoch, row = which if isinstance(which, tuple) else (0, which)
        if not -len(self) <= row < len(self):
            raise IndexError(f"bag {row} of {len(self)}")
        rows, stored = self._draw_rows(row % len(self), epoch), self._bags.get(row % len(self))
        if stored is None:
            return Sample(self.headers[row].read(rows), self.targets[row])
        return Sample(stored if rows is None else stored.select(rows), self.targets[row])

    @property
    def dim(self) -> int:
        """Width of the features."""
        return self.headers[0].dim if self.headers else 0

    @property
    def preloaded(self) -> bool:
        """Whether all bags are in memory."""
        return len(self._bags) == len(self)

    def drawing(self, draw: int | None, *, seed: int) -> BagDataset:
        """The same files and preloaded features with another `draw`."""
        _check_count("draw", draw)
        other = copy(self)
        other.draw, other.seed = draw, seed
        return other

    def preloading(self, preload: int) -> BagDataset:
        """The same files with up to `preload` bytes of features in memory."""
        other = copy(self)
        other.preload = preload
        other._bags = other._preloaded()
        return other

    def _draw_rows(self, row: int, epoch: int) -> IntArray | None:
        """Rows of one bag in one epoch; None means all. In file order, since models may depend on it."""
        rows = self._rows[row]
        n = len(self.headers[row]) if rows is None else len(rows)
        limit = self.draw or self.max_instances
        if limit is None or n <= limit:
            return rows
        entropy = (self.seed, epoch, row) if self.draw else (self.seed, row)
        sample = np.sort(np.random.default_rng(entropy).choice(n, size=limit, replace=False))
        return sample.astype(np.int64) if rows is None else rows[sample]

    def _left_out(self) -> tuple[LeftOut, ...]:
        if self.draw is not None or self.max_instances is None:
            return ()
        over = [
            LeftOut(str(header.slide_id), n - self.max_instances, self.max_instances)
            for header, rows in zip(self.headers, self._rows, strict=True)
            if (n := len(header if rows is None else rows)) > self.max_instances
        ]
        if over:
            logger.warning(
                "max_instances=%d leaves out %d patches of %d slides of %d.",
                *(self.max_instances, sum(slide.instances for slide in over), len(over), len(self)),
            )
        return tuple(over)

    def _preloaded(self) -> dict[int, Bag]:
        bags: dict[int, Bag] = {}
        room = self.preload
        for row, header in enumerate(self.headers):
            if header.nbytes <= room:
                bags[row] = header.read()
                room -= header.nbytes
        if self.preload and len(bags) < len(self.headers):
            logger.info(
                "%d of %d bags fit into the preload limit; the others are read on demand.",
                len(bags),
                len(self),
            )
        return bags


class EpochSampler(Sampler[Draw]):
    """Yields (epoch, row) in a seeded order that changes each epoch; `set_epoch` sets the epoch.

    >>> sampler = EpochSampler(4, seed=0)
    >>> list(sampler), len(sampler)
    ([(0, 2), (0, 0), (0, 1), (0, 3)], 4)
    """

    def __init__(self, n: int, *, seed: int = 0, shuffle: bool = True) -> None:
        self.n, self.seed, self.shuffle, self.epoch = n, seed, shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Draw]:
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(self.n) if self.shuffle else np.arange(self.n)
        return iter([(self.epoch, int(row)) for row in order])


def collate(samples: Sequence[Sample]) -> tuple[list[torch.Tensor], torch.Tensor, list[str | None]]:
    """Collect features as a list, since bags differ in size, targets (b, ...) and slide names."""
    targets = torch.as_tensor(np.array([sample.target for sample in samples]))
    return [sample.features for sample in samples], targets, [sample.bag.slide_id for sample in samples]


def _column(header: Header, name: str) -> npt.NDArray[Any]:
    if name not in header.columns:
        raise InputError(f"{header.path}: {unknown_name('instance column', name, header.columns)}")
    return np.asarray(header.columns[name])


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, Integral) or value < 1):
        raise bad_parameter(name, "BagDataset", "an int in the range [1, inf) or None", value)
