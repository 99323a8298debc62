"""Digits of a bag as tiles, coloured by their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 10
LEGEND = ("red: evidence for", "blue: evidence against", "purple: a score without a sign")
NARROW = 3  # columns: what a title on one line needs
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Panel:
    """Images (n, h, w) of a bag's digits, their scores (n,), and what stands above them."""

    images: Array
    scores: Array
    signed: bool
    title: str


def draw_grid(panels: Mapping[tuple[str, str], Panel], path: Path, *, title: Sequence[str]) -> None:
    """A picture of panels by row and column; rows carry their names, phrases of the title stand on top."""
    from matplotlib.figure import Figure

    rows, columns = (list(dict.fromkeys(key[side] for key in panels)) for side in (0, 1))
    lines = len(title) if len(columns) < NARROW else 1
    deep = max(-(-len(panel.scores) // COLUMNS) for panel in panels.values())
    size = (3.1 * len(columns) + 0.3, (0.3 * deep + 0.3) * len(rows) + 0.2 * lines + 0.25)
    figure = Figure(figsize=size, dpi=150)
    figure.set_layout_engine("constrained", w_pad=0.08)
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for i, row in enumerate(rows):
        for axis, column in zip(axes[i], columns, strict=True):
            _draw(axis, panels.get((row, column)))
        axes[i, 0].set_ylabel(row, fontsize=10, fontweight="bold")
    figure.suptitle(("\n" if lines > 1 else "   ").join(title), fontsize=10 if lines > 1 else 11)
    figure.savefig(path)


def _draw(axis: Axes, panel: Panel | None) -> None:
    axis.set_xticks([])
    axis.set_yticks([])
    for side in axis.spines.values():
        side.set_visible(False)
    if panel is None:
        axis.text(0.5, 0.5, "not for this model", ha="center", va="center", color="0.5", fontsize=8)
        return
    axis.imshow(coloured(panel.images, panel.scores, signed=panel.signed), interpolation="nearest")
    axis.set_title(panel.title, fontsize=9)


def coloured(images: Array, scores: Array, *, signed: bool) -> npt.NDArray[np.float64]:
    """An RGB picture of the digits on tiles whose colour is the score, ink in black."""
    tiles = _colours(scores, signed=signed)
    ink = np.pad(images / (images.max() or 1), ((0, 0), (1, 1), (1, 1)))[..., None]
    cells = tiles[:, None, None, :] * (1 - 0.92 * ink)
    cells = np.pad(cells, ((0, -len(cells) % COLUMNS), (0, 1), (0, 1), (0, 0)), constant_values=1.0)
    rows = [np.concatenate(cells[i : i + COLUMNS], axis=1) for i in range(0, len(cells), COLUMNS)]
    return np.concatenate(rows, axis=0)


def _colours(scores: Array, *, signed: bool) -> npt.NDArray[np.float64]:
    """RGB (n, 3): red and blue around zero, or purple from the lowest to the highest."""
    from matplotlib import colormaps

    if signed:
        limit = np.abs(scores).max() or 1.0
        return np.asarray(colormaps["RdBu_r"](0.5 + 0.38 * scores / limit))[:, :3]
    low, span = scores.min(), np.ptp(scores) or 1.0
    return np.asarray(colormaps["Purples"](0.7 * (scores - low) / span))[:, :3]
