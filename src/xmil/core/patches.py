"""Where instances lie: level-0 boxes as far as they are known, and coordinates as a producer stored them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError

IntArray = npt.NDArray[np.int64]
Unit = Literal["px", "um", "px-centre", "px-read", "unknown"]

CONVENTIONS: dict[str, str] = {
    "px": "top-left corners in level-0 pixels",
    "um": "top-left corners in microns",
    "px-centre": "tile centres in level-0 pixels, tile edge in microns",
    "px-read": "boxes in pixels of an unstored reading resolution",
    "unknown": "coordinates of an unknown unit",
}
_WAY_OUT: dict[str, str] = {
    "px": "the patch edge is unknown; pass patch_size= (level-0 pixels)",
    "um": "coordinates are in microns; pass the slide's mpp=",
    "px-centre": "coordinates are tile centres; pass the slide's mpp= or patch_size= (level-0 pixels)",
    "px-read": "the reading resolution is not stored; pass patch_size= (the patch edge in level-0 pixels)",
    "unknown": "the unit of the stored coordinates is unknown; write the bag again with level-0 coordinates",
}
_FAR = 2.0**40  # no slide has more pixels on an edge; beyond lie damaged files


@dataclass(frozen=True, eq=False)
class Patches:
    """The patches of one slide: level-0 corners (n, 2) and edge, microns per pixel, level 0's size.

    Coordinates in another unit (microns, tile centres) stay in `raw_coords` with their `unit` and edge;
    `coords` is None until the slide's mpp is known. `notes` say what was worked out on the way.

    >>> stored = Patches.stored([[256, 0]], "um", edge=256)
    >>> stored.coords is None, stored.placed(mpp=0.5).boxes().tolist()
    (True, [[512, 0, 1024, 512]])
    """

    coords: IntArray | None = None
    patch_size: int | None = None
    mpp: float | None = None
    raw_coords: npt.NDArray[np.float64] | None = None
    unit: str | None = None
    raw_edge: float | None = None
    slide_size: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def stored(
        cls,
        xy: npt.ArrayLike,
        unit: str,
        *,
        edge: float | None = None,
        mpp: float | None = None,
        patch_size: int | None = None,
    ) -> Patches:
        """From coordinates in a unit; `edge` is in microns, or in the unit's own pixels.

        >>> Patches.stored([[256, 256]], "px-centre", edge=128, mpp=0.25).coords.tolist()
        [[0, 0]]
        """
        try:
            raw = np.asarray(xy, dtype=np.float64)
        except (TypeError, ValueError):
            raise InputError("Coordinates must be numbers.") from None
        if raw.ndim != 2 or raw.shape[1] != 2:
            raise InputError(f"Coordinates must have shape (instances, 2). Got {raw.shape} instead.")
        if not np.all(np.abs(raw) < _FAR):  # false for NaN as well
            raise InputError(
                "Coordinates must be finite and within 2^40. The file is damaged or of another layout."
            )
        notes: list[str] = []
        if unit == "um" and mpp is None and edge and patch_size:
            mpp = edge / patch_size
            tile = f"the tile of {edge:g} µm and the given patch edge of {patch_size} px"
            notes.append(f"mpp {mpp:g} from {tile}")
        size, level0 = patch_size, None
        if size is None and edge is not None:
            scale = 1.0 if unit == "px" else mpp if unit in ("um", "px-centre") else None
            size = round(edge / scale) if scale else None
        if unit == "px":
            return cls(np.rint(raw).astype(np.int64), size, mpp)
        if unit == "um" and mpp:
            level0 = raw / mpp
        elif unit == "px-centre" and size:
            level0 = raw - size / 2
        elif unit == "px-read" and size and edge:
            level0 = raw * (size / edge)
            notes.append(f"reading resolution {size}/{edge:g} of level 0 from the given patch edge")
        coords = None if level0 is None else np.rint(level0).astype(np.int64)
        return cls(coords, size, mpp, raw, unit, edge, notes=tuple(notes))

    def placed(self, mpp: float | None = None, *, patch_size: int | None = None) -> Patches:
        """Level-0 coordinates from `raw_coords` and the slide's mpp or the patch edge; new notes alone."""
        mpp = self.mpp if mpp is None else mpp
        if self.raw_coords is None or self.unit is None:
            size = self.patch_size if patch_size is None else patch_size
            return replace(self, mpp=mpp, patch_size=size, notes=())
        level0 = Patches.stored(
            self.raw_coords, self.unit, edge=self.raw_edge, mpp=mpp, patch_size=patch_size
        )
        return replace(
            self, coords=level0.coords, patch_size=level0.patch_size, mpp=level0.mpp, notes=level0.notes
        )

    def take(self, rows: Any) -> Patches:
        """The patches of some rows, in their order: indices, booleans or a slice."""
        names = ("coords", "raw_coords")
        return replace(self, **{k: v[rows] for k in names if (v := getattr(self, k)) is not None})

    def boxes(self, name: str = "The bag") -> IntArray:
        """Level-0 boxes (n, 4) as x0, y0, x1, y1; an error with the reason where they are unknown."""
        if self.coords is None or self.patch_size is None:
            raise InputError(f"{name} cannot be drawn: {self.missing}.")
        return np.concatenate([self.coords, self.coords + self.patch_size], axis=1)

    @property
    def missing(self) -> str | None:
        """Why boxes are unknown and the way out, or None."""
        if self.coords is None:
            nowhere = "it has no coordinates; explaining and evaluating work without"
            return _WAY_OUT.get(self.unit or "", nowhere)
        return _WAY_OUT["px"] if self.patch_size is None else None

    @classmethod
    def joined(cls, parts: Sequence[Patches]) -> Patches:
        """The patches of several slides one after another; what they do not share is left out."""
        names = ("patch_size", "mpp", "unit", "raw_edge")
        shared: dict[str, Any] = {name: shared_value(parts, name) for name in names}
        for name in ("coords", "raw_coords"):
            arrays = [getattr(part, name) for part in parts]
            shared[name] = None if any(array is None for array in arrays) else np.concatenate(arrays)
        return cls(**shared)


