"""Read the JPEG tiles of an SVS or TIFF without OpenSlide, and decode each only once.

OpenSlide decodes all tiles of every region again. Neighbouring patches share tiles, so it is faster to decode
whole tiles and cut patches from them. The pixels are the same: if a level's scale is a whole number,
OpenSlide copies pixels unchanged. OpenSlide reads everything else.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from xmil.slides.backends.tiff import JPEG, RGB, TiffSlide
from xmil.slides.slide import Pixels, Size, Slide

VENDORS = ("OpenSlide, aperio", "OpenSlide, generic-tiff")
YCBCR = 6  # TIFF's code
CACHE = 64 << 20  # bytes of decoded tiles, for a few hundred neighbouring patches
PROBE = 64  # pixels of the square that is read both ways to compare them


class DirectSlide(Slide):
    """An OpenSlide slide whose levels of JPEG tiles are decoded directly."""

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
        self.direct = {level: page for level, page in levels.items() if self._equal(level, page)}

    def _equal(self, level: int, page: int) -> bool:
        """Whether OpenSlide and direct decoding give the same square in the middle of a level."""
        width, height = self.level_dimensions[level]
        size = min(PROBE, width), min(PROBE, height)
        x, y = (width - size[0]) // 2, (height - size[1]) // 2
        try:
            ours = self._tiff._read(page, x, y, size)
        except Exception:  # damage, or a missing codec: OpenSlide's error names it
            return False
        return np.array_equal(ours, self._slide._read(level, x, y, size))

    def _read(self, level: int, x: int, y: int, size: Size) -> Pixels:
        if level in self.direct:
            return self._tiff._read(self.direct[level], x, y, size)
        return self._slide._read(level, x, y, size)

    def close(self) -> None:
        self._tiff.close()
        self._slide.close()


def with_direct_tiles(slide: Slide) -> Slide:
    """Decode the JPEG tiles of a slide directly, where that gives the same pixels as OpenSlide.

    This applies to tiled levels of 8-bit JPEG in RGB or YCbCr, with every tile written and a whole-number
    scale.
    """
    if not slide.backend.startswith(VENDORS):
        return slide
    import tifffile

    with suppress(Exception), ExitStack() as opened:  # OpenSlide reads what tifffile cannot
        file = opened.enter_context(tifffile.TiffFile(slide.path))
        tiff = TiffSlide(slide.path, file, file.series[0], mpp=(None, None))
        tiff.cache_bytes = CACHE
        direct = DirectSlide(slide, tiff, _levels(slide, tiff))
        if direct.direct:
            opened.pop_all()
            return direct
    return slide


def _levels(slide: Slide, tiff: TiffSlide) -> dict[int, int]:
    """Map levels of the slide to pages of the TIFF."""
    page_of = {}
    for level, scale in enumerate(slide.level_downsamples):
        size = slide.level_dimensions[level]
        pages = [i for i, other in enumerate(tiff.level_dimensions) if other == size]
        even = float(scale).is_integer() and tuple(side * scale for side in size) == slide.dimensions
        if len(pages) == 1 and (level == 0 or even) and _is_plain_jpeg(tiff._pages[pages[0]]):
            page_of[level] = pages[0]
    return page_of


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
