"""From the coordinates a producer stored to level-0 boxes, and why boxes may be unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError

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


@dataclass(frozen=True)
class Placement:
    """Level-0 corners and edge as far as they are known, with what was worked out on the way."""

    coords: npt.NDArray[np.int64] | None = None
    patch_size: int | None = None
    mpp: float | None = None
    inferred: tuple[str, ...] = ()


def place(
    xy: npt.ArrayLike,
    unit: str,
    *,
    edge: float | None = None,
    mpp: float | None = None,
    patch_size: int | None = None,
) -> Placement:
    """Level-0 boxes from coordinates in a unit; `edge` is in microns, or in the unit's own pixels.

    >>> place([[0, 0], [256, 0]], "um", edge=256, mpp=0.5).coords.tolist()
    [[0, 0], [512, 0]]
    >>> place([[256, 256]], "px-centre", edge=128, mpp=0.25)
    Placement(coords=array([[0, 0]]), patch_size=512, mpp=0.25, inferred=())
    """
    corners = _checked(xy)
    notes: list[str] = []
    if unit == "um" and mpp is None and edge and patch_size:
        mpp = edge / patch_size
        notes.append(f"mpp {mpp:g} from the tile of {edge:g} µm and the given patch edge of {patch_size} px")
    size = patch_size if patch_size is not None else _edge_px(unit, edge, mpp)
    scaled = _level0(corners, unit, edge=edge, mpp=mpp, size=size)
    if scaled is None:
        return Placement(None, size, mpp, tuple(notes))
    if unit == "px-read":
        notes.append(f"reading resolution {size}/{edge:g} of level 0 from the given patch edge")
    return Placement(np.rint(scaled).astype(np.int64), size, mpp, tuple(notes))


def boxes(
    coords: npt.NDArray[np.int64] | None, patch_size: int | None, *, name: str, unit: str | None
) -> npt.NDArray[np.int64]:
    """Level-0 boxes (n, 4) as x0, y0, x1, y1; an error with the reason where they are unknown."""
    reason = missing_for_drawing(coords is not None, patch_size, unit=unit)
    if reason is not None or coords is None or patch_size is None:
        raise InputError(f"{name} cannot be drawn: {reason}.")
    return np.concatenate([coords, coords + patch_size], axis=1)


def missing_for_drawing(has_coords: bool, patch_size: int | None, *, unit: str | None) -> str | None:
    """Why boxes are unknown and the way out, or None."""
    if not has_coords:
        return _WAY_OUT.get(unit or "", "it has no coordinates; explaining and evaluating work without")
    return _WAY_OUT["px"] if patch_size is None else None


def _checked(xy: npt.ArrayLike) -> npt.NDArray[np.float64]:
    try:
        corners = np.asarray(xy, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("Coordinates must be numbers.") from None
    if corners.ndim != 2 or corners.shape[1] != 2:
        raise InputError(f"Coordinates must have shape (instances, 2). Got {corners.shape} instead.")
    if not np.all(np.abs(corners) < _FAR):  # false for NaN as well
        raise InputError(
            "Coordinates must be finite and within 2^40. The file is damaged or of another layout."
        )
    return corners


def _edge_px(unit: str, edge: float | None, mpp: float | None) -> int | None:
    if edge is None:
        return None
    if unit == "px":
        return round(edge)
    return round(edge / mpp) if mpp and unit in ("um", "px-centre") else None


def _level0(
    xy: npt.NDArray[np.float64], unit: str, *, edge: float | None, mpp: float | None, size: int | None
) -> npt.NDArray[np.float64] | None:
    if unit == "px":
        return xy
    if unit == "um":
        return xy / mpp if mpp else None
    if unit == "px-centre":
        return xy - size / 2 if size else None
    if unit == "px-read":
        return xy * (size / edge) if size and edge else None
    return None
