"""Scores against marked instances: pointing game and relevance mass; marks from masks and annotations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag
from xmil.core.errors import FileError, InputError, bad_parameter

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
GRID = 8  # points along a patch's edge at which polygons are sampled


def pointing_game(marked: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """1 where the highest score lies on a marked instance, else 0; ties at the top count by their share.

    >>> pointing_game([True, False, False], [0.9, 0.1, 0.9])
    0.5
    """
    truth, values = _pair(marked, scores)
    if not truth.any():
        return float("nan")
    return float(truth[values == values.max()].mean())


def relevance_mass(marked: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """The share of the positive scores' sum on marked instances; nan where nothing is marked or positive.

    Arras et al., "CLEVR-XAI", Information Fusion 2022, arXiv:2003.07258.

    >>> relevance_mass([True, False, False], [3.0, 1.0, -5.0])
    0.75
    """
    truth, values = _pair(marked, scores)
    positive = np.maximum(values, 0.0)
    if not truth.any() or positive.sum() == 0:
        return float("nan")
    return float(positive[truth].sum() / positive.sum())


def marked_by_mask(
    mask: npt.ArrayLike,
    coords: npt.ArrayLike,
    *,
    patch_size: int,
    downsample: float = 1.0,
    share: float = 0.5,
) -> Bools:
    """Instances of whose box at least a share is set in a mask (h, w), `downsample` level-0 pixels per pixel.

    Boxes may reach over the mask's border; what lies outside counts as unset.

    >>> marked_by_mask([[1, 0], [0, 0]], [[0, 0], [256, 0]], patch_size=256, downsample=256)
    array([ True, False])
    """
    covered = _covered_by_mask(np.asarray(mask) != 0, _boxes(coords), patch_size, downsample)
    return covered >= _checked_share(share)


def marked_by_geojson(
    path: str | PathLike[str],
    coords: npt.ArrayLike,
    *,
    patch_size: int,
    names: Sequence[str] | None = None,
    share: float = 0.5,
    origin: tuple[float, float] | None = None,
) -> Bools:
    """Instances of whose box at least a share lies in the polygons of a QuPath GeoJSON file.

    `names` picks annotations by their class; None takes all. Holes are respected. For slides with a bounds
    offset, which QuPath cuts off, `origin` is that offset; a file that names its own origin needs none.
    """
    xy0 = _boxes(coords)
    _checked_share(share)
    return covered_by_polygons(read_polygons(path, names=names, origin=origin), xy0, patch_size) >= share


def covered_by_polygons(
    polygons: Sequence[list[Floats]],
    xy0: Floats,
    patch_size: int,
    *,
    without: Sequence[list[Floats]] = (),
) -> Floats:
    """The share of each box (n, 2) that lies in polygons, each an outline and its holes, on a grid of points.

    What lies in one of `without` does not count.

    >>> square = np.array([[0.0, 0.0], [8.0, 0.0], [8.0, 8.0], [0.0, 8.0]])
    >>> covered_by_polygons([[square]], np.array([[0.0, 0.0], [4.0, 0.0]]), 8)
    array([1. , 0.5])
    """
    steps = (np.arange(GRID) + 0.5) / GRID * patch_size
    offsets = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2)
    points = (xy0[:, None, :] + offsets).reshape(-1, 2)
    inside = np.zeros(len(points), dtype=bool)
    for rings in polygons:
        inside |= _inside(points, rings)
    for rings in without:
        inside &= ~_inside(points, rings)
    return np.asarray(inside.reshape(len(xy0), -1).mean(axis=1))


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
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{path}: no such file.") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: not a readable GeoJSON file ({error}).") from None
    features = [f for f in _features(found) if names is None or _class_name(f) in names]
    if names is not None and not features:
        known = sorted({str(_class_name(f)) for f in _features(found)})
        raise InputError(
            f"{path}: no annotation of class {', '.join(names)}. Found: {', '.join(known) or 'none'}."
        )
    try:
        start = _origin(found, origin)
        polygons = [rings for f in features for rings in _polygons(f.get("geometry", f) or {})]
        return [[ring + start for ring in rings] for rings in polygons]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise FileError(f"{path}: an annotation's geometry is damaged ({error}).") from None


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
    held = (feature.get("properties") or {}).get("classification")
    return held.get("name") if isinstance(held, dict) else held


def _polygons(geometry: dict[str, Any]) -> Iterator[list[Floats]]:
    kind = geometry.get("type")
    if kind == "Polygon":
        yield [np.asarray(ring, dtype=np.float64)[:, :2] for ring in geometry["coordinates"]]
    elif kind == "MultiPolygon":
        for part in geometry["coordinates"]:
            yield [np.asarray(ring, dtype=np.float64)[:, :2] for ring in part]
    elif kind == "GeometryCollection":
        for part in geometry["geometries"]:
            yield from _polygons(part)


def _inside(points: Floats, rings: list[Floats]) -> Bools:
    """Even-odd: within the outline and in no hole."""
    from matplotlib.path import Path as Outline

    inside = np.zeros(len(points), dtype=bool)
    for ring in rings:
        low, high = ring.min(axis=0), ring.max(axis=0)
        near = np.flatnonzero(((points >= low) & (points <= high)).all(axis=1))
        inside[near] ^= Outline(ring).contains_points(points[near])
    return inside


def _covered_by_mask(mask: Bools, xy0: Floats, patch_size: int, downsample: float) -> Floats:
    """The share of each box that is set, from a summed-area table."""
    if mask.ndim != 2:
        raise InputError(f"The mask must have shape (h, w). Got {mask.shape} instead.")
    table = np.pad(mask.astype(np.float64).cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))
    low = np.rint(xy0 / downsample).astype(np.int64)
    high = np.maximum(np.rint((xy0 + patch_size) / downsample).astype(np.int64), low + 1)
    area = (high - low).prod(axis=1)
    limit = np.array([mask.shape[1], mask.shape[0]])
    (x1, y1), (x2, y2) = np.clip(low, 0, limit).T, np.clip(high, 0, limit).T
    return np.asarray((table[y2, x2] - table[y1, x2] - table[y2, x1] + table[y1, x1]) / area)


def _pair(marked: npt.ArrayLike, scores: npt.ArrayLike) -> tuple[Bools, Floats]:
    truth, values = np.asarray(marked, dtype=bool), np.asarray(scores, dtype=np.float64)
    if truth.ndim != 1 or truth.shape != values.shape or not len(truth):
        raise InputError(
            f"Marks and scores must be two vectors of one length. Got {truth.shape}, {values.shape}."
        )
    if not np.isfinite(values).all():
        raise InputError("Scores must be finite numbers.")
    return truth, values


def _boxes(coords: npt.ArrayLike) -> Floats:
    xy0 = np.asarray(coords, dtype=np.float64)
    if xy0.ndim != 2 or xy0.shape[1] != 2:
        raise InputError(f"Coordinates must have shape (n, 2). Got {xy0.shape} instead.")
    return xy0


def _checked_share(share: float) -> float:
    if not 0 < share <= 1:
        raise bad_parameter("share", "marked_by_mask and marked_by_geojson", "in the range (0, 1]", share)
    return share


COLUMNS = ("evidence", "label")
SUFFIXES = (".geojson", ".csv", ".npy", ".png")


@dataclass(frozen=True)
class Truth:
    """A folder with `<slide_id>.geojson` (QuPath), `.csv` or `.npy` (a value for each instance), or `.png`.

    A PNG is a mask of `downsample` level-0 pixels per pixel. `names` picks classes. An instance is marked
    where at least `share` of its box is. QuPath counts from the scanned bounds: `slides` (id to file) says
    where they begin, for GeoJSON files that do not.
    """

    folder: Path
    names: tuple[str, ...] = ()
    downsample: float = 1.0
    share: float = 0.5
    slides: Mapping[str, Path] = field(default_factory=dict)

    def evidence(self, bag: Bag) -> Floats | None:
        """Evidence (n,) of a bag, or None where the folder has nothing on the slide."""
        path = next((p for s in SUFFIXES if (p := self.folder / f"{bag.slide_id}{s}").is_file()), None)
        if path is None:
            return None
        if path.suffix in (".csv", ".npy"):
            return _instance_values(path, len(bag))
        return self._marked(path, bag).astype(np.float64)

    def _marked(self, path: Path, bag: Bag) -> npt.NDArray[np.bool_]:
        if bag.coords is None or bag.patch_size is None:
            raise InputError(f"{path}: bag {bag.slide_id!r} has no coordinates or patch size to lay on it.")
        if path.suffix == ".geojson":
            names: Sequence[str] | None = self.names or None
            origin = self._origin(bag.slide_id)
            return marked_by_geojson(
                path, bag.coords, patch_size=bag.patch_size, names=names, share=self.share, origin=origin
            )
        mask = _read_mask(path)
        return marked_by_mask(
            mask, bag.coords, patch_size=bag.patch_size, downsample=self.downsample, share=self.share
        )

    def _origin(self, slide_id: str | None) -> tuple[float, float] | None:
        """The corner of the slide's scanned bounds, where the slide is at hand."""
        from xmil.slides import open_slide

        file = self.slides.get(slide_id or "")
        if file is None:
            return None
        with open_slide(file) as slide:
            return slide.bounds[:2]


def _instance_values(path: Path, n: int) -> Floats:
    try:
        values = np.load(path, allow_pickle=False) if path.suffix == ".npy" else _csv_column(path)
        values = np.asarray(values, dtype=np.float64)
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: not one number for each instance ({error}).") from None
    if values.shape != (n,) or not np.isfinite(values).all():
        raise InputError(f"{path}: must hold {n} finite numbers, one for each instance. Got {values.shape}.")
    return values


def _csv_column(path: Path) -> list[float]:
    import csv

    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    name = next((name for name in COLUMNS if rows and name in rows[0]), None)
    if name is None:
        raise FileError(f"{path}: needs a column {' or '.join(map(repr, COLUMNS))}.")
    return [float(row[name]) for row in rows]


def _read_mask(path: Path) -> npt.NDArray[np.float64]:
    from matplotlib.image import imread

    image = np.asarray(imread(path), dtype=np.float64)
    return image if image.ndim == 2 else image[..., :3].max(axis=2)
