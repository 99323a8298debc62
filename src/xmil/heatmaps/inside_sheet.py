"""A sheet of patches with what speaks inside each of them; and the same places as tiles and as OME-TIFF."""

from __future__ import annotations

from math import ceil
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.colors import TwoSlopeNorm

from xmil.core.errors import bad_parameter, unknown_name
from xmil.core.explanation import Explanation
from xmil.core.inside_patch import Inside
from xmil.core.target import Target
from xmil.heatmaps.exports import write_geojson
from xmil.heatmaps.ometiff import Pyramid, write_scores
from xmil.heatmaps.panel import Picture
from xmil.heatmaps.sheets import cut_patch
from xmil.heatmaps.words import number
from xmil.slides.frames import export_frame

if TYPE_CHECKING:
    from xmil.slides.slide import Slide

PIXELS, INCHES, ACROSS = 256, 1.7, 4
SCALES = ("patch", "sheet")


def draw_inside(
    inside: Inside,
    slide: Slide | str | PathLike[str] | None = None,
    *,
    alpha: float = 0.45,
    top: int = 16,
    scale: str = "patch",
) -> Picture:
    """Each patch beside its map, red for and blue against the target.

    Colours go to the largest value of each patch, which its title tells, or with `scale="sheet"` of all of
    them. Maps are drawn smoothly between the places that were measured; the file keeps the places themselves.
    """
    if scale not in SCALES:
        raise unknown_name("scale", scale, SCALES)
    if not 0 <= alpha <= 1:
        raise bad_parameter("alpha", "draw_inside", "a number in the range [0, 1]", alpha)
    if slide is not None and isinstance(slide, str | PathLike):
        from xmil.slides import open_slide

        with open_slide(slide) as opened:
            return _sheet(inside, opened, alpha=alpha, top=top, scale=scale)
    return _sheet(inside, slide, alpha=alpha, top=top, scale=scale)


def _sheet(inside: Inside, slide: Any, *, alpha: float, top: int, scale: str) -> Picture:
    shown = min(top, len(inside))
    tissues = [None if slide is None else cut_patch(slide, inside.boxes[i], PIXELS) for i in range(shown)]
    per_patch = 1 if slide is None else 2
    rows = ceil(shown / ACROSS)
    size = (ACROSS * per_patch * INCHES, rows * (INCHES + 0.35) + 0.6)
    figure = Picture(figsize=size, layout="constrained")
    axes = np.atleast_2d(figure.subplots(rows, ACROSS * per_patch, squeeze=False))
    limits = np.abs(inside.maps[:shown]).max(axis=(1, 2))
    limits = np.full_like(limits, limits.max()) if scale == "sheet" else limits
    for axis in axes.ravel():
        axis.set_axis_off()
    for i in range(shown):
        place = axes[i // ACROSS, (i % ACROSS) * per_patch :]
        limit = float(limits[i]) or 1.0
        _draw_one(place, inside.maps[i], tissues[i], TwoSlopeNorm(0.0, -limit, limit), alpha)
        place[0].set_title(f"patch {inside.patches[i]}: {number(float(inside.audit.score[i]))}", fontsize=7)
        if per_patch == 2:
            place[1].set_title(f"colours to ±{number(limit)}", fontsize=6, color="0.4")
    figure.suptitle(
        f"{inside.bag or ''} inside the patches ({inside.method}), red speaks for {inside.target}, "
        f"colours by {scale}".strip(),
        fontsize=9,
    )
    return figure


def _draw_one(
    place: npt.NDArray[Any], values: npt.NDArray[Any], tissue: Any, norm: TwoSlopeNorm, alpha: float
) -> None:
    extent = (0, PIXELS, PIXELS, 0)
    if tissue is not None:
        place[0].imshow(tissue, extent=extent)
        place[1].imshow(np.asarray(tissue).mean(axis=2), cmap="gray", vmin=0, vmax=255, extent=extent)
    over = place[1 if tissue is not None else 0]
    over.imshow(
        values, cmap="RdBu_r", norm=norm, alpha=1.0 if tissue is None else alpha, extent=extent,
        interpolation="nearest" if tissue is None else "bilinear",
    )  # fmt: skip


def write_inside_geojson(path: str | PathLike[str], inside: Inside, slide: Slide | None = None) -> None:
    """Every place of every map as a tile with its value, in QuPath's frame."""
    cells = inside.cells().reshape(-1, 4)
    frame = export_frame(cells, slide)
    write_geojson(path, [_as_scores(inside)], origin=frame[:2], boxes=cells)


def write_inside_tiff(path: str | PathLike[str], inside: Inside, slide: Slide | None = None) -> None:
    """The maps as an OME-TIFF in the slide's frame: float32, NaN outside these patches."""
    cells = inside.cells().reshape(-1, 4)
    pyramid = Pyramid.of(export_frame(cells, slide), mpp=None if slide is None else slide.mpp)
    write_scores(path, [_as_scores(inside)], pyramid, boxes=cells)


def _as_scores(inside: Inside) -> Explanation:
    values = inside.maps.astype(np.float32).ravel()
    target, logits = Target(inside.target), np.zeros(1, dtype=np.float32)
    return Explanation(values, logits, 0.0, f"inside-{inside.method}", target, True, bag=inside.bag)
