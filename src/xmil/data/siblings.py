"""Files that belong together: found by name, inside the same tree, never through `..` or links out of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from xmil.core.names import SLIDE_SUFFIXES as SLIDE_SUFFIXES
from xmil.core.names import bare_name as bare_name
from xmil.core.names import is_plain as is_plain

# `.index.npz` before `.npz`: the longest suffix wins.
FEATURE_SUFFIXES = (".h5", ".hdf5", ".pt", ".pth", ".npy", ".npz", ".zarr")


def slide_name(path: Path) -> str:
    """The slide a feature file is of: its name without the feature suffix, dots inside kept.

    >>> slide_name(Path("TCGA-CR-7395.01A.h5")), slide_name(Path("s1_patches.h5"))
    ('TCGA-CR-7395.01A', 's1')
    """
    name = path.name
    for suffix in FEATURE_SUFFIXES:
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
            break
    return name.removesuffix("_patches") or name


def find_beside(path: Path, candidates: Iterable[str], *, levels: int) -> Path | None:
    """The first existing relative candidate in the folder of `path` or up to `levels` folders above."""
    for folder, relative in _places(path, list(candidates), levels):
        found = folder / relative
        if found.exists() and inside(found, folder):
            return found
    return None


def _places(path: Path, candidates: list[str], levels: int) -> Iterator[tuple[Path, str]]:
    parents = list(path.absolute().parents)[: levels + 1]
    return ((folder, relative) for folder in parents for relative in candidates)


def inside(path: Path, folder: Path) -> bool:
    """Whether a path, links followed, lies in a folder."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # loops of links
        return False


def index_beside(path: Path) -> Path | None:
    """Slideflow's index of tile centres for a `.pt`."""
    name = slide_name(path)
    return find_beside(path, [f"{name}.index.npz", f"{name}.index.npy"], levels=0)


def patch_table(path: Path) -> Path | None:
    """The paper's patch metadata for a slide's features."""
    table = f"{slide_name(path)}/metadata/df.csv"
    return find_beside(path, [f"patches/{table}", table], levels=2)
