"""Plain pictures through Pillow: PNG, JPEG, and small TIFFs that no other backend decodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from xmil.core.budget import open_picture
from xmil.slides.backends import UnreadableSlideError, decoding
from xmil.slides.slide import Pixels, Size, Slide, on_white

STRIP = 256  # rows converted at once, to bound memory
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


class PictureSlide(Slide):
    """A picture in memory: one level, no stored mpp."""

    def __init__(self, path: Path, pixels: Pixels, *, kind: str) -> None:
        height, width = pixels.shape[:2]
        super().__init__(path, levels=[(width, height)], backend=f"Pillow, {kind}")
        self._pixels = pixels

    def _read(self, level: int, x: int, y: int, size: Size) -> Pixels:  # noqa: ARG002 - there is one level
        return self._pixels[y : y + size[1], x : x + size[0]].copy()


def open_(path: Path) -> Slide:
    """Open a picture with Pillow; refuse one above Pillow's size limit."""
    from PIL import UnidentifiedImageError

    with decoding("Pillow"):
        try:
            with open_picture(path, width=7) as picture:  # pixels and colours
                if picture.mode not in MODES:
                    raise UnreadableSlideError(
                        f"Pillow: pixels of mode {picture.mode}; a slide has 8-bit RGB"
                    )
                pixels = np.empty((picture.height, picture.width, 3), dtype=np.uint8)
                for top in range(0, picture.height, STRIP):
                    bottom = min(top + STRIP, picture.height)
                    strip = picture.crop((0, top, picture.width, bottom)).convert("RGBA")
                    pixels[top:bottom] = on_white(np.asarray(strip))
                return PictureSlide(path, pixels, kind=str(picture.format))
        except UnidentifiedImageError:
            raise UnreadableSlideError("Pillow does not know the format") from None
