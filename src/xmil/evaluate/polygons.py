"""Polygons of annotations: read from QuPath's GeoJSON, and the share of each patch that they cover."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.absence import absent
from xmil.core.errors import FileError, InputError
from xmil.core.parsing import parse_json

Floats = npt.NDArray[np.float64]
GRID = 8  # points along a patch's edge at which polygons are sampled
_DEEP = 32  # collections within collections; no annotation has more


def covered_by_polygons(
    polygons: Sequence[list[Floats]],
    xy0: Floats,
    patch_size: int,
    *,
    without: Sequence[list[Floats]] = (),
) -> Floats:
    """The share of each box (n, 2) that lies in polygons, each an outline and its holes, on a grid of points.

    What lies in one of `without` does not count. A polygon meets only the boxes near it.

    >>> square = np.array([[0.0, 0.0], [8.0, 0.0], [8.0, 8.0], [0.0, 8.0]])
    >>> covered_by_polygons([[square]], np.array([[0.0, 0.0], [4.0, 0.0]]), 8)
    array([1. , 0.5])
    """
    steps = (np.arange(GRID) + 0.5) / GRID * patch_size
    offsets = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2)
    inside = np.zeros((len(xy0), len(offsets)), dtype=bool)
    strips = _Strips(xy0, patch_size)
    for shapes, value in ((polygons, True), (without, False)):
        for rings in shapes:
            near = strips.touched(rings[0]) if rings else np.empty(0, dtype=np.int64)
            if len(near):
                points = (xy0[near, None] + offsets).reshape(-1, 2)
                inside[near] = np.where(_inside(points, rings).reshape(len(near), -1), value, inside[near])
    return np.asarray(inside.mean(axis=1))


class _Strips:
    """Boxes sorted by their left edge: those that an outline can touch are found by bisection."""

    def __init__(self, xy0: Floats, size: float) -> None:
        self.order = np.argsort(xy0[:, 0], kind="stable")
        self.left, self.top, self.size = xy0[self.order, 0], xy0[self.order, 1], size

    def touched(self, outline: Floats) -> npt.NDArray[np.int64]:
        (left, top), (right, bottom) = outline.min(axis=0), outline.max(axis=0)
        strip = slice(*np.searchsorted(self.left, (left - self.size, right)).tolist())
        tops = self.top[strip]
        return np.asarray(self.order[strip][(tops >= top - self.size) & (tops <= bottom)])


def _inside(points: Floats, rings: list[Floats]) -> npt.NDArray[np.bool_]:
    """Even-odd: within the outline and in no hole."""
    from matplotlib.path import Path as Outline

    inside = np.zeros(len(points), dtype=bool)
    for ring in rings:
        low, high = ring.min(axis=0), ring.max(axis=0)
        near = np.flatnonzero(((points >= low) & (points <= high)).all(axis=1))
        if len(near):
            inside[near] ^= Outline(ring).contains_points(points[near])
    return inside


def read_polygons(
    path: str | PathLike[str],
    *,
    names: Sequence[str] | None = None,
    origin: tuple[float, float] | None = None,
) -> list[list[Floats]]:
    """Level-0 polygons of a GeoJSON file, each a list of rings (k, 2): its outline, then its holes.

    The file counts from the origin that it names, as those of `xmil heatmap` do, else from `origin`, else
    from the corner of level 0.
    """
    found = _read(Path(path))
    features = [f for f in _features(found) if names is None or _class_name(f) in names]
    if names is not None and not features:
        known = sorted({str(_class_name(f))[:80] for f in _features(found)})[:20]
        raise InputError(
            f"{path}: no annotation of class {', '.join(names)}. Found: {', '.join(known) or 'none'}."
        )
    try:
        start = _origin(found, origin)
        polygons = [rings for f in features for rings in _polygons(f.get("geometry", f) or {}, _DEEP)]
        return [[ring + start for ring in rings] for rings in polygons]
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        told = " ".join(str(error).split())[:200]
        raise FileError(f"{path}: an annotation's geometry is damaged ({told}).") from None


def _read(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(absent(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: not a readable GeoJSON file ({error}).") from None


def _origin(found: Any, given: tuple[float, float] | None) -> Floats:
    """Where the file's coordinates count from, in level-0 pixels."""
    about = found.get("xmil") if isinstance(found, dict) else None
    named = about.get("origin") if isinstance(about, dict) else None
    x, y = (given or (0.0, 0.0)) if named is None else named
    return np.array([x, y], dtype=np.float64)


def _features(found: Any) -> list[dict[str, Any]]:
    """QuPath writes a collection, a plain list, or a single feature."""
    inner = found.get("features", [found]) if isinstance(found, dict) else found
    return [f for f in inner if isinstance(f, dict)] if isinstance(inner, list) else []


def _class_name(feature: dict[str, Any]) -> str | None:
    properties = feature.get("properties")
    held = properties.get("classification") if isinstance(properties, dict) else None
    name = held.get("name") if isinstance(held, dict) else held
    return None if name is None else str(name)


def _polygons(geometry: dict[str, Any], deep: int) -> Iterator[list[Floats]]:
    kind = geometry.get("type")
    if kind == "Polygon":
        yield [_ring(ring) for ring in geometry["coordinates"]]
    elif kind == "MultiPolygon":
        for part in geometry["coordinates"]:
            yield [_ring(ring) for ring in part]
    elif kind == "GeometryCollection":
        if not deep:
            raise ValueError("collections within collections")
        for part in geometry["geometries"]:
            yield from _polygons(part, deep - 1)


def _ring(points: Any) -> Floats:
    ring = np.asarray(points, dtype=np.float64)
    if ring.ndim != 2 or ring.shape[0] < 1 or ring.shape[1] < 2 or not np.isfinite(ring[:, :2]).all():
        raise ValueError(f"a ring of shape {ring.shape} or with numbers that are not finite")
    return ring[:, :2]
