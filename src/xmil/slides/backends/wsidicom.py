"""DICOM slides through wsidicom, for colours or codecs that OpenSlide refuses."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from xmil.slides.backends import UnreadableSlideError, square_mpp
from xmil.slides.slide import Pixels, Size, Slide


class WsiDicomSlide(Slide):
    """A series of DICOM files; each level halves the size, and some may be missing."""

    def __init__(self, path: Path, handle: Any) -> None:
        levels = sorted(handle.levels, key=lambda level: level.level)
        spacing = levels[0].mpp
        mpp, source = square_mpp(float(spacing.width), float(spacing.height), "DICOM PixelSpacing")
        super().__init__(
            path,
            levels=[(int(level.size.width), int(level.size.height)) for level in levels],
            mpp=mpp,
            mpp_source=source,
            backend="wsidicom, dicom",
        )
        self._handle, self._numbers = handle, [int(level.level) for level in levels]
        self._lock = Lock()

    def _read(self, level: int, x: int, y: int, size: Size) -> Pixels:
        with self._lock:
            region = self._handle.read_region((x, y), self._numbers[level], size)
        return np.asarray(region.convert("RGB"))

    def read_label(self) -> Pixels | None:
        """Read the label of the series."""
        with self._lock:
            return np.asarray(self._handle.read_label().convert("RGB")) if self._handle.labels else None

    def close(self) -> None:
        self._handle.close()


def open_(path: Path) -> Slide:
    """Open the series of a file with wsidicom."""
    from wsidicom import WsiDicom

    files = [str(part) for part in sorted(path.parent.glob("*.dcm"))] if path.is_file() else [str(path)]
    try:
        handle = WsiDicom.open(_of_series(path, files))
    except Exception as error:  # damaged and foreign files raise almost any type
        raise UnreadableSlideError(
            f"wsidicom: {' '.join(str(error).split()) or type(error).__name__}"
        ) from None
    try:
        return WsiDicomSlide(path, handle)
    except Exception as error:
        handle.close()
        raise UnreadableSlideError(f"wsidicom: {' '.join(str(error).split())}") from None


def _of_series(path: Path, files: list[str]) -> list[str]:
    """Find the files of the same series."""
    import pydicom

    def series(name: str) -> Any:
        return pydicom.dcmread(name, stop_before_pixels=True, force=False).get("SeriesInstanceUID")

    own = series(str(path)) if path.is_file() else None
    if own is None:
        return files
    members = []
    for name in files:
        try:
            if series(name) == own:
                members.append(name)
        except (pydicom.errors.InvalidDicomError, OSError):
            continue
    return members
