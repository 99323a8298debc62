"""What a slide is: size, levels, mpp."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.core.errors import FileError
from xmil.core.names import SLIDE_SUFFIXES
from xmil.data.inspection import Report

if TYPE_CHECKING:
    from xmil.slides import Slide


def inspect_slide(path: Path) -> Report:
    """Dimensions, pyramid levels and mpp, and what to give where mpp is not stored."""
    from xmil.slides import open_slide

    with open_slide(path) as slide:
        facts = _facts(slide)
    why = f"its pixels are {facts['mpp from']}" if facts["mpp from"] else "mpp is not stored"
    missing = () if facts["mpp"] else (f"for patches of a known size: {why}; pass --slide-mpp",)
    return Report(str(path), "slide", f"a slide ({facts['read by']})", facts, missing=missing)


def _facts(slide: Slide) -> dict[str, Any]:
    whole = (0, 0, *slide.dimensions)
    return {
        "read by": slide.backend,
        "size": [list(slide.dimensions)],
        "levels": [list(size) for size in slide.level_dimensions],
        "downsamples": [round(scale, 4) for scale in slide.level_downsamples],
        "mpp": slide.mpp,
        "mpp from": slide.mpp_source,
        "objective power": slide.magnification,
        "bounds": None if slide.bounds == whole else list(slide.bounds),
    }


def slide_files(folder: Path) -> list[Path]:
    """The files of a folder that a slide's or image's suffix names, in order of name."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.lower().endswith(SLIDE_SUFFIXES) and not path.name.startswith(".") and path.is_file()
    )


def inspect_slides(folder: Path) -> Report:
    """A folder of slides: one row each, with size and mpp, and what is missing or cannot be read."""
    rows = tuple(_row(path) for path in slide_files(folder))
    good = [row for row in rows if "error" not in row]
    lacking = sum(row["mpp"] is None for row in good)
    facts = {"slides": len(rows), "read by": dict(Counter(row["read by"] for row in good))}
    missing = f"for patches of a known size: mpp is not stored in {lacking} of {len(good)}; pass --slide-mpp"
    unread = len(rows) - len(good)
    return Report(
        str(folder),
        "folder",
        "a folder of slides",
        facts,
        missing=(missing,) if lacking else (),
        problems=(f"{unread} files cannot be read",) if unread else (),
        rows=rows,
    )


def _row(path: Path) -> dict[str, Any]:
    try:
        facts = inspect_slide(path).facts
    except FileError as error:
        return {"file": path.name, "error": str(error)}
    return {"file": path.name, "size": facts["size"][0], "mpp": facts["mpp"], "read by": facts["read by"]}
