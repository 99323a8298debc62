"""Marks of instances, from masks and QuPath's polygons, and how scores agree with them; without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag
from xmil.core.budget import csv_rows, open_picture, read_arrays
from xmil.core.errors import FileError, InputError, bad_parameter, refuse_damage
from xmil.evaluate.statistics import Bools, Floats, auroc
from xmil.heatmaps import opened
from xmil.heatmaps.exports import class_name, open_geojson

COLUMNS = ("evidence", "label")
SUFFIXES = (".geojson", ".csv", ".npy", ".png")
DIGITS = 9  # of a covered share, so that rounding does not decide whether it is one half
CROWD, SMALL = 48, 1 / 16  # squares with more edges are cut in four, down to this side
_DEEP = 32  # levels of nested collections; no annotation has more


def pointing_game(marked: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Return 1 if the highest score lies on a marked instance, else 0; ties at the top count by their share.

    >>> pointing_game([True, False, False], [0.9, 0.1, 0.9])
    0.5
    """
    truth, values = paired(np.asarray(marked, dtype=bool), scores)
    return float(truth[values == values.max()].mean()) if truth.any() else float("nan")


def relevance_mass(marked: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """The share of the positive scores' sum on marked instances; nan if nothing is marked or positive.

    Arras et al., "CLEVR-XAI", Information Fusion 2022, arXiv:2003.07258.

    >>> relevance_mass([True, False, False], [3.0, 1.0, -5.0])
    0.75
    """
    truth, values = paired(np.asarray(marked, dtype=bool), scores)
    positive = np.maximum(values, 0.0)
    if not truth.any() or positive.sum() == 0:
        return float("nan")
    return float(positive[truth > 0].sum() / positive.sum())


def score_regions(marked: npt.ArrayLike, scores: npt.ArrayLike) -> dict[str, float]:
    """Measure how scores agree with marks: AUROC, Dice, the pointing game, and the level of chance.

    Dice compares the marks with as many of the highest scores, ties at their share. By chance, Dice and
    pointing are the marked share (`chance`), and the AUROC is one half. nan if nothing is marked, or all.

    >>> score_regions([True, True, False, False], [0.9, 0.2, 0.5, 0.1])
    {'auroc': 0.75, 'dice': 0.5, 'pointing': 1.0, 'chance': 0.5}
    """
    truth, values = paired(np.asarray(marked, dtype=bool), scores)
    own = truth > 0
    k = int(own.sum())
    if not 0 < k < len(own):
        return dict.fromkeys(("auroc", "dice", "pointing", "chance"), float("nan"))
    least = np.partition(values, -k)[-k]
    above, tied = values > least, values == least
    hits = own[above].sum() + (k - above.sum()) * own[tied].mean()
    return {
        "auroc": float(auroc(np.ones((1, len(own))), own, values)[0]),
        "dice": float(hits / k),
        "pointing": pointing_game(own, values),
        "chance": k / len(own),
    }


def marked_by_mask(
    mask: npt.ArrayLike,
    coords: npt.ArrayLike,
    *,
    patch_size: int,
    downsample: float = 1.0,
    share: float = 0.5,
) -> Bools:
    """Mark instances if at least a share of their box is set in a mask (h, w).

    A pixel of the mask is `downsample` level-0 pixels wide. Boxes may extend beyond the mask; the area
    outside counts as unset.

    >>> marked_by_mask([[1, 0], [0, 0]], [[0, 0], [256, 0]], patch_size=256, downsample=256)
    array([ True, False])
    """
    marks, xy0 = np.asarray(mask) != 0, _boxes(coords)
    if marks.ndim != 2:
        raise InputError(f"The mask must have shape (h, w). Got {marks.shape} instead.")
    table = np.pad(marks.astype(np.float64).cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))
    low = np.rint(xy0 / downsample).astype(np.int64)
    high = np.maximum(np.rint((xy0 + patch_size) / downsample).astype(np.int64), low + 1)
    limit = np.array([marks.shape[1], marks.shape[0]])
    (x1, y1), (x2, y2) = np.clip(low, 0, limit).T, np.clip(high, 0, limit).T
    covered = (table[y2, x2] - table[y1, x2] - table[y2, x1] + table[y1, x1]) / (high - low).prod(axis=1)
    return np.asarray(covered >= _check_share(share))


