"""Patches on disk in TRIDENT's layout, with the tissue as GeoJSON and an overview picture.

patches/<slide>_patches.h5           `coords` (n, 2), level-0 corners, with TRIDENT's attributes and `mpp`
contours_geojson/<slide>.geojson     the tissue; polygons that count from the scanned bounds, as QuPath does
visualization/<slide>.png            tissue and patches on the slide

The patches are written last: a slide that has them is done.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil._version import __version__
from xmil.core.lettering import drawable
from xmil.core.storage import write_atomically, write_text
from xmil.slides.slide import resize
from xmil.slides.tiling import STANDARD, Tiling, outlines, tissue_geojson

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont


PATCHES, CONTOURS, PICTURES = "patches", "contours_geojson", "visualization"
FOLDERS = (PATCHES, CONTOURS, PICTURES)


def patches_file(folder: Path, slide_id: str) -> Path:
    """Where the patches of a slide lie."""
    return folder / PATCHES / f"{slide_id}_patches.h5"


def write_tiling(tiling: Tiling, folder: Path, *, source: str | None = None) -> Path:
    """Write outline, overview and patches; each file is whole or absent.

    `source` is what the slide held.
    """
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    slide_id = tiling.slide_id
    outline = tissue_geojson(tiling.tissue, slide=slide_id, origin=tiling.origin)
    write_text(folder / CONTOURS / f"{slide_id}.geojson", json.dumps(outline))
    picture = overview(tiling)
    write_atomically(
        folder / PICTURES / f"{slide_id}.png", lambda part: picture.save(part, format="PNG", compress_level=1)
    )
    path = patches_file(folder, slide_id)
    write_atomically(path, lambda part: _write(tiling, part, source))
    return path


def _write(tiling: Tiling, path: str, source: str | None) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file.attrs["xmil"] = json.dumps(_ours(tiling, source))
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


def _ours(tiling: Tiling, source: str | None) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "source": source,
        "tissue_share": tiling.tissue.share,
        "flat_patches": tiling.flat,
    }
    extra["artefacts"] = {kind: len(corners) for kind, corners in tiling.artefacts.items()}
    return {
        "version": __version__,
        "slide_id": tiling.slide_id,
        "mpp": tiling.mpp,
        "inferred": list(tiling.inferred),
        "extra": {**extra, "settings": tiling.settings.as_dict()},
    }


LONGEST = 1800  # pixels
OUTLINE, GRID, TEXT = (0, 140, 60), (30, 60, 200), (20, 20, 20)
ARTEFACTS = {"pen": (230, 80, 0), "fold": (140, 0, 160), "blur": (90, 90, 90), "coverslip": (0, 150, 170)}
CAPTION = 34


def overview(tiling: Tiling) -> Image:
    """The thumbnail with tissue in green, patches in blue, and a line of numbers above."""
    from PIL import Image, ImageDraw

    height, width = tiling.tissue.picture.shape[:2]
    scale = LONGEST / max(width, height)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    page = Image.new("RGB", (size[0], size[1] + CAPTION), "white")
    draw = ImageDraw.Draw(page)
    picture = Image.fromarray(resize(tiling.tissue.picture, size))
    _draw_grid(ImageDraw.Draw(picture, "RGBA"), tiling, size)
    _draw_outlines(ImageDraw.Draw(picture), tiling, size)
    page.paste(picture, (0, CAPTION))
    draw.text((8, 8), _caption(tiling), fill=TEXT, font=_font(18))
    left = 8.0 + draw.textlength(_caption(tiling), font=_font(18)) + 24
    for kind, corners in tiling.artefacts.items():
        if len(corners):
            told = f"{kind} {len(corners):,}{' (left out)' if kind in tiling.settings.drop else ''}"
            draw.text((left, 8), told, fill=ARTEFACTS[kind], font=_font(18))
            left += draw.textlength(told, font=_font(18)) + 16
    return page


def _draw_grid(draw: object, tiling: Tiling, size: tuple[int, int]) -> None:
    """Patches in blue; those that show an artefact in its colour, crossed out where they were left out."""
    fx, fy = size[0] / tiling.dimensions[0], size[1] / tiling.dimensions[1]
    squares = [(xy, GRID, False) for xy in tiling.xy0.tolist()]
    for kind, corners in tiling.artefacts.items():
        squares += [(xy, ARTEFACTS[kind], kind in tiling.settings.drop) for xy in corners.tolist()]
    for (x, y), colour, crossed in squares:
        box = [x * fx, y * fy, (x + tiling.edge0) * fx - 1, (y + tiling.edge0) * fy - 1]
        box[2], box[3] = max(box[0], box[2]), max(box[1], box[3])
        draw.rectangle(box, fill=(*colour, 28), outline=(*colour, 200))  # type: ignore[attr-defined]
        if crossed:
            draw.line(box, fill=(*colour, 220), width=2)  # type: ignore[attr-defined]


def _draw_outlines(draw: object, tiling: Tiling, size: tuple[int, int]) -> None:
    fx, fy = size[0] / tiling.dimensions[0], size[1] / tiling.dimensions[1]
    for rings in outlines(tiling.tissue):
        for ring in rings:
            points = [(x * fx, y * fy) for x, y in ring.tolist()]
            draw.line(points, fill=OUTLINE, width=2, joint="curve")  # type: ignore[attr-defined]


def _caption(tiling: Tiling) -> str:
    microns = tiling.edge0 * tiling.mpp
    name = drawable(tiling.slide_id, own_only=True)
    return (
        f"{name}   {len(tiling.xy0):,} patches of {tiling.settings.size} px at "
        f"{microns / tiling.settings.size:.3g} µm/px   tissue {tiling.tissue.share:.0%} of the slide"
    )


def _font(size: int) -> FreeTypeFont:
    """DejaVu, which matplotlib brings: it has the letter µ."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", size)
