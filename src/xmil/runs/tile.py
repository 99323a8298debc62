"""Tiling of many slides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from xmil.core.errors import FileError
from xmil.core.runfiles import RUN, RunFolder, read_run
from xmil.data import open_bag
from xmil.runs.slidewise import Results, stopping, work_on_slides
from xmil.runs.workers.pool import Workers
from xmil.slides import open_slide
from xmil.slides.layout import FOLDERS, patches_file, write_tiling
from xmil.slides.tiling import TileSettings, tile_slide


def tile_slides(
    slides: Mapping[str, Path],
    out: Path,
    settings: TileSettings,
    *,
    engine: Workers | None = None,
    restart: bool = False,
    on_slide: Callable[[], None] = lambda: None,
    refused: Mapping[str, str] | None = None,
) -> Results:
    """Tile slides into a folder; those that have their patches are left alone.

    Where another `slide_mpp` is given than before, the slides that do not store theirs are tiled again.
    """
    kept = settings.as_dict()
    given = {"slide_mpp": _given_mpp(kept.pop("slide_mpp"), out, restart=restart)}
    return work_on_slides(
        RunFolder(out, "tile", kept),
        slides,
        partial(partial, _tile, settings, out),
        output=partial(patches_file, out),
        about={**given, "slides": {name: str(path) for name, path in slides.items()}},
        folders=FOLDERS,
        engine=engine,
        restart=restart,
        on_slide=on_slide,
        refused=refused,
        current=lambda name: _has_mpp(patches_file(out, name), settings.slide_mpp),
    )


def _given_mpp(mpp: float | None, out: Path, *, restart: bool) -> float | None:
    """The mpp of slides that store none; it may be given later, and stays known when it is not repeated."""
    known = None if restart or mpp is not None else read_run(out / RUN)
    return mpp if known is None else known.get("slide_mpp")


def _has_mpp(patches: Path, mpp: float | None) -> bool:
    """Whether the patches were laid with the given mpp, or with one that the slide itself stores."""
    if mpp is None:
        return True
    try:
        header = open_bag(patches)
    except FileError:
        return False
    own = not any(note.startswith("mpp ") for note in header.inferred)
    return own or header.mpp == mpp


def _tile(settings: TileSettings, out: Path, item: tuple[str, Path]) -> dict[str, Any]:
    with open_slide(item[1]) as slide:
        tiling = tile_slide(slide, settings)
    stopping(partial(write_tiling, tiling, out))
    return {"patches": len(tiling.xy0), "flat": tiling.flat, "inferred": list(tiling.inferred)}