class Places(TypedDict, total=False):
    """The attributes of patches by which what holds them can be made."""

    patch_size: int | None
    mpp: float | None
    raw_coords: npt.NDArray[np.float64] | None
    unit: str | None
    raw_edge: float | None
    slide_size: tuple[int, int] | None


def merged(patches: Patches | None, coords: Any | EllipsisType, places: Places) -> Patches:
    """Patches with what was given by name on top; coords of `...` were not given."""
    changes: dict[str, Any] = {**places} if coords is ... else {"coords": coords, **places}
    base = Patches() if patches is None else patches
    return replace(base, **changes) if changes else base


class Placed:
    """What holds patches has their attributes."""

    patches: Patches

    @property
    def coords(self) -> IntArray | None:
        """Top-left corners (n, 2) in level-0 pixels, where they are known."""
        return self.patches.coords

    @property
    def patch_size(self) -> int | None:
        """The patch edge in level-0 pixels."""
        return self.patches.patch_size

    @property
    def mpp(self) -> float | None:
        """Microns per level-0 pixel."""
        return self.patches.mpp

    @property
    def raw_coords(self) -> npt.NDArray[np.float64] | None:
        """Coordinates (n, 2) as they were stored, where their unit is not level-0 pixels."""
        return self.patches.raw_coords

    @property
    def unit(self) -> str | None:
        """The unit of `raw_coords`."""
        return self.patches.unit

    @property
    def raw_edge(self) -> float | None:
        """The patch edge as it was stored."""
        return self.patches.raw_edge

    @property
    def slide_size(self) -> tuple[int, int] | None:
        """Width and height of the slide's level 0, where the file stores them."""
        return self.patches.slide_size


def shared_value(parts: Sequence[Any], name: str) -> Any:
    """The attribute that all parts have in common, else None."""
    values = {getattr(part, name) for part in parts}
    return values.pop() if len(values) == 1 else None
