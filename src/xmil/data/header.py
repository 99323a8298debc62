"""Everything about a stored bag but its features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag, FloatArray, IntArray
from xmil.core.errors import FileError, InputError, bad_parameter
from xmil.core.placement import place
from xmil.data.containers import Rows


@dataclass(frozen=True)
class Ask:
    """What the user knows better than the file: the slide's mpp and the patch edge in level-0 pixels."""

    mpp: float | None = None
    patch_size: int | None = None

    def __post_init__(self) -> None:
        if self.mpp is not None and not (isinstance(self.mpp, Real) and 0 < self.mpp < np.inf):
            raise bad_parameter("mpp", "read_bag", "a float in the range (0, inf)", self.mpp)
        if self.patch_size is not None and not (
            isinstance(self.patch_size, Integral) and self.patch_size > 0
        ):
            raise bad_parameter("patch_size", "read_bag", "an int in the range [1, inf)", self.patch_size)


@dataclass(frozen=True)
class Header:
    """A stored bag, its features still on disk: `read` brings all of them or some rows.

    `features` is None for files that hold coordinates only. `keep` lists the stored rows that belong to the
    bag, where some do not (augmented copies).
    """

    path: Path
    format: str
    features: Rows | None
    coords: IntArray | None = None
    patch_size: int | None = None
    mpp: float | None = None
    slide_id: str | None = None
    encoder: str | None = None
    version: str | None = None
    inferred: tuple[str, ...] = ()
    raw_coords: npt.NDArray[np.float64] | None = None
    unit: str | None = None
    raw_edge: float | None = None
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    keep: IntArray | None = None

    def __len__(self) -> int:
        if self.keep is not None:
            return len(self.keep)
        if self.features is not None:
            return self.features.shape[0]
        return 0 if self.coords is None else len(self.coords)

    @property
    def dim(self) -> int:
        """Width of the feature vectors; 0 where only coordinates are stored."""
        return 0 if self.features is None else self.features.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the features once read."""
        return len(self) * self.dim * 4

    def read(self, rows: npt.ArrayLike | None = None) -> Bag:
        """The bag, or that of the given rows in the given order."""
        index = None if rows is None else _as_index(rows, len(self))
        return Bag(
            features=self._features(index),
            coords=_pick(self.coords, index),
            raw_coords=_pick(self.raw_coords, index),
            columns={
                name: values if index is None else values[index] for name, values in self.columns.items()
            },
            source=str(self.path),
            extra=dict(self.extra),
            **{key: getattr(self, key) for key in _CARRIED},
        )

    def _features(self, index: IntArray | None) -> FloatArray:
        if self.features is None:
            return np.zeros((len(self) if index is None else len(index), 0), np.float32)
        stored = index if self.keep is None else self.keep if index is None else self.keep[index]
        return self.features.read(stored)


_CARRIED = (
    "patch_size",
    "mpp",
    "slide_id",
    "encoder",
    "format",
    "version",
    "inferred",
    "unit",
    "raw_edge",
)


def placed(
    header: Header, xy: npt.ArrayLike | None, unit: str, *, edge: float | None, ask: Ask
) -> dict[str, Any]:
    """The placement fields of a header from stored coordinates, with notes on what the user overrode."""
    notes = list(header.inferred)
    mpp = ask.mpp if ask.mpp is not None else header.mpp
    if xy is None:
        return {"mpp": mpp, "patch_size": ask.patch_size, "inferred": tuple(notes)}
    n = len(header)
    corners = np.asarray(xy)
    if header.features is not None and corners.shape != (n, 2):
        raise FileError(
            f"{header.path}: has {n} feature rows but coordinates of shape {corners.shape}; they must match."
        )
    try:
        found = place(corners, unit, edge=edge, mpp=mpp, patch_size=ask.patch_size)
    except InputError as error:
        raise FileError(f"{header.path}: {error}") from None
    if unit == "px" and edge and ask.patch_size not in (None, round(edge)):
        notes.append(f"patch edge {ask.patch_size} as given; the file says {edge:g}")
    known = {"coords": found.coords, "patch_size": found.patch_size, "mpp": found.mpp}
    raw = {} if unit == "px" else {"raw_coords": corners.astype(np.float64), "unit": unit, "raw_edge": edge}
    return {**known, **raw, "inferred": (*notes, *found.inferred)}


def _pick(values: npt.NDArray[Any] | None, index: IntArray | None) -> npt.NDArray[Any] | None:
    return values if values is None or index is None else values[index]


def _as_index(rows: npt.ArrayLike, n: int) -> IntArray:
    index = np.asarray(rows)
    if index.dtype == bool and index.shape == (n,):
        return np.flatnonzero(index).astype(np.int64)
    if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
        raise bad_parameter("rows", "read", "a list of row numbers, or one bool for each row", rows)
    if index.size and not (-n <= index.min() and index.max() < n):
        raise InputError(
            f"Row numbers must be in the range [-{n}, {n}). Got {int(index.min())} to {int(index.max())}."
        )
    return np.where(index < 0, index + n, index).astype(np.int64)


Gaps = npt.NDArray[np.int64]


def smallest_gap(coords: npt.NDArray[Any]) -> int | None:
    """The step of the patch grid: the smallest positive gap between patches of one row or column.

    CLAM lays a grid into each tissue contour, with an offset of its own. Gaps are therefore taken along
    shared rows and columns only, and where the smallest does not divide the others (two grids that touch one
    line), the commonest wins.

    >>> smallest_gap(np.array([[0, 0], [512, 0], [1536, 0], [300, 77], [812, 77]]))
    512
    """
    if len(coords) < 2 or not np.all(np.abs(coords) < 2**40):  # damage, which placing will name
        return None
    gaps = np.concatenate([_line_gaps(coords, along) for along in (0, 1)])
    if not gaps.size:
        gaps = np.concatenate([_positive(np.diff(np.unique(coords[:, axis]))) for axis in (0, 1)])
    if not gaps.size:
        return None
    values, counts = np.unique(gaps, return_counts=True)
    divides = np.average(values % values[0] == 0, weights=counts)
    return int(values[0] if divides >= 0.5 else values[np.argmax(counts)])


def _line_gaps(coords: npt.NDArray[Any], along: int) -> Gaps:
    """Gaps between neighbours that share the other coordinate."""
    across = 1 - along
    order = np.lexsort((coords[:, along], coords[:, across]))
    line, place = coords[order, across], coords[order, along]
    same = line[1:] == line[:-1]
    return _positive(np.diff(place)[same])


def _positive(gaps: npt.NDArray[Any]) -> Gaps:
    whole: Gaps = np.rint(gaps).astype(np.int64)
    return whole[whole > 0]
