"""Slides that OpenSlide reads: SVS, NDPI, MRXS, SCN, BIF, DICOM, tiled TIFF and more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xmil.slides.backends import UnreadableSlideError, resolution_mpp, square_mpp
from xmil.slides.backends.tiff import check_brightfield, check_pages
from xmil.slides.slide import Pixels, Size, Slide, on_white

CACHE = 256 << 20  # bytes of decoded tiles: neighbouring patches share them


class OpenSlideSlide(Slide):
    """A slide behind an OpenSlide handle, which serves several threads at once."""

    def __init__(self, path: Path, handle: Any) -> None:
        about = dict(handle.properties)
        mpp, source = _mpp(about)
        super().__init__(
            path,
            levels=[(int(width), int(height)) for width, height in handle.level_dimensions],
            downsamples=[float(scale) for scale in handle.level_downsamples],
            mpp=mpp,
            mpp_source=source,
            magnification=_number(about, "openslide.objective-power"),
            bounds=_bounds(about),
            backend=f"OpenSlide, {about.get('openslide.vendor')}",
        )
        self._handle = handle

    def _read(self, level: int, x: int, y: int, size: Size) -> Pixels:
        scale = self.level_downsamples[level]
        region = self._handle.read_region((round(x * scale), round(y * scale)), level, size)
        return on_white(np.asarray(region))

    def read_label(self) -> Pixels | None:
        """The label among OpenSlide's associated images."""
        label = self._handle.associated_images.get("label")
        return None if label is None else on_white(np.asarray(label))

    def close(self) -> None:
        """Close the file."""
        self._handle.close()


def open_(path: Path) -> Slide:
    """Open by OpenSlide."""
    try:
        import openslide
    except OSError as error:  # the library behind it is not there, or of another system
        raise UnreadableSlideError(f"OpenSlide cannot be loaded: {' '.join(str(error).split())}") from None
    if path.is_file():
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


def _mpp(about: Mapping[str, str]) -> tuple[float | None, str | None]:
    x, y = (_number(about, f"openslide.mpp-{axis}") for axis in "xy")
    stored = square_mpp(x, y, "openslide.mpp-x")
    if stored[1] is not None:
        return stored
    unit = about.get("tiff.ResolutionUnit", "")
    tags = [_number(about, f"tiff.{axis}Resolution") for axis in "XY"]
    x, y = (None if tag is None else resolution_mpp(tag, unit) for tag in tags)
    return square_mpp(x, y, "TIFF resolution tags")


def _bounds(about: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    values = [_number(about, f"openslide.bounds-{name}") for name in ("x", "y", "width", "height")]
    x, y, width, height = (None if value is None else int(value) for value in values)
    if x is None or y is None or not width or not height:
        return None
    return x, y, width, height


def _number(about: Mapping[str, str], key: str) -> float | None:
    try:
        number = float(about[key])
    except (KeyError, ValueError):
        return None
    return number if np.isfinite(number) else None
