"""Sheets of the patches that count most: cut from the slide, framed in their colour, with their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from xmil.core.bag import IntArray
from xmil.core.explanation import Explanation
from xmil.heatmaps.panel import BLUE, GREY, INK, RED, Heading, Picture, Sheet
from xmil.heatmaps.scale import Pixels, Scale
from xmil.heatmaps.words import digits_for, ends, explained, number, subtitle, title

if TYPE_CHECKING:
    from xmil.slides.slide import Slide

ACROSS = 8  # patches in a row
FRAME = 5  # pixels of colour around a patch


def extremes(explanation: Explanation, top: int) -> tuple[list[int], list[int]]:
    """The patches with the highest and the lowest scores, strongest first, equal ones in the bag's order.

    Of signed scores the highest are those above zero and the lowest those below: a patch that supports the
    class is never shown as evidence against it.
    """
    scores = explanation.scores
    down = np.argsort(-scores, kind="stable")
    up = np.argsort(scores, kind="stable")
    if explanation.signed:
        down, up = down[scores[down] > 0], up[scores[up] < 0]
        return down[:top].tolist(), up[:top].tolist()
    high = down[:top].tolist()
    return high, [i for i in up.tolist() if i not in set(high)][:top]


def draw_sheet(
    explanation: Explanation,
    slide: Slide,
    scale: Scale,
    *,
    heading: Heading,
    top: int = 8,
    edge: int = 224,
    task: str = "classification",
) -> Picture:
    """The `top` highest and lowest patches, cut from the slide at `edge` pixels."""
    boxes = explanation.boxes()
    sheet = Sheet(max(13.0, edge / 13))
    sheet.open([edge + 2 * FRAME] * min(ACROSS, max(top, 3)))
    sheet.heading(heading)
    inner = sheet.width - 2 * sheet.left[0]
    sheet.line(f"{title(explanation)} {subtitle(explanation, task)}", 1.15, x=sheet.left[0], width=inner)
    groups = extremes(explanation, top)
    for (words, none, colour), rows in zip(_headings(explanation, task), groups, strict=True):
        sheet.line(words if rows else none, 1.0, x=sheet.left[0], width=inner, color=colour, weight="bold")
        _patches(sheet, rows, explanation, boxes, slide=slide, scale=scale, edge=edge)
    return sheet.close()


def cut_patch(slide: Slide, box: Sequence[int], edge: int) -> Pixels:
    """A patch's pixels from the slide."""
    x0, y0, x1, y1 = (int(value) for value in box)
    return slide.read_area((x0, y0, x1 - x0, y1 - y0), (edge, edge))


def _headings(explanation: Explanation, task: str) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    """Words, words for none, colour: of the highest and of the lowest patches."""
    low, high = ends(explanation, task)
    if not explanation.signed:
        noun = high.removeprefix("high ")
        return (f"highest {noun}", "no patches", INK), (f"lowest {noun}", "no further patches", GREY)
    what = explained(explanation)
    return (
        (f"{high}: highest scores", f"no patch with a positive score for {what}", RED),
        (f"{low}: lowest scores", f"no patch with a negative score for {what}", BLUE),
    )


def _patches(
    sheet: Sheet,
    rows: Sequence[int],
    explanation: Explanation,
    boxes: IntArray,
    *,
    slide: Slide,
    scale: Scale,
    edge: int,
) -> None:
    height = edge + 2 * FRAME
    for start in range(0, len(rows), len(sheet.left)):
        for x, i in zip(sheet.left, rows[start : start + len(sheet.left)], strict=False):
            score = explanation.scores[i]
            framed = np.empty((height, height, 3), dtype=np.uint8)
            framed[:] = scale.paint(np.asarray([score]))[0, :3]
            framed[FRAME:-FRAME, FRAME:-FRAME] = cut_patch(slide, boxes[i], edge)
            sheet.image(framed, x, sheet.y)
            below, wide = sheet.y + height + round(0.3 * sheet.unit), height
            shown = number(float(score), digits_for(scale.low, scale.high))
            sheet.text(shown, 1.0, x + wide / 2, below, width=wide, ha="center")
            place = f"x {boxes[i][0]:,}   y {boxes[i][1]:,}"
            below += round(1.3 * sheet.unit)
            sheet.text(place, 0.75, x + wide / 2, below, width=wide, ha="center", color=GREY)
        sheet.y += height + round(3.2 * sheet.unit)
