"""Ground truth for a slide's instances, from whatever the annotation folder holds under its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag
from xmil.core.errors import FileError, InputError
from xmil.evaluate.localisation import marked_by_geojson, marked_by_mask

Floats = npt.NDArray[np.float64]
COLUMNS = ("evidence", "label")
SUFFIXES = (".geojson", ".csv", ".npy", ".png")


@dataclass(frozen=True)
class Truth:
    """A folder with `<slide_id>.geojson` (QuPath), `.csv` or `.npy` (a value for each instance), or `.png`.

    A PNG is a mask, `downsample` level-0 pixels a pixel. `names` picks QuPath classes. An instance is marked
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
