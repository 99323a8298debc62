"""A picture of what was tiled: the slide, the outline of its tissue, the grid of its patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xmil.slides.outline import outlines
from xmil.slides.slide import resize
from xmil.slides.tiling import Tiling

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

LONGEST = 1800  # pixels
OUTLINE, GRID, TEXT = (0, 140, 60), (30, 60, 200), (20, 20, 20)
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
    return page


def _draw_grid(draw: object, tiling: Tiling, size: tuple[int, int]) -> None:
    fx, fy = size[0] / tiling.dimensions[0], size[1] / tiling.dimensions[1]
    for x, y in tiling.xy0.tolist():
        box = [x * fx, y * fy, (x + tiling.edge0) * fx - 1, (y + tiling.edge0) * fy - 1]
        box[2], box[3] = max(box[0], box[2]), max(box[1], box[3])
        draw.rectangle(box, fill=(*GRID, 28), outline=(*GRID, 200))  # type: ignore[attr-defined]


def _draw_outlines(draw: object, tiling: Tiling, size: tuple[int, int]) -> None:
    fx, fy = size[0] / tiling.dimensions[0], size[1] / tiling.dimensions[1]
    for rings in outlines(tiling.tissue):
        for ring in rings:
            points = [(x * fx, y * fy) for x, y in ring.tolist()]
            draw.line(points, fill=OUTLINE, width=2, joint="curve")  # type: ignore[attr-defined]


def _caption(tiling: Tiling) -> str:
    microns = tiling.edge0 * tiling.mpp
    return (
        f"{tiling.slide_id}   {len(tiling.xy0):,} patches of {tiling.settings.size} px at "
        f"{microns / tiling.settings.size:.3g} µm/px   tissue {tiling.tissue.share:.0%} of the slide"
    )


def _font(size: int) -> FreeTypeFont:
    """DejaVu, which matplotlib brings: it has the letter µ."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", size)
