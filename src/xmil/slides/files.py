"""Slides in a folder: which files are slides, and their ids."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from xmil.core.errors import FileError
from xmil.core.names import SLIDE_SUFFIXES, bare_name

PLAIN = (".png", ".jpg", ".jpeg")
HAMAMATSU = (".vms", ".vmu")  # their levels lie beside them as JPEG files


@dataclass(frozen=True)
class Found:
    """Slides by id; names that two slides share, with the reason; pictures beside a slide of their name."""

    slides: dict[str, Path]
    twice: dict[str, str]
    beside: list[Path]


def find_slides(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Slide id to file, for every slide in a folder and the folders below it, in order of id.

    A folder of DICOM files is one slide under the folder's name. A picture beside a slide of the same name
    is left out; two slides of one name are an error. Run folders of this package are not searched.
    """
    found = sort_slides(slide_files(folder))
    for reason in found.twice.values():
        raise FileError(reason)
    return found.slides


def slide_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Every slide file in a folder and the folders below it."""
    root = Path(folder)
    if not root.is_dir():
        raise FileError(f"{root}: no such folder.")
    return list(_walk(root))


def sort_slides(paths: Iterable[Path]) -> Found:
    """Files by slide id; of a slide and a plain picture the slide, of two slides neither."""
    found: dict[str, Path] = {}
    twice: dict[str, str] = {}
    beside: list[Path] = []
    for path in sorted(paths, key=lambda path: (_is_plain(path), str(path))):
        name = slide_id(path)
        if name not in found:
            found[name] = path
        elif _is_plain(path) != _is_plain(found[name]):
            beside.append(path)
        else:
            reason = f"{path}: the slide {name!r} is at {found[name]} too; rename or remove one."
            twice.setdefault(name, reason)
    slides = {name: path for name, path in sorted(found.items()) if name not in twice}
    return Found(slides, twice, beside)


def slide_id(path: Path) -> str:
    """The id of a slide file: its name without the suffix, of a folder of DICOM files the folder's.

    >>> slide_id(Path("slides/TCGA-CR-7395.01A.svs")), slide_id(Path("slides/s1.ome.tif"))
    ('TCGA-CR-7395.01A', 's1')
    """
    return path.name if path.is_dir() else bare_name(path.name)


def _walk(root: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(root):
        here = Path(place)
        if here != root and "run.json" in names:
            folders.clear()
            continue
        ours = {"visualization"} if "contours_geojson" in folders else set()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in ours)
        yield from _slides_of(here, names)


def _slides_of(folder: Path, names: list[str]) -> Iterator[Path]:
    slides = [name for name in names if name.lower().endswith(SLIDE_SUFFIXES) and not name.startswith(".")]
    parts = any(name.lower().endswith(HAMAMATSU) for name in slides)
    dicom = [name for name in slides if name.lower().endswith(".dcm")]
    if len(dicom) > 1:
        yield folder
    for name in slides:
        inside = (parts and name.lower().endswith(PLAIN)) or (len(dicom) > 1 and name in dicom)
        if not inside:
            yield folder / name


def _is_plain(path: Path) -> bool:
    return path.name.lower().endswith(PLAIN)
