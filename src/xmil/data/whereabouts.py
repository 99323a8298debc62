"""Where features are: the folder meant when one above it is named, and whether a path holds features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xmil.core.errors import FileError, XmilError
from xmil.core.names import counted
from xmil.data.bags import open_bag
from xmil.data.header import Header
from xmil.data.join import feature_files

LEVELS = 3  # folders are looked for so far down
SHOWN = 12  # folders named in a hint


@dataclass(frozen=True)
class FeatureFolder:
    """A folder with feature files, how many, and what its first readable one is."""

    path: Path
    files: int
    first: Header | None

    @property
    def has_features(self) -> bool:
        """Whether its files hold features, and not patches alone."""
        return self.first is not None and self.first.dim > 0

    @property
    def has_places(self) -> bool:
        """Whether its files know where the patches lie."""
        return self.first is not None and (self.first.coords is not None or self.first.raw_coords is not None)


def folders_below(path: Path, levels: int = LEVELS) -> list[FeatureFolder]:
    """The nearest folders below that hold feature files, those to explain first."""
    found = [FeatureFolder(folder, len(files), _first(files)) for folder, files in _below(path, levels)]
    return sorted(found, key=lambda each: (not each.has_features, not each.has_places, str(each.path)))


def meant_folder(path: Path) -> Path | None:
    """The one folder below that is meant where a folder above it is named; None where several may be."""
    found = [each for each in folders_below(path) if each.has_features]
    placed = [each for each in found if each.has_places]
    # CLAM has each slide twice: h5_files know the places, pt_files take them from there
    several = [each for each in placed or found if each.path.name != "pt_files"] or placed or found
    return several[0].path if len(several) == 1 else None


def folder_advice(path: Path) -> str:
    """What to name in place of a folder without feature files of its own."""
    found = folders_below(path)
    if not found:
        return "name the folder that holds them"
    one = meant_folder(path)
    if one is not None:
        return f"use --features {one}"
    named = [f"{each.path} ({counted(each.files, 'file')})" for each in found if each.has_features]
    named = named or [f"{each.path} ({counted(each.files, 'file')}, without features)" for each in found]
    more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
    return f"use --features with one of {', '.join(named[:SHOWN])}{more}"


def is_features(path: Path) -> bool:
    """Whether a file, or the first file of a folder, holds features."""
    try:
        first = _first(feature_files(path)[0])
    except XmilError:
        return False
    return first is not None and first.dim > 0


def _below(path: Path, levels: int) -> Iterator[tuple[Path, list[Path]]]:
    try:
        folders = sorted(entry for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return
    for folder in folders:
        files = feature_files(folder)[0]
        if files and files != [folder]:
            yield folder, files
        elif not files and levels > 1:
            yield from _below(folder, levels - 1)


def _first(files: list[Path]) -> Header | None:
    """The header of the first file that can be read."""
    for file in files[:3]:
        try:
            return open_bag(file)
        except (FileError, OSError):
            continue
    return None
