"""Painting patches against reading the slide's thumbnail, within one run on a real slide.

python -m benchmarks.paint [SLIDE]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from benchmarks.clock import seconds
from xmil.heatmaps import Canvas, Cells, Scale, blend
from xmil.slides import open_slide

PATCHES, LONGEST, REPEATS = 25_000, 4_096, 7
DATA = Path(os.environ.get("XMIL_DATA", Path(__file__).parents[2] / "shared" / "data"))
SLIDE = DATA / "slides" / "TCGA-CR-7395-01A-01-TS1.svs"


def patches(box: tuple[float, ...], *, overlap: float = 0.0, contours: int = 1) -> np.ndarray:
    """25,000 boxes or a few more: one grid, or several whose offsets differ, as contours give."""
    edge = (box[2] * box[3] / PATCHES) ** 0.5 / (1 - overlap)
    stride = edge * (1 - overlap)
    x, y = np.meshgrid(np.arange(np.ceil(box[2] / stride)), np.arange(np.ceil(box[3] / stride)))
    xy = np.stack([x.ravel(), y.ravel()], axis=1) * stride
    shifts = np.random.default_rng(0).uniform(0, stride / 2, size=(contours, 2))
    band = (xy[:, 1] * contours // box[3]).astype(int).clip(max=contours - 1)
    return np.concatenate([xy, xy + edge], axis=1) + np.tile(shifts[band] * (contours > 1), 2)


def paint(boxes: np.ndarray, scores: np.ndarray, canvas: Canvas) -> np.ndarray:
    """From boxes and scores to colours: rasterise, average, clip at the whiskers, colour."""
    cells = Cells.cut(boxes, canvas)
    return np.asarray(cells.expand(Scale.of(scores, signed=True).paint(cells.average(scores))))


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else SLIDE
    if not path.is_file():
        print(f"{path}: no such slide; set XMIL_DATA or name one")
        return
    with open_slide(path) as slide:
        box = (0, 0, *slide.dimensions)
        canvas = Canvas.fit(box, longest=LONGEST, enlarge=LONGEST / max(slide.dimensions))
        layouts = {
            "one grid": patches(box),
            "10 contours with offsets of their own": patches(box, contours=10),
            "half overlapping": patches(box, overlap=0.5),
        }
        scores = {name: np.random.default_rng(0).normal(size=len(boxes)) for name, boxes in layouts.items()}
        heat = paint(layouts["one grid"], scores["one grid"], canvas)
        calls = [lambda name=name: paint(layouts[name], scores[name], canvas) for name in layouts]
        thumbnail = slide.read_area(box, canvas.size)
        read, over, *times = seconds(
            lambda: slide.read_area(box, canvas.size),
            lambda: blend(thumbnail, heat, alpha=0.5),
            *calls,
            repeats=REPEATS,
        )
    print(f"{path.name}: thumbnail of {canvas.size[0]} x {canvas.size[1]} px read in {read:.3f} s")
    print("| painted onto the same canvas | patches | seconds | of the thumbnail's time |\n|---|---|---|---|")
    for (name, boxes), taken in zip(layouts.items(), times, strict=True):
        print(f"| {name} | {len(boxes):,} | {taken:.3f} | {taken / read:.2f} |")
    print(f"| (laying the colours over grey tissue) | | {over:.3f} | {over / read:.2f} |")


if __name__ == "__main__":
    main()
