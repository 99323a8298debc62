"""Open a slide with the first library that can read it: OpenSlide, tifffile, Pillow."""

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
    """Open a slide or picture; `mpp` (microns per pixel of level 0) overrides the file's.

    `slide.mpp` is None if neither the caller nor the file gives it; xmil never guesses.
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
    """The file to open; in a folder of DICOM files the largest, which holds level 0."""
    if path.is_dir():
        parts = sorted(path.glob("*.dcm"), key=lambda part: (-part.stat().st_size, part.name))
        if not parts:
            raise FileError(f"{path}: a folder without DICOM files; name a slide file.")
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
    """Open a slide with the first library that can; only OpenSlide reads scanner formats.

    A truncated SVS is still partly a TIFF: another library would show it with tiles and metadata missing.
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
        f"{path}: not a slide or image that can be read, or damaged or truncated ({listing}); copy it "
        "again, or move it away to leave it out."
    )


PLAIN = (".png", ".jpg", ".jpeg")
HAMAMATSU = (".vms", ".vmu")  # stored with their levels beside them as JPEG files


@dataclass(frozen=True)
class SlideListing:
    """Slides by id; errors for names that two slides share; pictures with the name of a slide."""

    slides: dict[str, Path]
    twice: dict[str, str]
    beside: list[Path]


def find_slides(folder: str | os.PathLike[str], *, follow_links: bool = True) -> dict[str, Path]:
    """Find every slide in a folder and its subfolders: files by slide id, in order of id.

    A folder of DICOM files is one slide under the folder's name. A picture with the name of a slide is left
    out; two slides with one name are an error. Run folders of xmil are not searched. Links are followed
    unless they are broken or circular; without `follow_links`, links out of the folder are not followed.
    """
    listing = sort_slides(slide_files(folder, follow_links=follow_links)[0])
    for reason in listing.twice.values():
        raise FileError(reason)
    return listing.slides


def slide_files(
    folder: str | os.PathLike[str], *, follow_links: bool = True
) -> tuple[list[Path], list[Path]]:
    """List every slide file in a folder and its subfolders, and the links that were left out."""
    root = Path(folder)
    if not root.is_dir():
        raise FileError(absent(root, "folder"))
    skipped: list[Path] = []
    return list(_walk(root, skipped, follow_links)), skipped


def sort_slides(paths: Iterable[Path]) -> SlideListing:
    """Sort files by slide id: a slide replaces a plain picture of its name, two slides are an error."""
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
    """The id of a slide: the file's name without its suffix, or the name of a folder of DICOM files.

    >>> slide_id(Path("slides/TCGA-CR-7395.01A.svs")), slide_id(Path("slides/s1.ome.tif"))
    ('TCGA-CR-7395.01A', 's1')
    """
    return path.name if path.is_dir() else bare_name(path.name)


def _walk(root: Path, skipped: list[Path], follow_links: bool) -> Iterator[Path]:
    """Yield the slides of a tree; add links that are not followed to `skipped`."""
    visited: set[tuple[int, int]] = set()
    for folder_name, folders, names in os.walk(root, followlinks=True):
        folder = Path(folder_name)
        stat = folder.stat()
        if folder != root and ("run.json" in names or (stat.st_dev, stat.st_ino) in visited):
            skipped += [folder] if folder.is_symlink() else []
            folders.clear()
            continue
        visited.add((stat.st_dev, stat.st_ino))
        pictures = {"visualization"} if "contours_geojson" in folders else set()  # of a tiling run
        visible = sorted(name for name in folders if not name.startswith(".") and name not in pictures)
        folders[:] = [name for name in visible if _followed(folder / name, root, skipped, follow_links)]
        files = [n for n in names if n.lower().endswith(SLIDE_SUFFIXES) and not n.startswith(".")]
        slides = [name for name in files if _followed(folder / name, root, skipped, follow_links)]
        dicom = [name for name in slides if name.lower().endswith(".dcm")]
        if len(dicom) > 1:
            yield folder
        has_levels = any(name.lower().endswith(HAMAMATSU) for name in slides)
        parts = (*(PLAIN if has_levels else ()), *((".dcm",) if len(dicom) > 1 else ()))
        yield from (folder / name for name in slides if not name.lower().endswith(parts))


def _followed(path: Path, root: Path, skipped: list[Path], follow_links: bool) -> bool:
    """Whether to use a path; add skipped links to slides or folders to `skipped`."""
    if not path.is_symlink():
        return True
    try:
        target = path.resolve(strict=True)
        used = follow_links or target.is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # broken or circular
        used = False
    if not used and (path.is_dir() or path.name.lower().endswith(SLIDE_SUFFIXES)):
        skipped.append(path)
    return used


def _is_plain(path: Path) -> bool:
    return path.name.lower().endswith(PLAIN)
