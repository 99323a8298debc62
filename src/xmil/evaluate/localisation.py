"""Scores against marked instances: pointing game and relevance mass; marks from masks and annotations."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag
from xmil.core.budget import check_budget
from xmil.core.errors import FileError, InputError, XmilError, bad_parameter
from xmil.evaluate.polygons import covered_by_polygons as covered_by_polygons
from xmil.evaluate.polygons import read_polygons as read_polygons

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


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
        path = self.file(bag.slide_id)
        if path is None:
            return None
        if path.suffix in (".csv", ".npy"):
            return _instance_values(path, len(bag))
        return self._marked(path, bag).astype(np.float64)

    def file(self, slide_id: str | None) -> Path | None:
        """The file of a slide, None where the folder has none."""
        return next((p for s in SUFFIXES if (p := self.folder / f"{slide_id}{s}").is_file()), None)

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
    except XmilError:
        raise
    except (OSError, ValueError, TypeError, OverflowError, csv.Error) as error:
        raise FileError(f"{path}: not one number for each instance ({_line(error)}).") from None
    if values.shape != (n,) or not np.isfinite(values).all():
        raise InputError(f"{path}: must hold {n} finite numbers, one for each instance. Got {values.shape}.")
    return values


def _csv_column(path: Path) -> list[float]:
    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    name = next((name for name in COLUMNS if rows and name in rows[0]), None)
    if name is None:
        raise FileError(f"{path}: needs a column {' or '.join(map(repr, COLUMNS))}.")
    return [float(row[name]) for row in rows]


def _read_mask(path: Path) -> npt.NDArray[np.float64]:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            check_budget(picture.width * picture.height * 32, "the mask", path)
            image = np.asarray(picture.convert("RGB") if picture.mode in ("P", "CMYK") else picture)
    except XmilError:
        raise
    except Exception as error:  # damaged pictures raise almost any type
        raise FileError(f"{path}: not a readable mask ({_line(error)}).") from None
    values = np.asarray(image, dtype=np.float64)
    return values if values.ndim == 2 else values[..., :3].max(axis=2)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
