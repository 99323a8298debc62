"""A background: ordinary patches with which evidence is compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.bag import FloatArray, as_features
from xmil.core.budget import read_arrays
from xmil.core.durable import write_atomically
from xmil.core.errors import FileError, InputError, check_count

KEPT = 256  # patches that a background keeps by default
CHECKPOINT, USER = "checkpoint", "user"


@dataclass(frozen=True, eq=False)
class Background:
    """The mean (d,) of `n` patches, and a few of them, `patches` (k, d).

    `source` is its origin: "checkpoint" if it is stored with a model, "user" if the user named it.

    >>> background_of([np.zeros((3, 2)), np.ones((1, 2))], keep=2)
    Background(4 patches x 2 features, 2 kept)
    """

    mean: FloatArray
    patches: FloatArray
    n: int
    source: str = CHECKPOINT

    def __post_init__(self) -> None:
        mean = np.ascontiguousarray(self.mean, dtype=np.float32)
        patches = as_features(self.patches, name="the background")
        if mean.ndim != 1 or patches.shape[1] != len(mean):
            raise InputError(
                f"A background has a mean (d,) and patches (k, d). Got {mean.shape} and {patches.shape}."
            )
        if not (np.isfinite(mean).all() and np.isfinite(patches).all()):
            raise InputError("The features of a background must be finite; some are NaN or inf.")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "patches", patches)

    @property
    def dim(self) -> int:
        """Width of the feature vectors."""
        return len(self.mean)

    @property
    def digest(self) -> str:
        """A digest of the content."""
        return sha256(self.mean.tobytes() + self.patches.tobytes()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """The name of its mean, to show with scores."""
        return f"mean of {self.n} patches"

    def save(self, path: Path) -> None:
        """Write the background to a file, whole or not at all."""

        def write(part: str) -> None:
            with open(part, "wb") as stream:
                np.savez(stream, mean=self.mean, patches=self.patches, n=np.array(self.n))

        write_atomically(path, write)

    @classmethod
    def load(cls, path: Path) -> Background | None:
        """Read the background that a user named for a run; None if there is none."""
        try:
            stored = read_arrays(path)
            return cls(stored["mean"], stored["patches"], int(stored["n"]), USER)
        except FileNotFoundError:
            return None
        except FileError:
            raise
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            reason = " ".join(str(error).split())[:200]
            raise FileError(
                f"{path}: not a readable background ({reason}); explain the cohort again."
            ) from None

    def __repr__(self) -> str:
        return f"Background({self.n} patches x {self.dim} features, {len(self.patches)} kept)"


def background_of(bags: Iterable[Any], *, keep: int = KEPT, seed: int = 0) -> Background:
    """Make the background of arrays (n, d) or bags; each bag counts the same, whatever its size.

    Its mean is the mean of the bags' means, and `keep` patches are drawn from the bags as evenly as possible.
    The same bags in the same order make the same background.
    """
    check_count("keep", keep, owner="background")
    rng = np.random.default_rng(seed)
    drawn: list[FloatArray] = []
    total, n, keys, turns = np.zeros(0), 0, [], []
    for bag in bags:
        features = as_features(getattr(bag, "features", bag), name="the background")
        if drawn and features.shape[1] != len(total):
            raise InputError(
                f"Bags of one background must share a width. Got {len(total)} and {features.shape[1]}."
            )
        if not len(features):
            continue
        mean = features.mean(axis=0, dtype=np.float64)
        total = total + mean if drawn else mean
        n += len(features)
        key = rng.random(len(features))
        first = np.argsort(key)[:keep]
        drawn.append(features[first])
        keys.append(key[first])
        turns.append(np.arange(len(first)))
    if n == 0:
        raise InputError("A background needs at least one patch, but the bags have none.")
    chosen = np.lexsort([np.concatenate(keys), np.concatenate(turns)])[:keep]  # from each bag in turn
    return Background((total / len(drawn)).astype(np.float32), np.concatenate(drawn)[chosen], n)
