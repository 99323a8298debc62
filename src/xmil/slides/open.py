"""Open a slide by the first library that can: OpenSlide, tifffile, Pillow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xmil.core.errors import FileError, absent, unreadable
from xmil.core.text import SLIDE_SUFFIXES, bare_name
from xmil.slides.backends import UnreadableSlideError
from xmil.slides.slide import Slide

INSTALL = "pip install 'xmil[slides]'"
WIDER, MORE = "pip install 'xmil[dicom]'", ("wsidicom", "imagecodecs")
SCANNERS = (".svs", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".dcm")


def open_slide(path: str | os.PathLike[str], mpp: float | None = None) -> Slide:
    """Open a slide or picture; `mpp` (microns per pixel of level 0) overrides what the file says.

    `slide.mpp` is None where neither the caller nor the file knows; it is never guessed.
    """
    slide = _opened(_file(Path(path)))
    slide.path = Path(path)  # a folder of DICOM files keeps its name
    try:
        if slide.mpp is None and slide.path.name.lower().endswith((".tif", ".tiff")):
            from xmil.slides.backends import tiff

            with suppress(ImportError):  # OpenSlide reads OME-TIFFs that tifffile cannot, but not their mpp
                stored = tiff.stored_ome_mpp(slide.path)
                if stored is not None:
                    slide.set_mpp(stored, "OME PhysicalSize")
        if mpp is not None:
            slide.set_mpp(mpp)
    except Exception:
        slide.close()
        raise
    return slide


def _file(path: Path) -> Path:
    """The file to open; of a folder of DICOM files the largest, which holds level 0."""
    if path.is_dir():
        parts = sorted(path.glob("*.dcm"), key=lambda part: (-part.stat().st_size, part.name))
        if not parts:
            raise FileError(f"{path}: a folder without DICOM files; give a slide file.")
        return parts[0]
    if not path.is_file():
        raise FileError(absent(path))
    try:
        with path.open("rb") as stream:
            is_empty = not stream.read(1)
    except OSError as error:
        raise FileError(unreadable(path, error)) from None
    if is_empty:
        raise FileError(f"{path}: the file is empty; copy it again.")
    return path


def _opened(path: Path) -> Slide:
    """The slide by the first library that can; a scanner's own format is OpenSlide's alone.

    A cut-off SVS is still a TIFF in part: another library would show it with tiles and metadata missing.
    """
    from xmil.slides.backends import openslide, picture, tiff, wsidicom

    backends: tuple[Callable[[Path], Slide], ...]
    backends = tiff.open_ome, openslide.open_, tiff.open_, picture.open_
    if path.name.lower().endswith(SCANNERS):
        is_dicom = path.name.lower().endswith(".dcm")
        backends = (openslide.open_, wsidicom.open_) if is_dicom else (openslide.open_,)
    reasons = []
    for backend in backends:
        try:
            return backend(path)
        except ImportError as error:
            reasons.append(f"{error.name} is not installed: {WIDER if error.name in MORE else INSTALL}")
        except UnreadableSlideError as error:
            reasons.append(str(error))
    listing = "; ".join(dict.fromkeys(reason for reason in reasons if reason))
    raise FileError(
        f"{path}: not a slide or image that can be read, or damaged or cut off ({listing}); copy it again, "
        "or move it away to leave it out."
    )


PLAIN = (".png", ".jpg", ".jpeg")
HAMAMATSU = (".vms", ".vmu")  # their levels lie beside them as JPEG files


@dataclass(frozen=True)
class SlideListing:
    """Slides by id; names that two slides share, with the reason; pictures beside a slide of their name."""

    slides: dict[str, Path]
    twice: dict[str, str]
    beside: list[Path]


def find_slides(folder: str | os.PathLike[str], *, follow_links: bool = True) -> dict[str, Path]:
    """Slide id to file, for every slide in a folder and the folders below it, in order of id.

    A folder of DICOM files is one slide under the folder's name. A picture beside a slide of the same name is
    left out; two slides of one name are an error. Run folders of this package are not searched. Links are
    followed, unless they lead nowhere or in a circle; without `follow_links`, links out of the folder are
    not.
    """
    listing = sort_slides(slide_files(folder, follow_links=follow_links)[0])
    for reason in listing.twice.values():
        raise FileError(reason)
    return listing.slides


def slide_files(
    folder: str | os.PathLike[str], *, follow_links: bool = True
) -> tuple[list[Path], list[Path]]:
    """Every slide file in a folder and the folders below it, and the links that were left out."""
    root = Path(folder)
    if not root.is_dir():
        raise FileError(absent(root, "folder"))
    left: list[Path] = []
    return list(_walk(root, left, follow_links)), left


def sort_slides(paths: Iterable[Path]) -> SlideListing:
    """Files by slide id; of a slide and a plain picture the slide, of two slides neither."""
    files: dict[str, Path] = {}
    twice: dict[str, str] = {}
    beside: list[Path] = []
    for path in sorted(paths, key=lambda path: (_is_plain(path), str(path))):
        name = slide_id(path)
        if name not in files:
            files[name] = path
        elif _is_plain(path) != _is_plain(files[name]):
            beside.append(path)
        else:
            reason = f"{path}: the slide {name!r} is at {files[name]} too; rename or remove one."
            twice.setdefault(name, reason)
    slides = {name: path for name, path in sorted(files.items()) if name not in twice}
    return SlideListing(slides, twice, beside)


def slide_id(path: Path) -> str:
    """The id of a slide file: its name without the suffix, of a folder of DICOM files the folder's.

    >>> slide_id(Path("slides/TCGA-CR-7395.01A.svs")), slide_id(Path("slides/s1.ome.tif"))
    ('TCGA-CR-7395.01A', 's1')
    """
    return path.name if path.is_dir() else bare_name(path.name)


def _walk(root: Path, left: list[Path], follow_links: bool) -> Iterator[Path]:
    """Slides of a tree; links that are not followed go into `left`."""
    visited: set[tuple[int, int]] = set()
    for place, folders, names in os.walk(root, followlinks=True):
        here = Path(place)
        stat = here.stat()
        if here != root and ("run.json" in names or (stat.st_dev, stat.st_ino) in visited):
            left += [here] if here.is_symlink() else []
            folders.clear()
            continue
        visited.add((stat.st_dev, stat.st_ino))
        ours = {"visualization"} if "contours_geojson" in folders else set()
        visible = sorted(name for name in folders if not name.startswith(".") and name not in ours)
        folders[:] = [name for name in visible if _followed(here / name, root, left, follow_links)]
        files = [n for n in names if n.lower().endswith(SLIDE_SUFFIXES) and not n.startswith(".")]
        slides = [name for name in files if _followed(here / name, root, left, follow_links)]
        dicom = [name for name in slides if name.lower().endswith(".dcm")]
        if len(dicom) > 1:
            yield here
        has_levels = any(name.lower().endswith(HAMAMATSU) for name in slides)
        inside = (*(PLAIN if has_levels else ()), *((".dcm",) if len(dicom) > 1 else ()))
        yield from (here / name for name in slides if not name.lower().endswith(inside))


def _followed(path: Path, root: Path, left: list[Path], follow_links: bool) -> bool:
    """Whether a path is to be used; a link that is not, is noted where it looks like a slide or a folder."""
    if not path.is_symlink():
        return True
    try:
        end = path.resolve(strict=True)
        used = follow_links or end.is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # it leads nowhere, or in a circle
        used = False
    if not used and (path.is_dir() or path.name.lower().endswith(SLIDE_SUFFIXES)):
        left.append(path)
    return used


def _is_plain(path: Path) -> bool:
    return path.name.lower().endswith(PLAIN)
