"""Tiling of many slides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from xmil.engine.folder import RunFolder
from xmil.engine.pool import Engine
from xmil.engine.slidewise import Results, stopping, work_on_slides
from xmil.slides import open_slide
from xmil.slides.layout import FOLDERS, patches_file, write_tiling
from xmil.slides.tiling import TileSettings, tile_slide


def tile_slides(
    slides: Mapping[str, Path],
    out: Path,
    settings: TileSettings,
    *,
    engine: Engine | None = None,
    restart: bool = False,
    on_slide: Callable[[], None] = lambda: None,
) -> Results:
    """Tile slides into a folder; those that have their patches are left alone."""
    kept = settings.as_dict()
    given = {"slide_mpp": kept.pop("slide_mpp")}  # may be given later, for the slides that lack mpp
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
    )


def _tile(settings: TileSettings, out: Path, item: tuple[str, Path]) -> dict[str, Any]:
    with open_slide(item[1]) as slide:
        tiling = tile_slide(slide, settings)
    stopping(partial(write_tiling, tiling, out))
    return {"patches": len(tiling.xy0), "flat": tiling.flat, "inferred": list(tiling.inferred)}