def marked_by_geojson(
    path: str | PathLike[str],
    coords: npt.ArrayLike,
    *,
    patch_size: int,
    names: Sequence[str] | None = None,
    share: float = 0.5,
    origin: tuple[float, float] | None = None,
) -> Bools:
    """Mark instances if at least a share of their box lies in the polygons of a QuPath GeoJSON file.

    `names` selects annotations by class; None takes all. Holes are respected. For slides with a bounds
    offset, which QuPath subtracts, `origin` is that offset; a file that names its own origin needs none.
    """
    xy0 = _boxes(coords)
    _check_share(share)
    return covered_by_polygons(read_polygons(path, names=names, origin=origin), xy0, patch_size) >= share


def paired(evidence: npt.ArrayLike, scores: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Check evidence, or marks, and scores, and return them as two vectors of finite numbers."""
    e, s = np.asarray(evidence, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if e.ndim != 1 or e.shape != s.shape or not len(e):
        raise InputError(
            f"Evidence and scores must be two vectors of one length. Got {e.shape} and {s.shape}."
        )
    if not (np.isfinite(e).all() and np.isfinite(s).all()):
        raise InputError("Evidence and scores must be finite numbers.")
    return e, s


def _boxes(coords: npt.ArrayLike) -> Floats:
    xy0 = np.asarray(coords, dtype=np.float64)
    if xy0.ndim != 2 or xy0.shape[1] != 2:
        raise InputError(f"Coordinates must have shape (n, 2). Got {xy0.shape} instead.")
    return xy0


def _check_share(share: float) -> float:
    if not 0 < share <= 1:
        raise bad_parameter("share", "marked_by_mask and marked_by_geojson", "in the range (0, 1]", share)
    return share


@dataclass(frozen=True)
class Truth:
    """A folder with `<slide_id>.geojson` (QuPath), `.csv` or `.npy` (a value for each instance), or `.png`.

    A PNG is a mask of `downsample` level-0 pixels per pixel. `names` selects classes. An instance is marked
    if at least `share` of its box is. QuPath's coordinates start at the scanned bounds; for GeoJSON files
    that do not name them, they are read from `slides` (id to file).
    """

    folder: Path
    names: tuple[str, ...] = ()
    downsample: float = 1.0
    share: float = 0.5
    slides: Mapping[str, Path] = field(default_factory=dict)

    def evidence(self, bag: Bag) -> Floats | None:
        """Read the evidence (n,) of a bag; None if the folder has nothing on the slide."""
        path = self.file(bag.slide_id)
        if path is None:
            return None
        if path.suffix in (".csv", ".npy"):
            return _instance_values(path, len(bag))
        if bag.coords is None or bag.patch_size is None:
            raise InputError(
                f"{path}: bag {bag.slide_id!r} has no coordinates or patch size to compare with."
            )
        if path.suffix == ".geojson":
            with opened(self.slides.get(bag.slide_id or "")) as slide:
                origin = None if slide is None else slide.bounds[:2]
            options: dict[str, Any] = {"names": self.names or None, "origin": origin, "share": self.share}
            marks = marked_by_geojson(path, bag.coords, patch_size=bag.patch_size, **options)
        else:
            options = {"downsample": self.downsample, "share": self.share}
            marks = marked_by_mask(_read_mask(path), bag.coords, patch_size=bag.patch_size, **options)
        return marks.astype(np.float64)

    def file(self, slide_id: str | None) -> Path | None:
        """Find the file of a slide; None if the folder has none."""
        return next((p for s in SUFFIXES if (p := self.folder / f"{slide_id}{s}").is_file()), None)


def _instance_values(path: Path, n: int) -> Floats:
    with refuse_damage(f"{path}: not one number for each patch"):
        if path.suffix == ".npy":
            values = np.asarray(read_arrays(path, width=8)[""], dtype=np.float64)
        else:
            rows = csv_rows(path)
            name = next((name for name in COLUMNS if rows and name in rows[0]), None)
            if name is None:
                raise FileError(f"{path}: needs a column {' or '.join(map(repr, COLUMNS))}.")
            values = np.array([float(row[name]) for row in rows], dtype=np.float64)
    if values.shape != (n,) or not np.isfinite(values).all():
        raise InputError(f"{path}: must hold {n} finite numbers, one for each patch. Got {values.shape}.")
    return values


def _read_mask(path: Path) -> npt.NDArray[np.float64]:
    fault = f"{path}: not a readable mask"
    # damaged pictures raise almost any type
    with refuse_damage(fault, kinds=(Exception,)), open_picture(path, width=32) as picture:
        image = np.asarray(picture.convert("RGB") if picture.mode in ("P", "CMYK") else picture)
    values = np.asarray(image, dtype=np.float64)
    return values if values.ndim == 2 else values[..., :3].max(axis=2)


def covered_by_polygons(
    polygons: Sequence[list[Floats]], xy0: Floats, patch_size: int, *, without: Sequence[list[Floats]] = ()
) -> Floats:
    """Compute the share of each box (n, 2) that lies in polygons, each an outline and its holes.

    Even-odd within a polygon; overlaps of polygons count once. Area in one of `without` does not count.

    >>> square = np.array([[0.0, 0.0], [8.0, 0.0], [8.0, 8.0], [0.0, 8.0]])
    >>> covered_by_polygons([[square]], np.array([[0.0, 0.0], [4.0, 0.0]]), 8)
    array([1. , 0.5])
    """
    if without:  # the area of all polygons minus that of `without`
        both = covered_by_polygons([*polygons, *without], xy0, patch_size)
        return np.round(both - covered_by_polygons(without, xy0, patch_size), DIGITS)
    order = np.argsort(xy0[:, 0], kind="stable")  # for a bisection to the boxes near a polygon
    lefts, tops = xy0[order].T
    meeting: dict[int, list[Floats]] = {}
    for rings in filter(None, polygons):
        (left, top), (right, bottom) = rings[0].min(axis=0), rings[0].max(axis=0)
        strip = slice(*np.searchsorted(lefts, (left - patch_size, right)).tolist())
        near = order[strip][(tops[strip] >= top - patch_size) & (tops[strip] <= bottom)]
        edges = np.concatenate([np.hstack([np.roll(ring, 1, axis=0), ring]) for ring in rings])
        for box in near.tolist():
            meeting.setdefault(box, []).append(edges)
    shares = np.zeros(len(xy0))
    for box, shapes in meeting.items():
        corner = np.tile(xy0[box], 2)
        shares[box] = _covered([(edges - corner) / patch_size for edges in shapes], 0.0, 0.0, 1.0)
    return np.round(shares, DIGITS)


def _covered(shapes: list[Floats], left: float, top: float, side: float) -> float:
    """Compute the area of a square inside shapes, given by their edges (k, 4) from x1, y1 to x2, y2.

    A square that many edges cross is cut into four with fewer edges each.
    """
    right, bottom, middle = left + side, top + side, top + side / 2
    near: list[Floats] = []
    crossing = 0
    for edges in shapes:
        x1, y1, x2, y2 = edges.T
        here = (np.maximum(y1, y2) > top) & (np.minimum(y1, y2) < bottom) & (np.minimum(x1, x2) < right)
        inner = int((here & (np.maximum(x1, x2) > left)).sum())
        if inner:
            near.append(edges[here])
            crossing += inner
        elif int(((y1 > middle) != (y2 > middle))[here].sum()) % 2:  # the whole square is inside
            return side * side
    if crossing > CROWD and side > SMALL:
        half = side / 2
        corners = [(left + dx, top + dy) for dx in (0.0, half) for dy in (0.0, half)]
        return sum(_covered(near, x, y, half) for x, y in corners)
    return _slabs(near, left, top, side) if near else 0.0


def _slabs(shapes: list[Floats], left: float, top: float, side: float) -> float:
    """Cut a square at every height where an edge inside begins, ends, crosses another, enters or leaves.

    Between two such heights each border is straight, so the covered length midway determines the area.
    """
    right, bottom = left + side, top + side
    ends = np.concatenate([edges[np.maximum(edges[:, 0], edges[:, 2]) > left] for edges in shapes])[:, 1::2]
    slanted = [edges[edges[:, 1] != edges[:, 3]] for edges in shapes]  # horizontal edges bound no length
    owner = np.repeat(np.arange(len(slanted)), [len(edges) for edges in slanted])
    x1, y1, x2, y2 = np.concatenate(slanted).T
    slope = (x2 - x1) / (y2 - y1)
    inner = np.maximum(x1, x2) > left
    a, b = slope[inner], (x1 - slope * y1)[inner]
    with np.errstate(divide="ignore", invalid="ignore"):  # parallel and vertical edges
        crossings = (b[None] - b[:, None]) / (a[:, None] - a[None])
        borders = (np.array([[left], [right]]) - b) / a
    heights = np.concatenate([ends.ravel(), crossings.ravel(), borders.ravel(), [top, bottom]])
    heights = np.unique(heights[(heights >= top) & (heights <= bottom)])
    middle = ((heights[1:] + heights[:-1]) / 2)[:, None]
    met = (np.minimum(y1, y2) < middle) & (middle < np.maximum(y1, y2))
    x = np.where(met, np.clip(x1 + (middle - y1) * slope, left, right), right)
    order = np.argsort(x, axis=1, kind="stable")
    x, met, owner = np.take_along_axis(x, order, axis=1), np.take_along_axis(met, order, axis=1), owner[order]
    covered = np.zeros(x.shape, dtype=bool)
    for number in range(len(shapes)):
        covered |= np.cumsum(met & (owner == number), axis=1) % 2 == 1
    return float((np.diff(x, axis=1, append=right) * covered).sum(axis=1) @ np.diff(heights))


def read_polygons(
    path: str | PathLike[str],
    *,
    names: Sequence[str] | None = None,
    origin: tuple[float, float] | None = None,
) -> list[list[Floats]]:
    """Read level-0 polygons of a GeoJSON file, each a list of rings (k, 2): its outline, then its holes.

    Its coordinates start at the origin that the file names, as those of `xmil heatmap` do, else at `origin`,
    else at the corner of level 0.
    """
    return [rings for own in read_regions(path, names=names, origin=origin).values() for rings in own]


def read_regions(
    path: str | PathLike[str],
    *,
    names: Sequence[str] | None = None,
    origin: tuple[float, float] | None = None,
) -> dict[str, list[list[Floats]]]:
    """Read polygons as `read_polygons` does, by class; those without a class have the name ""."""
    content, own = open_geojson(path)
    every = [f for f in content if isinstance(f, dict)]
    features = [f for f in every if names is None or class_name(f) in names]
    if names is not None and not features:
        classes = sorted({str(class_name(f))[:80] for f in every})[:20]
        raise InputError(
            f"{path}: no annotation of class {', '.join(names)}. Found: {', '.join(classes) or 'none'}."
        )
    regions: dict[str, list[list[Floats]]] = {}
    with refuse_damage(f"{path}: an annotation's geometry is damaged"):
        corner = np.array((origin or (0.0, 0.0)) if own is None else own, dtype=np.float64).reshape(2)
        for feature in features:
            polygons = parse_polygons([feature.get("geometry", feature) or {}])
            moved = [[ring + corner for ring in rings] for rings in polygons]
            if moved:
                regions.setdefault(class_name(feature) or "", []).extend(moved)
    return regions


def parse_polygons(geometries: Iterable[dict[str, Any]]) -> list[list[Floats]]:
    """List the polygons of GeoJSON geometries, each a list of rings (k, 2); skip other shapes.

    >>> [len(rings) for rings in parse_polygons([{"type": "Point", "coordinates": [0, 0]}])]
    []
    """
    return [rings for geometry in geometries for rings in _polygons(geometry, _DEEP)]


def _polygons(geometry: dict[str, Any], deep: int) -> Iterator[list[Floats]]:
    kind = geometry.get("type")
    if kind in ("Polygon", "MultiPolygon"):
        parts = geometry["coordinates"]
        for part in [parts] if kind == "Polygon" else parts:
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
