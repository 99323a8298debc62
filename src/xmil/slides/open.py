"""Open a slide by the first library that can: OpenSlide, tifffile, Pillow."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from xmil.core.errors import FileError
from xmil.slides.backends import UnreadableError
from xmil.slides.slide import Slide

INSTALL = "pip install 'xmil[slides]'"
SCANNERS = (".svs", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".dcm")


def open_slide(path: str | os.PathLike[str], mpp: float | None = None) -> Slide:
    """Open a slide or picture; `mpp` (microns a pixel of level 0) overrides what the file says.

    `slide.mpp` is None where neither the caller nor the file knows; it is never guessed.
    """
    slide = _opened(_file(Path(path)))
    slide.path = Path(path)  # a folder of DICOM files keeps its name
    try:
        _complete(slide)
        if mpp is not None:
            slide.set_mpp(mpp)
    except Exception:
        slide.close()
        raise
    return slide


def _complete(slide: Slide) -> None:
    """OpenSlide reads OME-TIFFs whose codec tifffile lacks, but not their metadata."""
    if slide.mpp is None and slide.path.name.lower().endswith((".tif", ".tiff")):
        from xmil.slides.backends import tiffs

        with suppress(ImportError):
            mpp = tiffs.stored_ome_mpp(slide.path)
            if mpp is not None:
                slide.set_mpp(mpp, "OME PhysicalSize")


def _file(path: Path) -> Path:
    """The file to open; of a folder of DICOM files the largest, which holds level 0."""
    if path.is_dir():
        parts = sorted(path.glob("*.dcm"), key=lambda part: (-part.stat().st_size, part.name))
        if not parts:
            raise FileError(f"{path}: a folder without DICOM files; give a slide file.")
        return parts[0]
    if not path.is_file():
        raise FileError(f"{path}: no such file.")
    try:
        empty = path.stat().st_size == 0
        with path.open("rb"):
            pass
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}).") from None
    if empty:
        raise FileError(f"{path}: the file is empty; copy it again.")
    return path


def _opened(path: Path) -> Slide:
    reasons = []
    for backend in _backends(path):
        try:
            return backend(path)
        except ImportError as error:
            reasons.append(f"{error.name} is not installed: {INSTALL}")
        except UnreadableError as error:
            reasons.append(str(error))
    told = "; ".join(dict.fromkeys(reason for reason in reasons if reason))
    raise FileError(f"{path}: not a slide or image that can be read, or damaged or cut off ({told}).")


def _backends(path: Path) -> tuple[Callable[[Path], Slide], ...]:
    """The libraries to try; a scanner's own format is OpenSlide's alone.

    A cut-off SVS is still a TIFF in part: another library would show it with tiles and metadata missing.
    """
    from xmil.slides.backends import openslides, pictures, tiffs

    if path.name.lower().endswith(SCANNERS):
        return (openslides.open_,)
    return tiffs.open_ome, openslides.open_, tiffs.open_, pictures.open_
