"""Cohort rows and feature files, joined by name, with a report of what did not match."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from xmil.core.absence import absent
from xmil.core.errors import FileError, InputError
from xmil.core.names import counted
from xmil.data.cohort import PATH, Cohort
from xmil.data.containers.folderstore import is_bag_folder
from xmil.data.siblings import FEATURE_SUFFIXES, bare_name, inside, is_plain, slide_name

StrPath = str | PathLike[str]


@dataclass(frozen=True)
class JoinReport:
    """What did not match: slides without features, files without a row, doubles, links not followed."""

    matched: int
    without_features: tuple[str, ...] = ()
    without_row: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()
    not_followed: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{counted(self.matched, 'slide')} matched"]
        parts += _said("slides without features", self.without_features)
        parts += _said("feature files without a row", self.without_row)
        parts += _said("slides with several files, of which the first was used", self.doubled)
        parts += _said(
            "links not followed (out of the folder, or to a device; see --follow-links)", self.not_followed
        )
        return "; ".join(parts) + "."


def feature_files(folder: StrPath, *, follow_links: bool = True) -> tuple[list[Path], list[Path]]:
    """The feature files of a folder in order of name, and the links in it that were left out.

    Links are followed, but for those to a device or pipe; one that leads nowhere or in a circle cannot be
    read, and is reported as such. Without `follow_links`, those that lead out of the folder are left out. A
    feature file, or a store that is a folder, stands for itself.
    """
    root = Path(folder)
    if root.is_file() or (root.is_dir() and (root.name.lower().endswith(".zarr") or _is_bag(root))):
        return [root], []
    if not root.is_dir():
        raise FileError(absent(root, "folder or file of features"))
    files = sorted(_bags(root))
    taken = [path for path in files if not _to_device(path) and (follow_links or inside(path, root))]
    known = set(taken)
    return taken, [path for path in files if path not in known]


def join_features(
    cohort: Cohort, folder: StrPath, *, among: Cohort | None = None, follow_links: bool = True
) -> tuple[Cohort, JoinReport]:
    """The slides that have features, with the file in the column `path`, and a report of the rest.

    `among` is the table that the cohort is a part of: its files have a row. Of one feature file, the cohort
    is the slide of its name.

    A `path` column in the table is used as it is, relative to the folder; else names must be equal, image and
    feature suffixes aside.
    """
    files, links = feature_files(folder, follow_links=follow_links)
    by_name: dict[str, list[Path]] = {}
    for file in files:
        by_name.setdefault(slide_name(file), []).append(file)
    if files == [Path(folder)]:
        cohort = cohort.take(i for i, slide in enumerate(cohort.slides) if bare_name(slide) in by_name)
    found = _found(cohort, by_name, Path(folder), follow_links=follow_links)
    rows = [i for i, path in enumerate(found) if path is not None]
    used = {path for path in found if path is not None}
    named = {slide_name(path) for path in used} | {bare_name(slide) for slide in (among or cohort).slides}
    doubled = [
        slide
        for slide, path in zip(cohort.slides, found, strict=True)
        if path and len(by_name.get(bare_name(slide), ())) > 1
    ]
    report = JoinReport(
        matched=len(rows),
        without_features=tuple(
            slide for slide, path in zip(cohort.slides, found, strict=True) if path is None
        ),
        without_row=tuple(file.name for file in files if file not in used and slide_name(file) not in named),
        doubled=tuple(doubled),
        not_followed=tuple(path.name for path in links),
    )
    if not files:
        from xmil.data.whereabouts import folder_advice  # it looks into folders by means of this module

        unread = f" ({len(links)} links not followed; see --follow-links)" if links else ""
        raise InputError(f"{folder}: no feature files in this folder{unread}; {folder_advice(Path(folder))}.")
    if not rows:
        raise InputError(f"{folder}: no feature file has the name of a slide in the cohort; {report}")
    return cohort.with_column(PATH, [path and str(path) for path in found]).take(rows), report


def _found(
    cohort: Cohort, by_name: dict[str, list[Path]], folder: Path, *, follow_links: bool
) -> list[Path | None]:
    named = cohort.columns.get(PATH, (None,) * len(cohort))
    return [
        _named(cell, folder, follow_links=follow_links)
        if cell is not None
        else next(iter(by_name.get(bare_name(slide), ())), None)
        for slide, cell in zip(cohort.slides, named, strict=True)
    ]


def _named(cell: str, folder: Path, *, follow_links: bool) -> Path | None:
    path = Path(cell)
    if "\0" in cell or ".." in path.parts:
        raise InputError(f"The path {cell!r} in the cohort must not lead out of the folder by '..'.")
    full = path if path.is_absolute() else folder / path
    if not follow_links and not path.is_absolute() and full.exists() and not inside(full, folder):
        raise InputError(
            f"The path {cell!r} in the cohort is a link out of {folder}; name the file itself, or pass "
            "--follow-links."
        )
    return full if full.exists() else None


def _bags(root: Path) -> Iterator[Path]:
    """Files and stores with a feature suffix; Slideflow's index files and hidden ones are not bags."""
    for path in root.iterdir():
        name = path.name.lower()
        if not is_plain(path.name) or name.startswith(".") or ".index.np" in name:
            continue
        if name.endswith(FEATURE_SUFFIXES) or _is_bag(path):
            yield path


def _to_device(path: Path) -> bool:
    """Whether a link leads to what is neither a file nor a folder."""
    try:
        return path.is_symlink() and path.exists() and not path.is_file() and not path.is_dir()
    except (OSError, RuntimeError):  # links in a circle
        return False


def _is_bag(path: Path) -> bool:
    try:
        return is_bag_folder(path)
    except (FileError, OSError):  # numbered files, the first of them damaged, foreign or named otherwise
        return False


def _said(what: str, names: tuple[str, ...]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"{len(names)} {what}: {shown}"]
