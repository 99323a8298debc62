"""Problems: bags with labels and, if known, the evidence of every instance for every class."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.core.bag import FloatArray
from xmil.core.budget import csv_rows
from xmil.core.budget import read_arrays as read_stored
from xmil.core.errors import FileError, InputError, absent, refuse_damage

SPLITS = ("train", "validation", "test")
SHARES = (0.6, 0.15, 0.25)  # of one set, for training, validation and test
Labels = npt.NDArray[np.int64]
Evidence = npt.NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class Block:
    """Bags of one length: features (b, n, d), labels (b,), evidence (b, c, n) if known, names.

    `lesions` (b, n) is the number of each instance's lesion, -1 for none. `first` is the index of the first
    bag. `cases` names the patients of each bag, the unit of tests and intervals; None for bags drawn at
    random, which are independent.
    """

    x: Tensor
    labels: Labels
    evidence: Evidence | None
    names: tuple[str, ...]
    first: int = 0
    lesions: Labels | None = None
    cases: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: Labels) -> Block:
        """Select bags, in the order of the rows."""
        index = torch.from_numpy(rows).to(self.x.device)
        names = tuple(self.names[int(i)] for i in rows)
        evidence = None if self.evidence is None else self.evidence[rows]
        lesions = None if self.lesions is None else self.lesions[rows]
        cases = None if self.cases is None else tuple(self.cases[int(i)] for i in rows)
        return Block(self.x[index], self.labels[rows], evidence, names, self.first, lesions, cases)

    def checksums(self) -> list[str]:
        """SHA-256 of each bag: its features, label and evidence."""
        sums = []
        for i, features in enumerate(self.x.detach().cpu().numpy()):
            digest = hashlib.sha256(f"{features.shape}|{int(self.labels[i])}|".encode())
            digest.update(np.ascontiguousarray(features, dtype=np.float32).tobytes())
            if self.evidence is not None:
                digest.update(np.ascontiguousarray(self.evidence[i]).tobytes())
            sums.append(digest.hexdigest())
        return sums


@dataclass(frozen=True, eq=False)
class LabelledBag:
    """One bag from files: features (n, d), class, evidence (c, n) and name.

    `case` is its patient; without one, a bag is its own case.
    """

    name: str
    features: FloatArray
    label: int
    evidence: Evidence | None = None
    lesions: Labels | None = None
    case: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """A task of a suite: its name in files, title, purpose, and bags.

    `family`, digits or tissue, decides the sizes and training of the built-in models.
    """

    name: str
    title: str
    why: str
    n_classes: int
    in_dim: int
    family: str
    repetitions: int | None = None  # None: any number

    def blocks(self, split: str, repetition: int, device: str = "cpu") -> list[Block]:
        """The bags of a split in a repetition, grouped by length."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """All settings that decide the bags, in plain types."""
        raise NotImplementedError


def checksum(problem: Problem, repetition: int) -> str:
    """SHA-256 of the test bags of a repetition."""
    sums = [s for block in problem.blocks("test", repetition) for s in block.checksums()]
    return hashlib.sha256("".join(sums).encode()).hexdigest()


@dataclass(frozen=True, eq=False, kw_only=True)
class ListedProblem(Problem):
    """A problem whose bags are read by number; `splits[r]` has the rows of repetition r's splits.

    `scaled`: features get mean 0 and deviation 1 over the training bags.
    """

    n_bags: int
    bag: Callable[[int], LabelledBag]
    splits: Sequence[dict[str, Labels]]
    about: dict[str, Any]
    scaled: bool = False

    def blocks(self, split: str, repetition: int, device: str = "cpu") -> list[Block]:
        """The bags of a split as one block if all have one length, else one block each."""
        if repetition >= len(self.splits):
            raise InputError(
                f"{self.title} has only {len(self.splits)} repetitions; choose fewer with `repetitions=`."
            )
        bags = [self.bag(int(i)) for i in self.splits[repetition][split]]
        if self.scaled:
            rows = np.concatenate([self.bag(int(i)).features for i in self.splits[repetition]["train"]])
            mean, std = rows.mean(axis=0), rows.std(axis=0)
            scale = np.where(std > 1e-6, std, 1).astype(np.float32)
            bags = [replace(bag, features=(bag.features - mean) / scale) for bag in bags]
        if len({bag.features.shape for bag in bags}) == 1:
            return [_block(bags, 0, device)]
        return [_block([bag], i, device) for i, bag in enumerate(bags)]

    def settings(self) -> dict[str, Any]:
        """The name and the settings of the bags."""
        return {"name": self.name, "bags": self.n_bags, **self.about}


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
        tuple(bag.case or bag.name for bag in bags),
    )


def read_arrays(path: Path, *names: str) -> list[Any]:
    """Read arrays of an .npz file by their names."""
    try:
        stored = read_stored(path)
        if "" in stored:
            raise ValueError("it holds one array without a name")
        return [stored[name] for name in names]
    except FileNotFoundError:
        raise FileError(absent(path)) from None
    except KeyError:
        raise FileError(f"{path}: needs the arrays {', '.join(names)}.") from None
    except FileError:
        raise
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: not a readable .npz file ({error}).") from None


def read_table(path: Path, *columns: str) -> list[dict[str, str]]:
    """Read the rows of a CSV file that needs these columns."""
    with refuse_damage(f"{path}: cannot be read"):
        rows = csv_rows(path)
    missing = [name for name in columns if not rows or name not in rows[0]]
    if missing:
        raise FileError(f"{path}: needs the column {missing[0]!r}; it must have {', '.join(columns)}.")
    return rows
