"""JPEG tiles of an SVS or TIFF without OpenSlide in between: read raw, decoded whole, each of them once.

OpenSlide draws every region anew from the tiles it touches. Patches that lie beside each other share tiles,
so decoding whole tiles and cutting patches from them is quicker, for the same pixels: where a level's scale
is a whole number, OpenSlide copies pixels as they are. Everything else is left to OpenSlide.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xmil.slides.backends.tiff import JPEG, RGB, TiffSlide
from xmil.slides.slide import Pixels, Size, Slide

VENDORS = ("OpenSlide, aperio", "OpenSlide, generic-tiff")
YCBCR = 6  # TIFF's code
KEPT = 64 << 20  # bytes of decoded tiles: those of a few hundred neighbouring patches
PROBE = 64  # pixels of the square that is read both ways before a level is trusted


class DirectSlide(Slide):
    """A slide of OpenSlide's whose levels of JPEG tiles are decoded here."""

    def __init__(self, slide: Slide, tiff: TiffSlide, levels: dict[int, int]) -> None:
        super().__init__(
            slide.path,
            levels=list(slide.level_dimensions),
            downsamples=list(slide.level_downsamples),
            mpp=slide.mpp,
            mpp_source=slide.mpp_source,
            magnification=slide.magnification,
            bounds=slide.bounds,
            backend=f"{slide.backend}, JPEG tiles decoded directly",
        )
        self._slide, self._tiff = slide, tiff
        self.direct = {level: at for level, at in levels.items() if self._equal(level, at)}

    def _equal(self, level: int, at: int) -> bool:
        """Whether a square from the middle of the level has the same pixels both ways."""
        width, height = self.level_dimensions[level]
        size = min(PROBE, width), min(PROBE, height)
        x, y = (width - size[0]) // 2, (height - size[1]) // 2
        try:
            ours = self._tiff._read(at, x, y, size)
        except Exception:  # damage, or a codec that is missing: OpenSlide says what it is
            return False
        return np.array_equal(ours, self._slide._read(level, x, y, size))

    def _read(self, level: int, x: int, y: int, size: Size) -> Pixels:
        if level in self.direct:
            return self._tiff._read(self.direct[level], x, y, size)
        return self._slide._read(level, x, y, size)

    def close(self) -> None:
        """Close both files."""
        self._tiff.close()
        self._slide.close()


def with_direct_tiles(slide: Slide) -> Slide:
    """The slide, its JPEG tiles decoded directly where that gives OpenSlide's own pixels.

    A level is read so only where it is tiled, of 8-bit JPEG in RGB or YCbCr with every tile written, and its
    scale is a whole number.
    """
    if not slide.backend.startswith(VENDORS):
        return slide
    import tifffile

    try:
        file = tifffile.TiffFile(slide.path)
    except Exception:  # OpenSlide reads it; what tifffile dislikes does not matter
        return slide
    try:
        tiff = TiffSlide(slide.path, file, file.series[0], mpp=(None, None))
        tiff.keep = KEPT
        direct = DirectSlide(slide, tiff, _levels(slide, tiff))
    except Exception:
        file.close()
        return slide
    if not direct.direct:
        file.close()
        return slide
    return direct


def _levels(slide: Slide, tiff: TiffSlide) -> dict[int, int]:
    """Levels of the slide to pages of the TIFF."""
    pages_of = {}
    for level, scale in enumerate(slide.level_downsamples):
        size = slide.level_dimensions[level]
        pages = [i for i, other in enumerate(tiff.level_dimensions) if other == size]
        even = float(scale).is_integer() and tuple(side * scale for side in size) == slide.dimensions
        if len(pages) == 1 and (level == 0 or even) and _is_plain_jpeg(tiff._pages[pages[0]]):
            pages_of[level] = pages[0]
    return pages_of


def _is_plain_jpeg(page: Any) -> bool:
    return bool(
        page.is_tiled
        and int(page.compression) == JPEG
        and int(page.photometric) in (RGB, YCBCR)
        and page.planarconfig == 1
        and page.samplesperpixel == 3
        and page.bitspersample == 8
        and min(page.databytecounts, default=0) > 0
    )
