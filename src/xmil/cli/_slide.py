"""What a slide is: size, levels, mpp; through OpenSlide, else tifffile, else Pillow."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from xmil.core.errors import FileError
from xmil.data.inspection import Report
from xmil.data.siblings import SLIDE_SUFFIXES

_INSTALL = "install the readers to look into it: pip install 'xmil[slides]'"


def inspect_slide(path: Path) -> Report:
    """Dimensions, pyramid levels and mpp, and what to give where mpp is not stored."""
    facts = _openslide(path) or _tifffile(path) or _pillow(path)
    if facts is None:
        raise FileError(f"{path}: not a slide or image that can be read, or damaged; {_INSTALL}.")
    missing = () if facts.get("mpp") else ("for patches of a known size: mpp is not stored; pass --mpp",)
    return Report(str(path), "slide", f"a slide ({facts['read by']})", facts, missing=missing)


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
    missing = f"for patches of a known size: mpp is not stored in {lacking} of {len(good)}; pass --mpp"
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


def _openslide(path: Path) -> dict[str, Any] | None:
    try:
        import openslide
    except ImportError:
        return None
    try:
        with openslide.OpenSlide(str(path)) as slide:
            about = slide.properties
            mpp = [about.get(openslide.PROPERTY_NAME_MPP_X), about.get(openslide.PROPERTY_NAME_MPP_Y)]
            return {
                "read by": "OpenSlide",
                "vendor": about.get(openslide.PROPERTY_NAME_VENDOR),
                "size": [list(slide.dimensions)],
                "levels": [list(size) for size in slide.level_dimensions],
                "downsamples": [round(float(scale), 4) for scale in slide.level_downsamples],
                "mpp": float(mpp[0]) if mpp[0] else None,
                "mpp y": float(mpp[1]) if mpp[1] and mpp[1] != mpp[0] else None,
                "objective power": about.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER),
                "bounds": _bounds(about),
            }
    except (openslide.OpenSlideError, OSError, ValueError):
        return None


def _bounds(about: Any) -> list[str] | None:
    keys = [f"openslide.bounds-{name}" for name in ("x", "y", "width", "height")]
    return [about[key] for key in keys] if keys[0] in about else None


def _tifffile(path: Path) -> dict[str, Any] | None:
    try:
        import tifffile
    except ImportError:
        return None
    try:
        with tifffile.TiffFile(path) as file:
            series = file.series[0]
            shapes = [list(level.shape[:2][::-1]) for level in series.levels]
            return {"read by": "tifffile", "size": [shapes[0]], "levels": shapes, "mpp": None}
    except Exception:  # damaged TIFFs raise almost any type
        return None


def _pillow(path: Path) -> dict[str, Any] | None:
    try:
        from PIL import Image

        with Image.open(path) as image:
            return {"read by": f"Pillow, {image.format}", "size": [list(image.size)], "mpp": None}
    except Exception:  # damaged or foreign images raise almost any type
        return None
