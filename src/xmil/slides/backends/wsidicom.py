"""DICOM slides through wsidicom, for colours or codecs that OpenSlide refuses."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from xmil.core.budget import check_budget, check_regular
from xmil.slides.backends import UnreadableSlideError, decoding, square_mpp
from xmil.slides.slide import Pixels, Size, Slide


class WsiDicomSlide(Slide):
    """A series of DICOM files; each level halves the size, and some may be missing."""

    def __init__(self, path: Path, handle: Any) -> None:
        levels = sorted(handle.levels, key=lambda level: level.level)
        for level in levels:
            check_budget(3 * level.tile_size.width * level.tile_size.height, "a tile", path)
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

    with decoding("wsidicom"), ExitStack() as on_failure:
        handle = WsiDicom.open(_of_series(path))
        on_failure.callback(handle.close)
        slide = WsiDicomSlide(path, handle)
        on_failure.pop_all()
        return slide


def _of_series(path: Path) -> list[Path]:
    """Find the files beside a file that are of its series, and among them none that would be inflated."""
    own = _series(path)
    members = []
    for part in sorted(path.parent.glob("*.dcm")):
        with suppress(Exception):  # foreign and damaged files raise almost any type
            members += [part] if _series(part) == own else []
    return members


def _series(path: Path) -> Any:
    """Read which series a file belongs to; refuse a deflated one, which pydicom inflates whole in memory.

    Slides store compressed tiles, so a second compression of the whole file is of no use to them.
    """
    import pydicom

    check_regular(path)
    header = pydicom.filereader.read_file_meta_info(path)
    if header.get("TransferSyntaxUID") == pydicom.uid.DeflatedExplicitVRLittleEndian:
        raise UnreadableSlideError("the file is deflated, which slides never are")
    return pydicom.dcmread(path, stop_before_pixels=True, force=False).get("SeriesInstanceUID")
