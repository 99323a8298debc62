"""A bag: the instances of one slide, with what is known of where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Bag:
    """Instances of one slide: features (n, d), and level-0 boxes where they are known.

    `coords` are the top-left corners in level-0 pixels and `patch_size` is the level-0 edge. `inferred`
    lists, in sentences, whatever was worked out rather than read. Coordinates in another unit that cannot
    be converted yet (microns without the slide's mpp) stay in `raw_coords` with their `unit`.

    >>> bag = Bag(np.zeros((3, 8)), coords=[[0, 0], [256, 0], [0, 256]], patch_size=256, slide_id="s1")
    >>> bag
    Bag('s1', 3 instances x 8 features, patch_size=256)
    """

    features: FloatArray
    coords: IntArray | None = None
    patch_size: int | None = None
    mpp: float | None = None
    slide_id: str | None = None
    encoder: str | None = None
    source: str | None = None
    format: str | None = None
    version: str | None = None
    inferred: tuple[str, ...] = ()
    raw_coords: npt.NDArray[np.float64] | None = None
    unit: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name = f"bag {self.slide_id!r}" if self.slide_id else "the bag"
        features = as_features(self.features, name=name)
        object.__setattr__(self, "features", features)
        object.__setattr__(self, "coords", _as_coords(self.coords, n=len(features), name=name))
        object.__setattr__(self, "inferred", tuple(self.inferred))

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        n, d = self.features.shape
        known = [
            f"{key}={value}" for key in ("patch_size", "mpp", "encoder") if (value := getattr(self, key))
        ]
        return f"Bag({', '.join([repr(self.slide_id), f'{n} instances x {d} features', *known])})"

    @property
    def dim(self) -> int:
        """Width of the feature vectors."""
        return int(self.features.shape[1])

    def select(self, rows: npt.ArrayLike) -> Bag:
        """The bag of the given rows, in the given order."""
        index = np.asarray(rows)
        coords = None if self.coords is None else self.coords[index]
        raw_coords = None if self.raw_coords is None else self.raw_coords[index]
        return replace(self, features=self.features[index], coords=coords, raw_coords=raw_coords)


def as_features(values: Any, *, name: str = "the bag") -> FloatArray:
    """A contiguous float32 (n, d) array of real numbers; integers and half precision are widened."""
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise InputError(f"Features of {name} must be numbers. Got dtype {array.dtype} instead.")
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2:
        raise InputError(f"Features of {name} must have shape (instances, width). Got {array.shape} instead.")
    return np.ascontiguousarray(array, dtype=np.float32)


def _as_coords(values: Any, *, n: int, name: str) -> IntArray | None:
    if values is None:
        return None
    coords = np.asarray(values)
    if coords.shape != (n, 2):
        raise InputError(f"Coordinates of {name} must have shape ({n}, 2). Got {coords.shape} instead.")
    if coords.dtype.kind not in "iuf" or not np.all(np.isfinite(coords)):
        raise InputError(f"Coordinates of {name} must be finite numbers. Got dtype {coords.dtype} instead.")
    whole = np.rint(coords) if coords.dtype.kind == "f" else coords
    return np.ascontiguousarray(whole, dtype=np.int64)
