"""Digits of a bag, coloured by the scores of several models and methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt

from xmil.core.explanation import Explanation
from xmil.evaluate.evidence import auprc2
from xmil.study.tiles import LEGEND, Panel, draw_grid

TITLES = {"attention": "attention", "single": "single", "ig": "integrated gradients", "lrp": "xMIL-LRP"}
MODEL_TITLES = {"attnmil": "AttnMIL", "transmil": "TransMIL"}
QUESTION = "Does this bag hold more kinds of 4, 6, 8 than of 5, 7, 9?"


def draw_panels(
    images: npt.NDArray[Any],
    evidence: npt.NDArray[Any],
    panels: dict[tuple[str, str], Explanation],
    path: Path,
) -> None:
    """One panel for the truth and one for each model and method."""
    grid: dict[tuple[str, str], Panel] = {}
    for (model, method), e in panels.items():
        row = MODEL_TITLES.get(model, model)
        grid.setdefault((row, "truth"), Panel(images, evidence, True, "true evidence"))
        title = f"{TITLES.get(method, method)}   AUPRC-2 {auprc2(evidence, e.scores):.2f}"
        grid[row, method] = Panel(images, e.scores, e.signed, title)
    draw_grid(grid, path, title=[QUESTION, *LEGEND])
