"""Slides that OpenSlide reads: SVS, NDPI, MRXS, SCN, BIF, DICOM, tiled TIFF and more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xmil.slides.backends import UnreadableSlideError, resolution_mpp, square_mpp
from xmil.slides.backends.tiff import check_brightfield, check_pages
from xmil.slides.slide import Pixels, Size, Slide, on_white

CACHE = 256 << 20  # bytes of decoded tiles, which neighbouring patches share


class OpenSlideSlide(Slide):
    """A slide read by OpenSlide; several threads may share it."""

    def __init__(self, path: Path, handle: Any) -> None:
        properties = dict(handle.properties)
        mpp, source = _mpp(properties)
        super().__init__(
            path,
            levels=[(int(width), int(height)) for width, height in handle.level_dimensions],
            downsamples=[float(scale) for scale in handle.level_downsamples],
            mpp=mpp,
            mpp_source=source,
            magnification=_number(properties, "openslide.objective-power"),
            bounds=_bounds(properties),
            backend=f"OpenSlide, {properties.get('openslide.vendor')}",
        )
        self._handle = handle

    def _read(self, level: int, x: int, y: int, size: Size) -> Pixels:
        scale = self.level_downsamples[level]
        region = self._handle.read_region((round(x * scale), round(y * scale)), level, size)
        return on_white(np.asarray(region))

    def read_label(self) -> Pixels | None:
        """Read the label among OpenSlide's associated images."""
        label = self._handle.associated_images.get("label")
        return None if label is None else on_white(np.asarray(label))

    def close(self) -> None:
        self._handle.close()


def open_(path: Path) -> Slide:
    """Open a slide with OpenSlide."""
    try:
        import openslide
    except OSError as error:  # its C library is missing, or built for another system
        raise UnreadableSlideError(f"OpenSlide cannot be loaded: {' '.join(str(error).split())}") from None
    check_pages(path)
    try:
        handle = openslide.OpenSlide(str(path))
    except openslide.OpenSlideUnsupportedFormatError:
        raise UnreadableSlideError("OpenSlide does not know the format") from None
    except (openslide.OpenSlideError, OSError, ValueError) as error:
        raise UnreadableSlideError(f"OpenSlide: {' '.join(str(error).split())}") from None
    try:
        handle.set_cache(openslide.OpenSlideCache(CACHE))
        if handle.properties.get("openslide.vendor") == "generic-tiff":
            check_brightfield(path)
        return OpenSlideSlide(path, handle)
    except Exception:
        handle.close()
        raise


def _mpp(properties: Mapping[str, str]) -> tuple[float | None, str | None]:
    x, y = (_number(properties, f"openslide.mpp-{axis}") for axis in "xy")
    stored = square_mpp(x, y, "openslide.mpp-x")
    if stored[1] is not None:
        return stored
    unit = properties.get("tiff.ResolutionUnit", "")
    tags = [_number(properties, f"tiff.{axis}Resolution") for axis in "XY"]
    x, y = (None if tag is None else resolution_mpp(tag, unit) for tag in tags)
    return square_mpp(x, y, "TIFF resolution tags")


def _bounds(properties: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    values = [_number(properties, f"openslide.bounds-{name}") for name in ("x", "y", "width", "height")]
    x, y, width, height = (None if value is None else int(value) for value in values)
    if x is None or y is None or not width or not height:
        return None
    return x, y, width, height


def _number(properties: Mapping[str, str], key: str) -> float | None:
    try:
        number = float(properties[key])
    except (KeyError, ValueError):
        return None
    return number if np.isfinite(number) else None
