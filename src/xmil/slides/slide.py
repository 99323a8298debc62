"""A slide: pyramid levels, mpp, and pixels of any area.

Names carry the plane of coordinates: `xy0` and `box0` are level-0 pixels. All pixels are RGB in uint8, white
outside the scanned area. Only `read_label` reads the label, which may name a patient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.bag import IntArray
from xmil.core.errors import FileError, InputError, bad_parameter, check_names
from xmil.core.text import bare_name

Pixels = npt.NDArray[np.uint8]  # (height, width, 3)
Size = tuple[int, int]  # width, height
Box = tuple[float, float, float, float]  # x, y, width, height

WHITE = 255
LARGEST = 10**12  # pixels; the largest slides have about 10**11
BAND = 1 << 24  # pixels per read of a reduced picture
SLACK = 1.01  # sizes are rounded to whole pixels: a level with scale 2.0005 is fine enough for 2


class Slide(ABC):
    """One open slide; use it in a `with` statement. Readers may be called from several threads."""

    def __init__(
        self,
        path: Path,
        *,
        levels: list[Size],
        downsamples: list[float] | None = None,
        mpp: float | None = None,
        mpp_source: str | None = None,
        magnification: float | None = None,
        bounds: tuple[int, int, int, int] | None = None,
        backend: str = "",
    ) -> None:
        if not levels or min(min(size) for size in levels) < 1:
            raise FileError(f"{path}: its picture is empty; copy the file again.")
        width, height = levels[0]
        if width * height > LARGEST:
            raise FileError(
                f"{path}: claims {width} x {height} px, more than any slide has; the header is damaged."
            )
        self.path = path
        self.level_dimensions = tuple(levels)
        self.level_downsamples = tuple(downsamples or [(width / w + height / h) / 2 for w, h in levels])
        self.mpp = mpp
        self.mpp_source = mpp_source
        self.magnification = magnification
        self.bounds = bounds or (0, 0, *levels[0])
        self.backend = backend

    @property
    def name(self) -> str:
        """The slide's id: the file's name without its suffix."""
        return bare_name(self.path.name)

    @property
    def dimensions(self) -> Size:
        """Width and height of level 0."""
        return self.level_dimensions[0]

    def set_mpp(self, mpp: float, source: str = "given") -> None:
        """Override the microns per pixel."""
        if not 0 < mpp < float("inf"):
            raise bad_parameter("mpp", "open_slide", "a positive number", mpp)
        self.mpp, self.mpp_source = float(mpp), source

    def read_region(self, xy0: tuple[int, int], level: int, size: Size) -> Pixels:
        """Read `size` (width, height) pixels of a level from the level-0 corner `xy0`."""
        if not 0 <= level < len(self.level_dimensions):
            last = len(self.level_dimensions) - 1
            raise InputError(f"{self.path}: has no level {level}; choose one of 0 to {last}.")
        scale = self.level_downsamples[level]
        return self._clipped(level, floor(xy0[0] / scale + 0.5), floor(xy0[1] / scale + 0.5), size)

    def read_area(self, box0: Box, size: Size) -> Pixels:
        """Read the level-0 box (x, y, width, height), resized to `size` from the next finer level."""
        x, y, width, height = box0
        if width <= 0 or height <= 0 or size[0] < 1 or size[1] < 1:
            raise InputError(f"{self.path}: the area {box0} at {size} px is empty.")
        level = self.best_level(min(width / size[0], height / size[1]))
        # each axis has its own ratio: 2221 x 1783 is not exactly 4443 x 3567 over 2.0005
        scale_x, scale_y = (
            full / part for full, part in zip(self.dimensions, self.level_dimensions[level], strict=True)
        )
        x, y, width, height = x / scale_x, y / scale_y, width / scale_x, height / scale_y
        # read large areas in bands, to bound memory
        rows = max(1, floor(size[1] * BAND / max(1.0, (ceil(x + width) - floor(x)) * height)))
        step, bands = height / size[1], []
        for first in range(0, size[1], rows):
            count = min(rows, size[1] - first)
            part = (x, y + first * step, width, count * step)
            bands.append(self._resized(level, part, (size[0], count)))
        return bands[0] if len(bands) == 1 else np.concatenate(bands)

    def thumbnail(self, max_px: int = 1024) -> Pixels:
        """Read all of level 0 as a picture whose longer edge is `max_px`, or less for a small slide."""
        width, height = self.dimensions
        scale = min(1.0, max_px / max(width, height))
        return self.read_area(
            (0, 0, width, height), (max(1, round(width * scale)), max(1, round(height * scale)))
        )

    def read_label(self) -> Pixels | None:
        """Read the photo of the slide's label, which may name a patient; None if there is none."""
        return None

    def best_level(self, downsample: float) -> int:
        """The coarsest level that is fine enough for `downsample`."""
        fine = [i for i, scale in enumerate(self.level_downsamples) if scale <= downsample * SLACK]
        return max(fine, key=lambda i: self.level_downsamples[i], default=0)

    def close(self) -> None:  # noqa: B027 - a picture in memory has nothing to close
        """Close the file."""

    @abstractmethod
    def _read(self, level: int, x: int, y: int, size: Size) -> Pixels:
        """Read pixels inside a level, from the corner (x, y) in the level's own pixels."""

    def _clipped(self, level: int, x: int, y: int, size: Size) -> Pixels:
        """Like `_read` for any box; white outside the level."""
        width, height = size
        columns, rows = self.level_dimensions[level]
        left, top = max(x, 0), max(y, 0)
        right, bottom = min(x + width, columns), min(y + height, rows)
        inside = right > left and bottom > top
        if inside and (right - left, bottom - top) == (width, height):
            return self._guarded(level, x, y, size)
        pixels = np.full((height, width, 3), WHITE, dtype=np.uint8)
        if inside:
            part = self._guarded(level, left, top, (right - left, bottom - top))
            pixels[top - y : bottom - y, left - x : right - x] = part
        return pixels

    def _guarded(self, level: int, x: int, y: int, size: Size) -> Pixels:
        """Like `_read`, but turn any error of the library into one line that names the file."""
        try:
            return self._read(level, x, y, size)
        except FileError:
            raise
        except MemoryError:
            raise FileError(
                f"{self.path}: not enough memory for {size} px of level {level}; use fewer `workers=`."
            ) from None
        except Exception as error:  # decoders raise almost any type on damaged data
            reason = " ".join(str(error).split()) or type(error).__name__
            raise FileError(
                f"{self.path}: damaged, cannot read level {level} at {x}, {y} ({reason}); copy the slide "
                "again."
            ) from error

    def _resized(self, level: int, box: Box, size: Size) -> Pixels:
        """Read a box of a level and resize it."""
        x, y = floor(box[0] + 1e-6), floor(box[1] + 1e-6)
        right, bottom = ceil(box[0] + box[2] - 1e-6), ceil(box[1] + box[3] - 1e-6)
        pixels = self._clipped(level, x, y, (max(1, right - x), max(1, bottom - y)))
        inner = (box[0] - x, box[1] - y, box[0] - x + box[2], box[1] - y + box[3])
        return resize(pixels, size, inner)

    def __enter__(self) -> Slide:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __repr__(self) -> str:
        width, height = self.dimensions
        mpp = "mpp unknown" if self.mpp is None else f"mpp {self.mpp:.4g}"
        return f"Slide({self.name!r}, {width} x {height}, {len(self.level_dimensions)} levels, {mpp})"


