"""Boxes onto a canvas of pixels, without a loop over patches.

The pixel edges of all boxes cut the canvas into few cells, a grid of patches into about as many as there are
patches. Sums over boxes are two-dimensional prefix sums over the cells; a picture is the cells, repeated.
Scores are averaged and coloured cell by cell, so the work hardly grows with the canvas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import IntArray
from xmil.core.errors import InputError, bad_parameter, check_names
from xmil.core.explanation import Explanation
from xmil.heatmaps.style import Pixels, Scale
from xmil.slides.slide import Box, Slide

Ints = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]

FITS = 0.95  # warn if a smaller share of the patches is on the slide
HATCH = (60, 60, 60, 255)  # of patches with an uncertain sign
TISSUES = ("grey", "colour")  # how the slide looks under the colours


@dataclass(frozen=True)
class Canvas:
    """A picture of `size` (width, height) pixels of a level-0 `box` (x, y, width, height).

    >>> Canvas.fit((0, 0, 40_000, 20_000), longest=1000)
    Canvas(box=(0, 0, 40000, 20000), size=(1000, 500))
    """

    box: Box
    size: tuple[int, int]

    def __post_init__(self) -> None:
        if not (min(self.box[2:]) > 0 and min(self.size) > 0):
            raise InputError(f"A picture must have an area. Got box {self.box} and size {self.size} instead.")

    @classmethod
    def fit(cls, box: Box, *, longest: int, enlarge: float = 1.0) -> Canvas:
        """Make the canvas whose longer edge has `longest` pixels, at most `enlarge` for each of level 0."""
        if longest < 1:
            raise bad_parameter("longest", "Canvas.fit", "an int in the range [1, inf)", longest)
        scale = min(enlarge, longest / max(box[2:]))
        return cls(box, (max(1, round(box[2] * scale)), max(1, round(box[3] * scale))))

    @property
    def downsample(self) -> tuple[float, float]:
        """Level-0 pixels per pixel, across and down."""
        return self.box[2] / self.size[0], self.box[3] / self.size[1]

    def strips(self, rows: int) -> Iterator[tuple[int, Canvas]]:
        """Cut the canvas into strips of `rows` pixel rows; yield each with its first row."""
        width, height = self.size
        x, y, wide, _ = self.box
        step = self.downsample[1]
        for top in range(0, height, rows):
            high = min(rows, height - top)
            yield top, Canvas((x, y + top * step, wide, high * step), (width, high))

    def pixels(self, boxes: npt.ArrayLike) -> Ints:
        """Take boxes x0, y0, x1, y1 from level 0 to this canvas: the pixels whose centre lies within.

        Neighbours share an edge and no pixel. A box smaller than a pixel takes the one its centre lies in.
        """
        corners = np.asarray(boxes, dtype=np.float64).reshape(-1, 2, 2)
        places = (corners - self.box[:2]) / self.downsample
        low, high = np.ceil(places - 0.5).astype(np.intp).transpose(1, 0, 2)
        small = high <= low
        low = np.where(small, np.floor(places.mean(axis=1)).astype(np.intp), low)
        high = np.where(small, low + 1, high)
        return np.concatenate([low, high], axis=1)


@dataclass(frozen=True, eq=False)
class Cells:
    """A canvas cut along the edges of boxes: how many boxes cover each cell, and which if it is one."""

    rows: Ints  # (height,): the cell row of each pixel row
    columns: Ints  # (width,)
    spans: Ints  # (n, 4): x0, y0, x1, y1 of each box, in cells
    counts: Ints  # (r, c)
    owners: Ints  # (r, c): the box, where the count is one

    @classmethod
    def cut(cls, boxes: npt.ArrayLike, canvas: Canvas) -> Cells:
        """Cut a canvas along level-0 boxes (n, 4); leave out what lies outside."""
        width, height = canvas.size
        inside = np.clip(canvas.pixels(boxes), 0, [width, height, width, height])
        x_edges = np.unique(np.concatenate([[0, width], inside[:, 0], inside[:, 2]]))
        y_edges = np.unique(np.concatenate([[0, height], inside[:, 1], inside[:, 3]]))
        spans = np.empty_like(inside)
        spans[:, 0::2] = np.searchsorted(x_edges, inside[:, 0::2])
        spans[:, 1::2] = np.searchsorted(y_edges, inside[:, 1::2])
        shape = (len(y_edges) - 1, len(x_edges) - 1)
        # Sums of integers below 2^53 are exact, whatever the order.
        counts = _sums(spans, np.ones(len(spans)), shape).astype(np.intp)
        owners = _sums(spans, np.arange(len(spans), dtype=np.float64), shape).astype(np.intp)
        rows = np.repeat(np.arange(shape[0]), np.diff(y_edges))
        columns = np.repeat(np.arange(shape[1]), np.diff(x_edges))
        return cls(rows, columns, spans, counts, owners)

    def average(self, scores: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Average the scores of the boxes over each cell (r, c); NaN where there is none."""
        values = np.asarray(scores, dtype=np.float64)
        table = np.append(values, np.nan).astype(np.float32)
        means = table[np.where(self.counts == 1, self.owners, len(values))]
        several = self.counts > 1
        if several.any():
            sums = _sums(self.spans, values, self.counts.shape)
            means[several] = sums[several] / self.counts[several]
        return means

    def expand(self, cells: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Paint the picture (height, width, ...) of one value, or one colour, for each cell."""
        is_rgba = cells.dtype == np.uint8 and cells.ndim == 3 and cells.shape[-1] == 4
        packed = cells.view(np.uint32)[..., 0] if is_rgba else cells  # four bytes move as one number
        picture = packed.take(self.columns, axis=1).take(self.rows, axis=0)
        return picture[..., None].view(np.uint8) if is_rgba else picture


def _sums(spans: Ints, values: Floats, shape: tuple[int, ...]) -> Floats:
    """Sum over each cell the values of the boxes that cover it, by prefix sums over their corners."""
    rows, columns = shape[0] + 1, shape[1] + 1
    x0, y0, x1, y1 = spans.T
    corners = np.concatenate([y0 * columns + x0, y1 * columns + x1, y0 * columns + x1, y1 * columns + x0])
    weights = np.concatenate([values, values, -values, -values])
    steps = np.bincount(corners, weights=weights, minlength=rows * columns).reshape(rows, columns)
    np.cumsum(steps, axis=0, out=steps)
    np.cumsum(steps, axis=1, out=steps)
    return np.asarray(steps[:-1, :-1])


def opened(slide: Slide | str | PathLike[str] | None, mpp: float | None = None) -> Any:
    """Open the slide at a path for a `with` block; an open slide stays open, and None stays None."""
    if not isinstance(slide, str | PathLike):
        return nullcontext(slide)
    from xmil.slides.open import open_slide

    return open_slide(slide, mpp)


def place_on(
    explanation: Explanation,
    slide: Slide | None = None,
    *,
    mpp: float | None = None,
    patch_size: int | None = None,
) -> Explanation:
    """Place the explanation in level-0 boxes, with the slide's mpp if they need it."""
    scale = mpp if mpp is not None else (None if slide is None else slide.mpp)
    waits = explanation.coords is None and explanation.raw_coords is not None
    if waits or patch_size is not None:
        return explanation.placed(mpp=scale, patch_size=patch_size)
    return explanation if explanation.mpp or scale is None else explanation.placed(mpp=scale)


def check_fit(boxes: IntArray, slide: Slide, size: tuple[int, int] | None = None) -> str | None:
    """Refuse a slide that is not the explained one; return a warning if some patches lie off it.

    It is another one if level 0 was of another `size` when the features were made, or if most of the
    patches' centres lie off the slide.
    """
    width, height = slide.dimensions
    if size is not None and size != (width, height):
        raise InputError(
            f"{slide.path}: has {width} x {height} px; the explained slide has {size[0]} x {size[1]}."
        )
    inside = count_on(boxes, slide.dimensions)
    lie = f"{slide.path}: {inside} of {len(boxes)} patches lie on this slide of {width} x {height} px; "
    if 2 * inside < len(boxes):
        raise InputError(
            lie + "it is not the slide that was explained, or the coordinates are of another resolution."
        )
    return lie + "check that it is the one that was explained." if inside < FITS * len(boxes) else None


def count_on(boxes: IntArray, size: tuple[int, int]) -> int:
    """Count the boxes whose centre lies on a slide of this size."""
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    return int(((centres >= 0) & (centres < size)).all(axis=1).sum())


def picture_box(boxes: IntArray, slide: Slide | None) -> Box:
    """Find the level-0 box of a picture: the scanned area, or without a slide the patches and a margin."""
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
    """A canvas with the slide below it, if there is one, and the cells of the patches on it."""

    canvas: Canvas
    cells: Cells
    background: Pixels | None = None

    @classmethod
    def of(
        cls, boxes: IntArray, box: Box, *, slide: Slide | None, longest: int, enlarge: float = 1.0
    ) -> View:
        """Make the view of a level-0 box with at most `longest` pixels on the longer edge."""
        canvas = Canvas.fit(box, longest=longest, enlarge=enlarge)
        background = None if slide is None else slide.read_area(box, canvas.size)
        return cls(canvas, Cells.cut(boxes, canvas), background)

    def heat(self, explanation: Explanation, scale: Scale) -> Pixels:
        """Colour the scores (h, w, 4), hatched where a sign is not sure; transparent without a patch."""
        colours: Pixels = self.cells.expand(scale.paint(self.cells.average(explanation.scores)))
        if explanation.stable is None or explanation.stable.all():
            return colours
        unsure = self.cells.expand(self.cells.average(~explanation.stable)) > 0.5  # NaN is not
        boxes = explanation.boxes()
        wide = float(np.median(boxes[:, 2] - boxes[:, 0])) / self.canvas.downsample[0]
        # Dark diagonal lines, about four per patch, and never so fine that they fill it.
        period, (height, width) = int(np.clip(round(wide / 4), 4, 16)), unsure.shape
        lines = (np.arange(height)[:, None] + np.arange(width)) % period < max(1, period // 5)
        colours[unsure & lines] = HATCH
        return colours

    def overlay(
        self, explanation: Explanation, scale: Scale, *, alpha: float, tissue: str = "grey"
    ) -> Pixels:
        """Lay the colours over the slide, or at full strength over white without one; RGB."""
        heat, under = self.heat(explanation, scale), self.background
        return blend(under, heat, alpha=1.0 if under is None else alpha, tissue=tissue)


def blend(background: Pixels | None, heat: Pixels, *, alpha: float, tissue: str = "grey") -> Pixels:
    """Lay RGBA colours over an RGB picture, or white, with their alpha times `alpha`.

    The tissue is grey by default: pink tissue makes a score of zero look red, and beside the colours it would
    pass for evidence.
    """
    if not 0 <= alpha <= 1:
        raise bad_parameter("alpha", "heatmap", "in the range [0, 1]", alpha)
    check_names("tissue", [tissue], TISSUES)
    from PIL import Image

    colours = Image.fromarray(heat)
    painted = colours.getchannel("A")
    under = Image.new("RGB", colours.size, "white") if background is None else Image.fromarray(background)
    if tissue == "grey":
        under = under.convert("L").convert("RGB")
    under.paste(colours.convert("RGB"), mask=painted.point([round(value * alpha) for value in range(256)]))
    return np.asarray(under)


def same_places(explanations: Sequence[Explanation]) -> IntArray:
    """Return the boxes that all the explanations share; refuse other boxes or bags."""
    boxes = explanations[0].boxes()
    bags = sorted({e.bag for e in explanations if e.bag is not None})
    if len(bags) > 1:
        raise InputError(f"The explanations are of different bags ({', '.join(bags)}); draw them one by one.")
    for other in explanations[1:]:
        if not np.array_equal(other.boxes(), boxes):
            raise InputError(
                f"{other} and {explanations[0]} have patches at different places; draw them one by one."
            )
    return boxes
