"""A bag: the instances of one slide, with what is known of where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError, bad_parameter
from xmil.core.names import counted
from xmil.core.placement import boxes, place

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Bag:
    """Instances of one slide: features (n, d), and level-0 boxes where they are known.

    `coords` are the top-left corners in level-0 pixels and `patch_size` is the level-0 edge. `inferred`
    lists, in sentences, whatever was worked out rather than read. Coordinates in another unit (microns, tile
    centres) stay in `raw_coords` with their `unit` and edge; `coords` is None until the slide's mpp is known.
    `columns` holds further values per instance, such as annotations. `extras` are what a network needs beside
    the features: arrays with a row per instance, and n x n matrices that join instances, which are sparse
    (SciPy) or go by a name that starts with "adj".

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
    raw_edge: float | None = None
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name = f"bag {self.slide_id!r}" if self.slide_id else "the bag"
        features = as_features(self.features, name=name)
        object.__setattr__(self, "features", features)
        object.__setattr__(self, "coords", _as_coords(self.coords, n=len(features), name=name))
        object.__setattr__(self, "inferred", tuple(self.inferred))
        _check_scale(self.patch_size, self.mpp, name=name)
        _check_lengths({"raw_coords": self.raw_coords, **self.columns}, n=len(features), name=name)
        object.__setattr__(self, "extras", _as_extras(self.extras, n=len(features), name=name))

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        n, d = self.features.shape
        known = [
            f"{key}={value}" for key in ("patch_size", "mpp", "encoder") if (value := getattr(self, key))
        ]
        held = f"{counted(n, 'instance')} x {counted(d, 'feature')}"
        return f"Bag({', '.join([repr(self.slide_id), held, *known])})"

    @property
    def dim(self) -> int:
        """Width of the feature vectors."""
        return int(self.features.shape[1])

    @property
    def slide_size(self) -> tuple[int, int] | None:
        """Width and height of the slide's level 0, where the file stores them."""
        width, height = (str(self.extra.get(f"level0_{edge}")) for edge in ("width", "height"))
        known = width.isdecimal() and height.isdecimal() and min(int(width), int(height)) > 0
        return (int(width), int(height)) if known else None

    def select(self, rows: npt.ArrayLike) -> Bag:
        """The bag of the given rows, in the given order."""
        index = np.asarray(rows)
        coords = None if self.coords is None else self.coords[index]
        raw_coords = None if self.raw_coords is None else self.raw_coords[index]
        columns = {key: values[index] for key, values in self.columns.items()}
        extras = {key: _selected(key, values, index) for key, values in self.extras.items()}
        picked = self.features[index]
        return replace(
            self, features=picked, coords=coords, raw_coords=raw_coords, columns=columns, extras=extras
        )

    def boxes(self) -> IntArray:
        """Level-0 boxes (n, 4) as x0, y0, x1, y1; an error with the reason where they are unknown."""
        name = f"Bag {self.slide_id!r}" if self.slide_id else "The bag"
        return boxes(self.coords, self.patch_size, name=name, unit=self.unit)

    def placed(self, *, mpp: float | None = None, patch_size: int | None = None) -> Bag:
        """The bag with level-0 coordinates from `raw_coords` and the slide's mpp or the patch edge.

        >>> stamp = Bag(np.zeros((1, 4)), raw_coords=np.array([[256.0, 0.0]]), unit="um", raw_edge=256)
        >>> stamp.placed(mpp=0.5).boxes().tolist()
        [[512, 0, 1024, 512]]
        """
        mpp = self.mpp if mpp is None else mpp
        if self.raw_coords is None or self.unit is None:
            return replace(self, mpp=mpp, patch_size=self.patch_size if patch_size is None else patch_size)
        found = place(self.raw_coords, self.unit, edge=self.raw_edge, mpp=mpp, patch_size=patch_size)
        known: dict[str, Any] = {"coords": found.coords, "patch_size": found.patch_size, "mpp": found.mpp}
        return replace(self, **known, inferred=self.inferred + found.inferred)


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


def joins_instances(name: str, values: Any) -> bool:
    """Whether an extra is an n x n matrix between instances: a sparse one, or one called adj..."""
    return hasattr(values, "tocsr") or name.lower().startswith("adj")


def _as_extras(extras: Mapping[str, Any], *, n: int, name: str) -> dict[str, Any]:
    """Extras as arrays with a row per instance, or square matrices; sparse ones stay sparse."""
    found = {}
    for key, values in extras.items():
        kept = values if hasattr(values, "tocsr") else np.asarray(values)
        must = (n, n) if joins_instances(key, kept) else (n, *kept.shape[1:])
        if kept.shape != must:
            raise InputError(f"The extra {key!r} of {name} must have shape {must}. Got {kept.shape} instead.")
        found[key] = kept
    return found


def _selected(name: str, values: Any, index: npt.NDArray[Any]) -> Any:
    if hasattr(values, "tocsr"):
        return values.tocsr()[index][:, index]
    return values[index][:, index] if joins_instances(name, values) else values[index]


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


def _check_scale(patch_size: int | None, mpp: float | None, *, name: str) -> None:
    if patch_size is not None and not (float(patch_size).is_integer() and patch_size > 0):
        raise bad_parameter("patch_size", name, "an int in the range [1, inf)", patch_size)
    if mpp is not None and not 0 < mpp < np.inf:
        raise bad_parameter("mpp", name, "a float in the range (0, inf)", mpp)


def _check_lengths(arrays: Mapping[str, npt.NDArray[Any] | None], *, n: int, name: str) -> None:
    for key, values in arrays.items():
        if values is not None and len(values) != n:
            raise InputError(f"The column {key!r} of {name} must have {n} rows. Got {len(values)} instead.")
