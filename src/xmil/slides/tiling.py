"""Patches of a slide: squares of one size at one resolution, on tissue.

The grid starts at the corner of the scanned area. A patch stays if enough of it is tissue and its grey values
vary; each is read once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import FileError, InputError, bad_parameter
from xmil.slides.slide import Pixels, Slide
from xmil.slides.tissue import Tissue, find_tissue

Corners = npt.NDArray[np.int64]  # (n, 2): level-0 x, y of the top-left corner

STANDARD = 10.0  # mpp times magnification, by convention: 20x is 0.5 µm/px
ENLARGED = 1.3  # patches may be enlarged so far when a slide is coarser than asked
SMALLEST = 0.02  # mm² of a piece of tissue, or a patch's area where that is less
BLOCK = 8  # patches read together lie near each other, so that a decoded tile serves all of them
MAGNIFICATIONS = {80: 0.16, 60: 0.2, 40: 0.3, 20: 0.6, 10: 1.2, 5: 2.4}  # up to this mpp


@dataclass(frozen=True)
class TileSettings:
    """What a patch is. `mpp` is the resolution wanted; `slide_mpp` serves slides that store none."""

    size: int = 256
    mpp: float = 0.5
    overlap: int = 0
    min_tissue: float = 0.25
    min_std: float = 8.0
    slide_mpp: float | None = None
    magnification: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("size", 8), ("overlap", 0)):
            if getattr(self, name) < least:
                raise bad_parameter(name, "tile", f"an int in the range [{least}, inf)", getattr(self, name))
        if self.overlap >= self.size:
            raise bad_parameter("overlap", "tile", f"less than the size, {self.size}", self.overlap)
        for name in ("mpp", "slide_mpp", "magnification"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise bad_parameter(name, "tile", "a positive number", value)
        if not 0 <= self.min_tissue <= 1:
            raise bad_parameter("min_tissue", "tile", "a number in the range [0, 1]", self.min_tissue)

    @property
    def target_mpp(self) -> float:
        """Microns a pixel of a patch."""
        return self.mpp if self.magnification is None else STANDARD / self.magnification

    def as_dict(self) -> dict[str, Any]:
        """The settings for a record."""
        return asdict(self)


@dataclass(frozen=True)
class Tiling:
    """The patches of a slide: level-0 corners and edge, and how they came about."""

    slide_id: str
    xy0: Corners
    edge0: int
    step0: int
    mpp: float
    magnification: float
    dimensions: tuple[int, int]
    tissue: Tissue
    settings: TileSettings
    inferred: tuple[str, ...] = ()
    origin: tuple[int, int] = (0, 0)  # corner of the scanned bounds
    flat: int = 0  # patches on tissue that were left out because their grey values hardly vary


def tile_slide(slide: Slide, settings: TileSettings | None = None) -> Tiling:
    """Find the tissue of a slide and lay patches on it."""
    settings = settings or TileSettings()
    mpp, inferred = known_mpp(slide, settings)
    edge0, step0 = _edges(slide, settings, mpp)
    corners = grid(slide.bounds, edge0, step0)
    if not len(corners):
        width, height = slide.bounds[2:]
        raise FileError(f"{slide.path}: {width} x {height} px are less than one patch of {edge0} px.")
    tissue = find_tissue(slide, mpp=mpp, min_area=min(SMALLEST, (edge0 * mpp / 1000) ** 2))
    if not tissue.mask.any():
        raise FileError(f"{slide.path}: no tissue was found; the slide is blank or only faintly stained.")
    corners = corners[tissue.shares(corners, edge0) >= max(settings.min_tissue, 1e-9)]
    varied = _varied(slide, corners, edge0, settings)
    if not varied.any():
        raise FileError(f"{slide.path}: no patch lies on tissue; lower --min-tissue or --min-std.")
    return Tiling(
        slide.name,
        corners[varied],
        edge0,
        step0,
        mpp,
        slide.magnification or float(magnification(mpp)),
        slide.dimensions,
        tissue,
        settings,
        inferred,
        slide.bounds[:2],
        int((~varied).sum()),
    )


def known_mpp(slide: Slide, settings: TileSettings) -> tuple[float, tuple[str, ...]]:
    """Microns a pixel of level 0, and a note where it was not read from the file; never guessed."""
    if slide.mpp is not None:
        return slide.mpp, ()
    if settings.slide_mpp is not None:
        return settings.slide_mpp, ("mpp given by --slide-mpp",)
    if settings.magnification is not None and slide.magnification:
        mpp = STANDARD / slide.magnification
        note = f"mpp {mpp:g} by convention from the objective power {slide.magnification:g}"
        return mpp, (note,)
    if slide.mpp_source is not None:
        raise FileError(f"{slide.path}: its pixels are {slide.mpp_source}; resample it, or pass --slide-mpp.")
    power = f" (its objective power is {slide.magnification:g})" if slide.magnification else ""
    raise FileError(f"{slide.path}: stores no microns per pixel{power}; pass --slide-mpp.")


def grid(bounds: tuple[int, int, int, int], edge0: int, step0: int) -> Corners:
    """Level-0 corners of all whole patches inside the bounds (x, y, width, height), row by row.

    >>> grid((10, 0, 600, 300), 256, 256).tolist()
    [[10, 0], [266, 0]]
    """
    x, y, width, height = bounds
    columns = np.arange(x, x + width - edge0 + 1, step0, dtype=np.int64)
    rows = np.arange(y, y + height - edge0 + 1, step0, dtype=np.int64)
    return np.stack(np.meshgrid(columns, rows), axis=-1).reshape(-1, 2)


def read_patch(slide: Slide, xy0: npt.ArrayLike, *, edge0: int, size: int) -> Pixels:
    """The pixels of one patch: the level-0 square at the wanted size."""
    x, y = (int(value) for value in np.asarray(xy0))
    return slide.read_area((x, y, edge0, edge0), (size, size))


def magnification(mpp: float) -> int:
    """The magnification an mpp is called by.

    >>> magnification(0.2457), magnification(0.5), magnification(3.0)
    (40, 20, 2)
    """
    return next((name for name, limit in MAGNIFICATIONS.items() if mpp < limit), 2)


def in_blocks(xy0: Corners, edge0: int) -> npt.NDArray[np.int64]:
    """An order that goes block by block, row by row inside each."""
    cell = xy0 // max(1, edge0 * BLOCK)
    return np.lexsort((xy0[:, 0], xy0[:, 1], cell[:, 0], cell[:, 1]))


def _edges(slide: Slide, settings: TileSettings, mpp: float) -> tuple[int, int]:
    """Edge and step of the patches in level-0 pixels."""
    scale = settings.target_mpp / mpp
    if scale * ENLARGED < 1:
        raise InputError(
            f"{slide.path}: has {mpp:g} µm/px, coarser than the {settings.target_mpp:g} asked for; "
            "pass a larger --mpp."
        )
    edge0 = max(1, round(settings.size * scale))
    return edge0, max(1, round((settings.size - settings.overlap) * scale))


def _varied(slide: Slide, corners: Corners, edge0: int, settings: TileSettings) -> npt.NDArray[np.bool_]:
    """Which patches have grey values that vary enough."""
    kept = np.zeros(len(corners), dtype=np.bool_)
    for i in in_blocks(corners, edge0):
        patch = read_patch(slide, corners[i], edge0=edge0, size=settings.size)
        kept[i] = grey_std(patch) >= settings.min_std
    return kept


def grey_std(patch: Pixels) -> float:
    """Standard deviation of a patch's grey values, 0 to 255.

    >>> grey_std(np.full((4, 4, 3), (255, 0, 0), dtype=np.uint8))
    0.0
    """
    return float((patch @ np.array([0.299, 0.587, 0.114], dtype=np.float32)).std())
