"""A digit slide under several methods: each tile in the colour of its score, the true evidence marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmil.core.method_cards import card_of
from xmil.demo.digit_slides import TILE, DigitSlide, draw_slide

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCALE = 4  # pixels of the slide to one of the picture
STRENGTH = 0.72  # of the colour over the slide
MARKS = {1: "+", -1: "\N{MINUS SIGN}"}
LEGEND = (
    "red: evidence for the class, blue: against it; purple: a score without a sign. "
    f"Marks: {MARKS[1]} truly speaks for it, {MARKS[-1]} truly against it"
)
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SlidePanel:
    """Scores (n,) of a slide's tiles, and what stands above them; None shows the slide as it is."""

    title: str
    scores: Array | None = None
    signed: bool = True


def draw_panels(
    slide: DigitSlide,
    truth: Array,
    panels: Sequence[SlidePanel],
    path: Path,
    *,
    title: str,
    columns: int = 6,
    legend: str = LEGEND,
) -> None:
    """A picture with one panel for each set of scores."""
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.35 * columns, 2.25 * rows + 0.75), dpi=130)
    figure.set_layout_engine("constrained")
    image, origin = _cropped(slide)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.axis("off")
    for axis, panel in zip(axes, panels, strict=False):
        _draw(axis, panel, image, slide.coords - origin, truth)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.supxlabel(legend, fontsize=9)
    figure.savefig(path)


def method_title(method: str, quality: float) -> str:
    """A method's name and how well it ranks the evidence of this slide."""
    return f"{card_of(method).title}  {quality:.2f}"


def colours(scores: Array, *, signed: bool) -> npt.NDArray[np.float64]:
    """RGB (n, 3): red and blue around zero, or purple from the lowest to the highest."""
    from matplotlib import colormaps

    if signed:
        limit = np.abs(scores).max() or 1.0
        return np.asarray(colormaps["RdBu_r"](0.5 + 0.45 * scores / limit))[:, :3]
    low, span = scores.min(), np.ptp(scores) or 1.0
    return np.asarray(colormaps["Purples"](0.85 * (scores - low) / span))[:, :3]


def _cropped(slide: DigitSlide) -> tuple[Array, Array]:
    """The slide's tissue with a thin rim of glass, in [0, 1], and where it lies on the slide."""
    low = slide.coords.min(axis=0) - TILE // 8
    high = slide.coords.max(axis=0) + TILE + TILE // 8
    image = draw_slide(slide)[low[1] : high[1], low[0] : high[0]]
    return image[::SCALE, ::SCALE].astype(np.float64) / 255, low


def _draw(axis: Axes, panel: SlidePanel, image: Array, corners: Array, truth: Array) -> None:
    shown = image.copy()
    if panel.scores is not None:
        for (x, y), colour in zip(corners // SCALE, colours(panel.scores, signed=panel.signed), strict=True):
            area = shown[y : y + TILE // SCALE, x : x + TILE // SCALE]
            darkness = 1 - area.mean(axis=-1, keepdims=True)  # ink stays ink
            area[:] = (1 - STRENGTH) * area + STRENGTH * colour * np.clip(1.35 - 1.1 * darkness, 0, 1)
    axis.imshow(np.clip(shown, 0, 1))
    axis.set_title(panel.title, fontsize=9.5)
    for (x, y), sign in zip(corners / SCALE, truth, strict=True):
        if sign:
            _mark(axis, x + 0.17 * TILE / SCALE, y + 0.17 * TILE / SCALE, MARKS[int(sign)])


def _mark(axis: Axes, x: float, y: float, sign: str) -> None:
    box = {"boxstyle": "circle,pad=0.12", "facecolor": "white", "edgecolor": "black", "linewidth": 0.5}
    axis.text(x, y, sign, ha="center", va="center", fontsize=6, fontweight="bold", bbox=box)
