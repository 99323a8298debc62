"""A sheet of patches with the evidence inside each of them; and the same places as tiles and as OME-TIFF."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from xmil.core.errors import bad_parameter, check_names
from xmil.core.explanation import Explanation
from xmil.core.inside import Inside
from xmil.core.services import register_service
from xmil.core.task import Target
from xmil.heatmaps.canvas import opened
from xmil.heatmaps.exports import write_geojson
from xmil.heatmaps.panel import GREY, Heading, Picture, Ruler, Sheet, cut_patch
from xmil.heatmaps.pyramids import Pyramid, write_scores
from xmil.heatmaps.style import BLUE, RED, Pixels, Scale
from xmil.heatmaps.words import number
from xmil.slides.slide import Slide, export_frame

EDGE, BETWEEN, ACROSS = 256, 6, 4  # pixels of a patch, between it and its map, patches in a row
OUTLINED = 0.5  # share of the evidence for the target, or against it, inside the outlines
LIGHT = 0.35  # how much the tissue under a map is lightened towards white
SCALES = ("patch", "sheet")
STRONG = Scale(-1.0, 1.0, signed=True, colours="red-blue").paint([-1.0, 1.0])[:, :3].astype(np.float64)


@register_service
def draw_inside(
    inside: Inside,
    slide: Slide | str | PathLike[str] | None = None,
    *,
    alpha: float = 0.75,
    top: int = 16,
    scale: str = "patch",
) -> Picture:
    """Draw each patch beside its map, red for and blue against the target; patches for and against apart.

    The larger a place's value the denser its colour, up to `alpha` at the patch's largest value, or with
    `scale="sheet"` at that of all of them. A red outline encloses the strongest places that together hold
    half of all that speaks for the target in this patch, a blue one half of what speaks against it; only the
    side of the patch's score is outlined. Maps are drawn smoothly between the places that were measured; the
    file keeps the places themselves.
    """
    check_names("scale", [scale], SCALES)
    if not 0 <= alpha <= 1:
        raise bad_parameter("alpha", "draw_inside", "a number in the range [0, 1]", alpha)
    if isinstance(slide, str | PathLike):
        with opened(slide) as source:
            return draw_inside(inside, source, alpha=alpha, top=top, scale=scale)
    count = min(top, len(inside))
    limits = np.abs(inside.maps[:count]).max(axis=(1, 2), initial=0.0)
    limits = np.full_like(limits, limits.max(initial=0.0)) if scale == "sheet" else limits
    limits = np.where(limits > 0, limits, 1.0)
    wide = EDGE if slide is None else 2 * EDGE + BETWEEN
    strongest = "its patch" if scale == "patch" else "all patches"
    about = (
        f"inside the patches   ·   {inside.method}, {inside.encoder}   ·   red supports, blue speaks against"
        f"   ·   full colour: the strongest place of {strongest}   ·   "
        "outlined: the fewest places that hold half"
    )
    heading = Heading(inside.bag or "", about, tuple(inside.warnings))
    sheet = Sheet(max(13.0, EDGE / 17), [wide] * min(ACROSS, max(2, count)), heading)
    scores = inside.audit.score[:count]
    target = f"class {inside.target}" if inside.target.isdigit() else inside.target
    for words, rows, colour in (
        (f"patches that support {target}", np.flatnonzero(scores >= 0), RED),
        (f"patches that speak against {target}", np.flatnonzero(scores < 0), BLUE),
    ):
        if len(rows):
            sheet.line(words, 1.0, color=colour, weight="bold")
        for start in range(0, len(rows), len(sheet.left)):
            for x, i in zip(sheet.left, rows[start : start + len(sheet.left)], strict=False):
                _draw_patch(sheet, x, int(i), inside, slide, limit=float(limits[i]), alpha=alpha)
            sheet.y += EDGE + round(3.4 * sheet.unit)
    return sheet.close()


def _draw_patch(
    sheet: Sheet, x: float, i: int, inside: Inside, slide: Slide | None, *, limit: float, alpha: float
) -> None:
    """Draw a patch beside its map, with score and place below; without a slide only the map."""
    box, score = inside.boxes[i], float(inside.audit.score[i])
    values = draw_between(inside.maps[i], EDGE)
    below = sheet.y + EDGE + round(0.3 * sheet.unit)
    if slide is None:
        blank = np.full((EDGE, EDGE, 3), 255, dtype=np.uint8)
        sheet.image(lay_over(blank, values, limit=limit, alpha=1.0), x, sheet.y)
    else:
        tissue = cut_patch(slide, box, EDGE)
        axes = sheet.image(tissue, x, sheet.y)
        _outline(axes, values, -1 if score < 0 else 1)
        microns = None if slide.mpp is None else slide.mpp * float(box[2] - box[0]) / EDGE
        if len(sheet.placed) == 1 and (ruler := Ruler.fit(EDGE, microns)) is not None:
            sheet.ruler(axes, ruler, EDGE)  # on the first patch; all are of one size
        second = x + EDGE + BETWEEN
        over = sheet.image(lay_over(tissue, values, limit=limit, alpha=alpha), second, sheet.y)
        _outline(over, values, -1 if score < 0 else 1)
    sheet.text(f"score {number(score)}", 0.95, x + EDGE / 2, below, width=EDGE, ha="center")
    lower = below + round(1.3 * sheet.unit)
    place = f"patch {inside.patches[i]}   x {box[0]:,}   y {box[1]:,}"
    sheet.text(place, 0.75, x + EDGE / 2, lower, width=EDGE, ha="center", color=GREY)
    if slide is not None:
        full = f"full colour: \u00b1{number(limit)}"
        sheet.text(full, 0.75, second + EDGE / 2, below, width=EDGE, ha="center", color=GREY)


def draw_between(values: npt.NDArray[Any], edge: int) -> npt.NDArray[np.float32]:
    """Enlarge a map (h, w) to `edge` x `edge` pixels, straight lines between the centres of its places."""
    small = Image.fromarray(np.ascontiguousarray(values, dtype=np.float32))
    how = Image.Resampling.BOX if max(values.shape) >= edge else Image.Resampling.BILINEAR
    return np.asarray(small.resize((edge, edge), how))


def lay_over(tissue: Pixels, values: npt.NDArray[Any], *, limit: float, alpha: float) -> Pixels:
    """Lay red and blue over grey tissue (h, w, 3), denser the larger the value.

    >>> tissue = np.full((1, 3, 3), 255, dtype=np.uint8)
    >>> lay_over(tissue, np.array([[0.0, 1.0, -1.0]]), limit=1.0, alpha=1.0)[0].tolist()
    [[255, 255, 255], [177, 23, 42], [32, 101, 171]]
    """
    grey = np.asarray(tissue, dtype=np.float64)[..., :3].mean(axis=2, keepdims=True)
    grey = grey + LIGHT * (255 - grey)
    share = np.clip(np.asarray(values, dtype=np.float64) / limit, -1, 1)[..., None]
    colour = np.where(share > 0, STRONG[1], STRONG[0])
    mixed = grey + alpha * np.abs(share) * (colour - grey)
    return np.asarray(np.rint(mixed), dtype=np.uint8)


def half_level(values: npt.NDArray[Any]) -> float:
    """Find the level above which the largest values hold half of all above zero; infinite if none is.

    >>> half_level(np.array([[5.0, 3.0], [2.0, -9.0]])), half_level(np.array([[-1.0]]))
    (5.0, inf)
    """
    above = np.sort(values[values > 0])[::-1].astype(np.float64)
    if not len(above):
        return float("inf")
    sums = np.cumsum(above)
    return float(above[np.searchsorted(sums, OUTLINED * sums[-1])])


def _outline(axes: Any, values: npt.NDArray[Any], sign: int) -> None:
    """Draw a line, on a light rim, around the fewest places with half of the evidence of this sign."""
    height, width = values.shape
    at = (np.arange(width) + 0.5, np.arange(height) + 0.5)
    level, colour = half_level(sign * values), RED if sign > 0 else BLUE
    if float((sign * values).min()) < level < float((sign * values).max()):
        for ink, thick in (("white", 1.6), (colour, 0.8)):
            axes.contour(*at, sign * values, levels=[level], colors=[ink], linewidths=thick)


def write_inside_geojson(path: str | PathLike[str], inside: Inside, slide: Slide | None = None) -> None:
    """Write every place of every map as a tile with its value, in QuPath's frame."""
    cells = inside.cells().reshape(-1, 4)
    write_geojson(path, [_as_scores(inside)], origin=export_frame(cells, slide)[:2], boxes=cells)


def write_inside_tiff(path: str | PathLike[str], inside: Inside, slide: Slide | None = None) -> None:
    """Write the maps as an OME-TIFF in the slide's frame: float32, NaN outside these patches."""
    cells = inside.cells().reshape(-1, 4)
    pyramid = Pyramid.of(export_frame(cells, slide), mpp=None if slide is None else slide.mpp)
    write_scores(path, [_as_scores(inside)], pyramid, boxes=cells)


def _as_scores(inside: Inside) -> Explanation:
    values = inside.maps.astype(np.float32).ravel()
    target, logits = Target(inside.target), np.zeros(1, dtype=np.float32)
    return Explanation(values, logits, 0.0, f"inside-{inside.method}", target, True, bag=inside.bag)
