"""Digits of a bag, coloured by their scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmil.core.explanation import Explanation
from xmil.evaluate.evidence import auprc2

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 10
TITLES = {"attention": "attention", "single": "single", "ig": "integrated gradients", "lrp": "xMIL-LRP"}
MODEL_TITLES = {"attnmil": "AttnMIL", "transmil": "TransMIL"}


def draw_panels(
    images: npt.NDArray[Any],
    evidence: npt.NDArray[Any],
    panels: dict[tuple[str, str], Explanation],
    path: Path,
) -> None:
    """One panel for the truth and one for each model and method."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(model for model, _ in panels))
    methods = list(dict.fromkeys(method for _, method in panels))
    figure = Figure(
        figsize=(3.1 * (1 + len(methods)), 1.2 * len(models) + 0.45), dpi=150, layout="constrained"
    )
    axes = figure.subplots(len(models), 1 + len(methods), squeeze=False)
    for row, model in enumerate(models):
        _draw(axes[row, 0], images, evidence / 1.0, signed=True, title="true evidence")
        axes[row, 0].set_ylabel(MODEL_TITLES.get(model, model), fontsize=11, fontweight="bold")
        for axis, method in zip(axes[row, 1:], methods, strict=True):
            e = panels[model, method]
            title = f"{TITLES.get(method, method)}   AUPRC-2 {auprc2(evidence, e.scores):.2f}"
            _draw(axis, images, e.scores, signed=e.signed, title=title)
    figure.suptitle(
        "Does this bag hold more kinds of 4, 6, 8 than of 5, 7, 9?   "
        "red: evidence for   blue: evidence against   purple: a score without a sign",
        fontsize=11,
    )
    figure.savefig(path)


def _draw(
    axis: Axes, images: npt.NDArray[Any], scores: npt.NDArray[Any], *, signed: bool, title: str
) -> None:
    axis.imshow(_coloured(images, scores, signed=signed), interpolation="nearest")
    axis.set_title(title, fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])
    for side in axis.spines.values():
        side.set_visible(False)


def _coloured(images: npt.NDArray[Any], scores: npt.NDArray[Any], *, signed: bool) -> npt.NDArray[np.float64]:
    """An RGB picture of the digits on tiles whose colour is the score, ink in black."""
    from matplotlib import colormaps

    if signed:
        limit = np.abs(scores).max() or 1.0
        tiles = colormaps["RdBu_r"](0.5 + 0.38 * scores / limit)[:, :3]
    else:
        low, span = scores.min(), np.ptp(scores) or 1.0
        tiles = colormaps["Purples"](0.7 * (scores - low) / span)[:, :3]
    ink = np.pad(images / 16.0, ((0, 0), (1, 1), (1, 1)))[..., None]
    cells = tiles[:, None, None, :] * (1 - 0.92 * ink)
    cells = np.pad(cells, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=1.0)
    rows = [np.concatenate(cells[i : i + COLUMNS], axis=1) for i in range(0, len(cells), COLUMNS)]
    return np.concatenate(rows, axis=0)