def resize(pixels: Pixels, size: Size, box: Box | None = None) -> Pixels:
    """Resize a picture, averaging over the area of each pixel; `box` is (left, top, right, bottom).

    >>> resize(np.zeros((4, 6, 3), dtype=np.uint8), (3, 2)).shape
    (2, 3, 3)
    """
    from PIL import Image

    height, width = pixels.shape[:2]
    full = (0.0, 0.0, float(width), float(height))
    inner = full if box is None else tuple(np.clip(box, 0, (width, height, width, height)).tolist())
    if size == (width, height) and np.allclose(inner, full, atol=1e-3):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR, box=inner))


@dataclass(frozen=True)
class PatchFit:
    """Resize patches for an encoder, without torch, so that reader processes can use it.

    Resize the shorter edge to `size / crop` and crop the centre to `size`; without a size, do nothing.

    >>> PatchFit(224)(np.zeros((256, 256, 3), dtype=np.uint8)).shape
    (224, 224, 3)
    """

    size: int | None = None
    crop: float = 1.0
    interpolation: str = "bilinear"

    def edge(self, patch: int) -> int:
        """The edge of a square patch after resizing."""
        return self.size or patch

    def __call__(self, patch: Pixels) -> Pixels:
        """Resize and crop a patch."""
        from PIL import Image

        if self.size is None:
            return patch
        height, width = patch.shape[:2]
        edge = floor(self.size / self.crop)
        short = min(height, width)
        size = (int(edge * width / short), int(edge * height / short))
        if size != (width, height):
            kind: Any = getattr(Image.Resampling, self.interpolation.upper())
            patch = np.asarray(Image.fromarray(patch).resize(size, kind))
        top, left = (round((length - self.size) / 2.0) for length in patch.shape[:2])
        return patch[top : top + self.size, left : left + self.size]


def on_white(rgba: npt.NDArray[Any]) -> Pixels:
    """Blend RGBA over white."""
    alpha = rgba[..., 3:]
    if alpha.min(initial=WHITE) == WHITE:
        opaque = np.empty((*rgba.shape[:2], 3), dtype=np.uint8)
        for channel in range(3):  # five times faster than copying the slice
            opaque[..., channel] = rgba[..., channel]
        return opaque
    mixed = rgba[..., :3].astype(np.uint16) * alpha + np.uint16(WHITE) * (WHITE - alpha.astype(np.uint16))
    return np.asarray((mixed + WHITE // 2) // WHITE, dtype=np.uint8)


Frame = tuple[
    int, int, int, int
]  # x, y, width, height in level-0 pixels; its corner is the origin of exports
FRAMES = ("bounds", "level0")
KEY = "xmil"  # our member of a GeoJSON collection; other readers ignore it


def frame_header(slide: str, origin: tuple[int, int]) -> dict[str, Any]:
    """Describe a slide in a GeoJSON file, with the origin of its coordinates in level-0 pixels."""
    return {"version": __version__, "slide": slide, "origin": [int(value) for value in origin], "level": 0}


def export_frame(boxes: IntArray, slide: Slide | None, *, frame: str = "bounds") -> Frame:
    """The area of an export: the scanned bounds, as QuPath shows the slide, or the whole of level 0.

    QuPath crops slides with a bounds offset (MRXS, SCN, some Hamamatsu formats) to their bounds and takes
    that corner as the origin. Most slides have no offset: then both are the same. Without a slide, the area
    runs from the corner of level 0 to the last patches.
    """
    check_names("frame", [frame], FRAMES)
    if slide is not None:
        return slide.bounds if frame == "bounds" else (0, 0, *slide.dimensions)
    if not len(boxes):
        raise InputError("There are no patches to export.")
    width, height = np.maximum(boxes[:, 2:].max(axis=0), 1).tolist()
    return 0, 0, width, height
