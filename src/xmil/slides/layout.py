"""Patches on disk in TRIDENT's layout, with the tissue as GeoJSON and an overview picture.

patches/<slide>_patches.h5           `coords` (n, 2), level-0 corners, with TRIDENT's attributes and `mpp`
contours_geojson/<slide>.geojson     the tissue; polygons that count from the scanned bounds, as QuPath does
visualization/<slide>.png            tissue and patches on the slide

The patches are written last: a slide that has them is done.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xmil._version import __version__
from xmil.core.storage import write_atomically, write_text
from xmil.slides.outline import tissue_geojson
from xmil.slides.overview import overview
from xmil.slides.tiling import STANDARD, Tiling

PATCHES, CONTOURS, PICTURES = "patches", "contours_geojson", "visualization"
FOLDERS = (PATCHES, CONTOURS, PICTURES)


def patches_file(folder: Path, slide_id: str) -> Path:
    """Where the patches of a slide lie."""
    return folder / PATCHES / f"{slide_id}_patches.h5"


def write_tiling(tiling: Tiling, folder: Path) -> Path:
    """Write outline, overview and patches; each file is whole or absent."""
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    slide_id = tiling.slide_id
    outline = tissue_geojson(tiling.tissue, slide=slide_id, origin=tiling.origin)
    write_text(folder / CONTOURS / f"{slide_id}.geojson", json.dumps(outline))
    picture = overview(tiling)
    write_atomically(
        folder / PICTURES / f"{slide_id}.png", lambda part: picture.save(part, format="PNG", optimize=False)
    )
    path = patches_file(folder, slide_id)
    write_atomically(path, lambda part: _write(tiling, part))
    return path


def _write(tiling: Tiling, path: str) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file.attrs["xmil"] = json.dumps(_ours(tiling))
        coords = file.create_dataset("coords", data=tiling.xy0)
        for key, value in _attributes(tiling).items():
            coords.attrs[key] = value


def _attributes(tiling: Tiling) -> dict[str, Any]:
    """What TRIDENT stores beside the corners, and mpp."""
    settings = tiling.settings
    return {
        "patch_size": settings.size,
        "patch_size_level0": tiling.edge0,
        "level0_magnification": round(tiling.magnification),
        "target_magnification": round(settings.magnification or STANDARD / settings.mpp),
        "overlap": settings.overlap,
        "level0_width": tiling.dimensions[0],
        "level0_height": tiling.dimensions[1],
        "name": tiling.slide_id,
        "savetodir": PATCHES,
        "mpp": tiling.mpp,
    }


def _ours(tiling: Tiling) -> dict[str, Any]:
    extra = {"tissue_share": tiling.tissue.share, "flat_patches": tiling.flat}
    return {
        "version": __version__,
        "slide_id": tiling.slide_id,
        "mpp": tiling.mpp,
        "inferred": list(tiling.inferred),
        "extra": {**extra, "settings": tiling.settings.as_dict()},
    }
