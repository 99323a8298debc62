"""A problem: bags with labels and, if it is known, what every instance says about every class."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.core.bag import FloatArray
from xmil.core.errors import InputError

SPLITS = ("train", "validation", "test")
SHARES = (0.6, 0.15, 0.25)  # of one set, for training, validation and test
Labels = npt.NDArray[np.int64]
Evidence = npt.NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class Block:
    """Bags of one length: features (b, n, d), labels (b,), evidence (b, c, n) if it is known, names.

    `lesions` (b, n) numbers what each instance lies in, -1 for none. `first` is the place of the first bag.
    """

    x: Tensor
    labels: Labels
    evidence: Evidence | None
    names: tuple[str, ...]
    first: int = 0
    lesions: Labels | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: Labels) -> Block:
        """Some of the bags, in the order of the rows."""
        at = torch.from_numpy(rows).to(self.x.device)
        names = tuple(self.names[int(i)] for i in rows)
        evidence = None if self.evidence is None else self.evidence[rows]
        lesions = None if self.lesions is None else self.lesions[rows]
        return Block(self.x[at], self.labels[rows], evidence, names, self.first, lesions)

    def checksums(self) -> list[str]:
        """SHA-256 of each bag: its features, label and evidence."""
        x = self.x.detach().cpu().numpy()
        return [self._checksum(x[i], i) for i in range(len(self))]

    def _checksum(self, features: FloatArray, i: int) -> str:
        digest = hashlib.sha256(f"{features.shape}|{int(self.labels[i])}|".encode())
        digest.update(np.ascontiguousarray(features, dtype=np.float32).tobytes())
        if self.evidence is not None:
            digest.update(np.ascontiguousarray(self.evidence[i]).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class LabelledBag:
    """One bag as files give it: features (n, d), its class, evidence (c, n), and where it comes from."""

    name: str
    features: FloatArray
    label: int
    evidence: Evidence | None = None
    lesions: Labels | None = None


class Problem(Protocol):
    """A task of a suite; `family` says which sizes and training the built-in models take for it."""

    @property
    def name(self) -> str:
        """What files and columns are called by."""

    @property
    def title(self) -> str:
        """What readers know it by."""

    @property
    def why(self) -> str:
        """What it probes."""

    @property
    def n_classes(self) -> int:
        """How many classes the labels have."""

    @property
    def in_dim(self) -> int:
        """The width of the features."""

    @property
    def family(self) -> str:
        """`digits` or `tissue`."""

    def blocks(self, split: str, repetition: int, device: str = "cpu") -> list[Block]:
        """The bags of a split in a repetition, those of one length together."""

    def settings(self) -> dict[str, Any]:
        """All that decides the bags, in plain types."""


def checksum(problem: Problem, repetition: int) -> str:
    """SHA-256 of the test bags of a repetition."""
    digest = hashlib.sha256()
    for block in problem.blocks("test", repetition):
        for one in block.checksums():
            digest.update(one.encode())
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ListedProblem:
    """A problem whose bags are at hand; `splits[r]` names the rows of each split in repetition r.

    `scaled`: features get mean 0 and deviation 1 over the training bags.
    """

    name: str
    title: str
    why: str
    n_classes: int
    bags: Sequence[LabelledBag]
    splits: Sequence[dict[str, Labels]]
    about: dict[str, Any] = field(default_factory=dict)
    family: str = "tissue"
    scaled: bool = False

    @property
    def in_dim(self) -> int:
        """The width of the features."""
        width = getattr(self.bags, "width", None)  # files are read once
        return int(self.bags[0].features.shape[1]) if width is None else int(width)

    def blocks(self, split: str, repetition: int, device: str = "cpu") -> list[Block]:
        """The bags of a split, each alone unless all have one length."""
        if repetition >= len(self.splits):
            raise InputError(
                f"{self.title} has {len(self.splits)} repetitions; ask for fewer with repetitions=."
            )
        bags = [self.bags[int(i)] for i in self.splits[repetition][split]]
        if self.scaled:
            shift, scale = self._scale(repetition)
            bags = [replace(bag, features=(bag.features - shift) / scale) for bag in bags]
        return as_blocks(bags, device)

    def _scale(self, repetition: int) -> tuple[FloatArray, FloatArray]:
        """Mean and deviation of the training bags' features."""
        rows = self.splits[repetition]["train"]
        features = np.concatenate([self.bags[int(i)].features for i in rows])
        spread = features.std(axis=0)
        return features.mean(axis=0), np.where(spread > 1e-6, spread, 1).astype(np.float32)

    def settings(self) -> dict[str, Any]:
        """The name, and what the bags were made of."""
        return {"name": self.name, "bags": len(self.bags), **self.about}


def as_blocks(bags: Sequence[LabelledBag], device: str = "cpu") -> list[Block]:
    """Bags of one common length as one block, others one by one."""
    if len({bag.features.shape for bag in bags}) == 1:
        return [_block(list(bags), 0, device)]
    return [_block([bag], i, device) for i, bag in enumerate(bags)]


def _block(bags: list[LabelledBag], first: int, device: str) -> Block:
    x = torch.from_numpy(np.stack([bag.features for bag in bags])).to(device)
    evidence = [bag.evidence for bag in bags if bag.evidence is not None]
    lesions = [bag.lesions for bag in bags if bag.lesions is not None]
    return Block(
        x,
        np.array([bag.label for bag in bags], dtype=np.int64),
        np.stack(evidence) if len(evidence) == len(bags) else None,
        tuple(bag.name for bag in bags),
        first,
        np.stack(lesions) if len(lesions) == len(bags) else None,
    )
