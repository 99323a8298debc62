"""Explanations on a canvas: where their patches lie, their scales, their colours over the slide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xmil.core.bag import IntArray
from xmil.core.errors import InputError, bad_parameter, unknown_name
from xmil.core.explanation import Explanation
from xmil.slides.colours import Pixels, Scale
from xmil.slides.raster import Box, Canvas, Cells

if TYPE_CHECKING:
    from PIL.Image import Image

    from xmil.slides.slide import Slide

FITS = 0.95  # share of the patches on the slide below which there is a word about it
TISSUES = ("grey", "colour")  # how the slide looks under the colours


def place_on(
    explanation: Explanation,
    slide: Slide | None = None,
    *,
    mpp: float | None = None,
    patch_size: int | None = None,
) -> Explanation:
    """The explanation with level-0 boxes, worked out with the slide's mpp where they still wait for it."""
    scale = mpp if mpp is not None else (None if slide is None else slide.mpp)
    waits = explanation.coords is None and explanation.raw_coords is not None
    if waits or patch_size is not None:
        return explanation.placed(mpp=scale, patch_size=patch_size)
    return explanation if explanation.mpp or scale is None else explanation.placed(mpp=scale)


def check_fit(boxes: IntArray, slide: Slide, size: tuple[int, int] | None = None) -> str | None:
    """Refuse a slide that is not the explained one, and say where some of the patches lie off it.

    It is another one if level 0 was of another `size` when the features were made, or if most of the
    patches' centres lie off the slide.
    """
    width, height = slide.dimensions
    if size is not None and size != (width, height):
        raise InputError(
            f"{slide.path}: has {width} x {height} px; the explained slide has {size[0]} x {size[1]}."
        )
    x, y = (boxes[:, :2] + boxes[:, 2:]).T / 2
    inside = int(((x >= 0) & (y >= 0) & (x < width) & (y < height)).sum())
    lie = f"{slide.path}: {inside} of {len(boxes)} patches lie on this slide of {width} x {height} px; "
    if 2 * inside < len(boxes):
        raise InputError(
            lie + "it is not the slide that was explained, or the coordinates are of another resolution."
        )
    return lie + "check that it is the one that was explained." if inside < FITS * len(boxes) else None


def whole_box(boxes: IntArray, slide: Slide | None) -> Box:
    """The level-0 box of a picture: the scanned area, or without a slide the patches and a margin."""
    if slide is not None:
        return slide.bounds
    if not len(boxes):
        raise InputError("There are no patches to draw.")
    low, high = boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)
    margin = int(boxes[0, 2] - boxes[0, 0]) // 2
    x, y = (low - margin).tolist()
    width, height = (high - low + 2 * margin).tolist()
    return x, y, width, height


@dataclass(frozen=True, eq=False)
class View:
    """A canvas with the slide below it, where there is one, and the cells of the patches on it."""

    canvas: Canvas
    cells: Cells
    background: Pixels | None = None

    @classmethod
    def of(
        cls, boxes: IntArray, box: Box, *, slide: Slide | None, longest: int, enlarge: float = 1.0
    ) -> View:
        """Look at a level-0 box with at most `longest` pixels on the longer edge."""
        canvas = Canvas.fit(box, longest=longest, enlarge=enlarge)
        background = None if slide is None else slide.read_area(box, canvas.size)
        return cls(canvas, Cells.cut(boxes, canvas), background)

    def heat(self, explanation: Explanation, scale: Scale) -> Pixels:
        """The scores' colours (h, w, 4); transparent where there is no patch."""
        return np.asarray(self.cells.expand(scale.paint(self.cells.average(explanation.scores))))

    def overlay(
        self, explanation: Explanation, scale: Scale, *, alpha: float, tissue: str = "grey"
    ) -> Pixels:
        """The colours over the slide, or at full strength over white without one; RGB."""
        heat = self.heat(explanation, scale)
        if self.background is None:
            return blend(None, heat, alpha=1.0)
        return blend(self.background, heat, alpha=alpha, tissue=tissue)


def blend(background: Pixels | None, heat: Pixels, *, alpha: float, tissue: str = "grey") -> Pixels:
    """RGBA colours over an RGB picture, or white, with their alpha times `alpha`.

    The tissue is grey by default: pink tissue makes a score of zero look red, and beside the colours it would
    pass for evidence.
    """
    if not 0 <= alpha <= 1:
        raise bad_parameter("alpha", "heatmap", "in the range [0, 1]", alpha)
    if tissue not in TISSUES:
        raise unknown_name("tissue", tissue, TISSUES)
    from PIL import Image

    colours = Image.fromarray(heat)
    painted = colours.getchannel("A")
    under = Image.new("RGB", colours.size, "white") if background is None else Image.fromarray(background)
    if tissue == "grey":
        under = under.convert("L").convert("RGB")
    under.paste(colours.convert("RGB"), mask=painted.point([round(value * alpha) for value in range(256)]))
    return np.asarray(under)


def as_image(pixels: Pixels) -> Image:
    """A picture for Pillow, RGB or RGBA."""
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels))


def same_places(explanations: Sequence[Explanation]) -> IntArray:
    """The boxes that all the explanations share; an error where they differ."""
    boxes = explanations[0].boxes()
    for other in explanations[1:]:
        if not np.array_equal(other.boxes(), boxes):
            raise InputError(
                f"{other} and {explanations[0]} have patches at different places; draw them one by one."
            )
    return boxes
