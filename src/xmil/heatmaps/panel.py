"""Figures laid out in pixels: pictures in columns, each with title and colour bar, under one heading.

A pixel of a picture is a pixel of the figure. Text is measured and made to fit its column: nothing overlaps.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path

from xmil.core.durable import write_atomically
from xmil.core.errors import check_names
from xmil.core.explanation import Explanation
from xmil.heatmaps.style import BLUE, RED, STEPS, Pixels, Scale, drawable, families, letter_figure
from xmil.heatmaps.words import digits_for, ends, explained, number, subtitle, title
from xmil.slides.slide import Box, Slide

DPI = 200
FORMATS = ("png", "pdf", "svg")
GREY, INK = "#555555", "#111111"
WARNING = "#8F3A00"  # as in the viewer
SMALLEST = 0.62  # share of the requested size; text that still does not fit is truncated
NARROWEST = 30  # units that a column's words need
EDGE, ACROSS, FRAME = 224, 8, 5  # pixels of a patch, patches in a row, pixels of colour around each
WIDEST = 6600  # pixels of a panel; more columns go into further rows


class Picture(Figure):
    """A figure that shows itself in a notebook, and is written completely or not at all."""

    def write(self, path: str | PathLike[str], format: str | None = None) -> None:  # noqa: A002  # savefig's word
        """Write as PNG, PDF or SVG, by the path's suffix or `format`."""
        kind = (format or Path(path).suffix.lstrip(".")).lower()
        check_names("picture format", [kind], FORMATS)
        about = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)  # same input, same file
        write_atomically(path, lambda part: self.savefig(part, format=kind, dpi=DPI, metadata=about))

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """Save as matplotlib does; spell letters that no font has."""
        letter_figure(self)
        super().savefig(*args, **kwargs)

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.savefig(png, format="png", dpi=DPI)
        return png.getvalue()


@dataclass(frozen=True, eq=False)
class Lines:
    """Segments (k, 4) in pixels of a picture, each with a colour and a width of its own, in text sizes."""

    segments: npt.NDArray[np.float64]
    colours: Sequence[str]
    widths: npt.NDArray[np.float64]


@dataclass(frozen=True)
class PanelColumn:
    """Pictures below each other (slide, zoomed region) with a title and the scale of their colours."""

    title: str
    subtitle: str
    images: tuple[npt.NDArray[np.uint8], ...]
    scale: Scale | None = None
    ends: tuple[str, str] = ("", "")
    lines: tuple[Lines, ...] = ()  # over each of the images
    note: str = ""  # a warning below the colour bar
    verdict: str = ""  # what tests say of this map


@dataclass(frozen=True)
class Ruler:
    """A bar of known length on a picture: its pixels and its name."""

    pixels: float
    name: str

    @classmethod
    def fit(cls, width: int, microns: float | None) -> Ruler | None:
        """Fit the longest round length within a quarter of the picture; None without microns per pixel.

        >>> Ruler.fit(1000, 4.0)
        Ruler(pixels=250.0, name='1 mm')
        """
        if not microns:
            return None
        most = width * microns / 4
        power = 10.0 ** np.floor(np.log10(most))
        length = float(max(step * power for step in (1, 2, 5) if step * power <= most * (1 + 1e-9)))
        name = f"{length / 1000:g} mm" if length >= 1000 else f"{length:g} µm"
        return cls(length / microns, name)


@dataclass(frozen=True)
class Heading:
    """The lines above a panel: the slide's name, facts about it, and warnings."""

    name: str
    facts: str = ""
    warnings: tuple[str, ...] = ()


def draw_panel(
    columns: Sequence[PanelColumn],
    *,
    heading: Heading,
    rulers: Sequence[Ruler | None] = (),
    mark: Box | None = None,
    across: int = 5,
) -> Picture:
    """Draw columns side by side, `across` of them in a row; `mark` frames a region in the first pictures."""
    images = [image for column in columns for image in column.images]
    longest = max(max(image.shape[:2]) for image in images)
    unit = float(max(13, longest / (44 if len(columns) < 3 else 36)))  # text grows with the pictures
    words = max(round((NARROWEST if column.scale else 18) * unit * 0.7) for column in columns)
    wide = max(words, *(int(image.shape[1]) for image in images))
    across = min(across, max(1, int(WIDEST // (wide + 1.6 * unit))))
    sheet = Sheet(unit, [wide] * min(across, len(columns)), heading)
    for i in range(0, len(columns), across):
        sheet.block(columns[i : i + across], rulers=rulers, mark=mark)
    return sheet.close()


class Sheet:
    """A figure that grows downwards below its heading; places are pixels from its upper left corner."""

    def __init__(self, unit: float, widths: Sequence[int], heading: Heading) -> None:
        gap, edge = round(1.6 * unit), round(1.4 * unit)
        self.unit, self.y, self.widths = unit, round(1.2 * unit), widths
        self.left = [edge + sum(widths[:i]) + gap * i for i in range(len(widths))]
        self.centre = [left + width / 2 for left, width in zip(self.left, widths, strict=True)]
        self.width = self.left[-1] + widths[-1] + edge
        self.figure = Picture(figsize=(1, 1), dpi=DPI, facecolor="white")
        self.placed: list[tuple[Any, tuple[float, float, float, float]]] = []
        self.texts: list[tuple[Any, float, float]] = []
        if heading.name:
            self.line(heading.name, 1.35, weight="bold")
        if heading.facts:
            self.line(heading.facts, 1.0, color=GREY)
        for text in heading.warnings:
            for part in wrap(f"warning: {text}", max(20, int((self.width - 2 * edge) / (0.5 * unit)))):
                self.line(part, 0.85, color=WARNING)
        self.y += round(0.4 * unit)

    def line(self, text: str, size: float, **look: Any) -> None:
        """Write one line of text across the sheet, then move below it."""
        left = self.left[0]
        self.text(text, size, left, self.y, width=self.width - 2 * left, **look)
        self.y += round(1.5 * size * self.unit)

    def block(
        self, columns: Sequence[PanelColumn], *, rulers: Sequence[Ruler | None], mark: Box | None
    ) -> None:
        """Draw titles, one row of pictures for each of the columns' images, and colour bars."""
        for i, column in enumerate(columns):
            centre, width = self.centre[i], self.widths[i]
            self.text(column.title, 1.1, centre, self.y, width=width, ha="center", weight="bold")
            lower = self.y + round(1.45 * self.unit)
            self.text(column.subtitle, 0.9, centre, lower, width=width, ha="center", color=GREY)
            lower += round(1.25 * self.unit)
            self.text(column.verdict, 0.8, centre, lower, width=width, ha="center", color=GREY)
        head = 2.9 if any(column.subtitle for column in columns) else 1.7
        head += 1.2 if any(column.verdict for column in columns) else 0.0
        self.y += round(head * self.unit)
        for row in range(max(len(column.images) for column in columns)):
            ruler = rulers[row] if row < len(rulers) else None
            self._row(columns, row, ruler=ruler, mark=mark if row == 0 else None)
        if any(column.scale for column in columns):
            lines = [self._bar(i, each, each.scale) for i, each in enumerate(columns) if each.scale]
            self.y += round((4.4 + 1.2 * max(lines)) * self.unit)

    def text(self, text: str, size: float, x: float, y: float, *, width: float, **look: Any) -> None:
        """Write text with its upper edge at `y`, fitted to `width` pixels."""
        shown, points = fit_text(drawable(text), width, size * self.unit, look.get("weight", "normal"))
        look = {"va": "top", "ha": "left", "color": INK, "parse_math": False, **look}
        self.texts.append((self.figure.text(0, 0, shown, fontsize=points, **look), x, y))

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        """Put bare axes at a place."""
        axes = self.figure.add_axes((0, 0, 1, 1), label=str(len(self.placed)))
        axes.set_axis_off()
        self.placed.append((axes, (x, y, width, height)))
        return axes

    def image(self, pixels: npt.NDArray[Any], x: float, y: float) -> Any:
        """Show a picture, pixel for pixel, with a hairline around it."""
        height, width = pixels.shape[:2]
        axes = self.axes(x, y, width, height)
        axes.imshow(pixels, aspect="auto", interpolation="none", extent=(0, width, height, 0))
        frame = Rectangle((0, 0), width, height, fill=False, ec="#BBBBBB", lw=0.4, clip_on=False)
        axes.add_patch(frame)
        return axes

    def close(self) -> Picture:
        """Set the figure's final size, and place everything."""
        width, height = self.width, self.y + round(0.6 * self.unit)
        self.figure.set_size_inches(width / DPI, height / DPI)
        for axes, (x, y, w, h) in self.placed:
            axes.set_position((x / width, 1 - (y + h) / height, w / width, h / height))
        for text, x, y in self.texts:
            text.set_position((x / width, 1 - y / height))
        return self.figure

    def _row(
        self, columns: Sequence[PanelColumn], row: int, *, ruler: Ruler | None, mark: Box | None
    ) -> None:
        tallest = max(column.images[row].shape[0] for column in columns)
        for i, column in enumerate(columns):
            pixels = column.images[row]
            x = self.left[i] + (self.widths[i] - pixels.shape[1]) // 2
            axes = self.image(pixels, x, self.y)
            size = self.unit * 72 / DPI
            for lines in column.lines[row : row + 1]:
                ends = list(lines.segments.reshape(-1, 2, 2))
                for colour, extra in (("white", 0.06), (lines.colours, 0.0)):  # a light rim shows anywhere
                    widths = (lines.widths + extra) * size
                    strokes = LineCollection(ends, colors=colour, linewidths=widths, capstyle="round")
                    axes.add_collection(strokes, autolim=False)
            if mark is not None:
                for ink, thick in (("white", 0.3), ("black", 0.15)):
                    frame = Rectangle(mark[:2], *mark[2:], fill=False, ec=ink, lw=thick * size)
                    axes.add_patch(frame)
            if ruler is not None and i == 0:
                self.ruler(axes, ruler, pixels.shape[0])
        self.y += tallest + round(0.8 * self.unit)

    def ruler(self, axes: Any, ruler: Ruler, height: int) -> None:
        """Draw a bar of known length in the lower left corner of a picture."""
        u = self.unit
        wide = max(ruler.pixels, text_width(ruler.name, 0.85 * u)) + 1.2 * u
        axes.add_patch(Rectangle((0, height - 2.6 * u), wide, 2.6 * u, fc="white", ec="none", alpha=0.85))
        bar = Rectangle((0.6 * u, height - 0.8 * u), ruler.pixels, 0.35 * u, fc="black", ec="none")
        axes.add_patch(bar)
        points = 0.85 * u * 72 / DPI
        axes.text(0.6 * u, height - 1.1 * u, ruler.name, fontsize=points, va="bottom", color="black")

    def _bar(self, i: int, column: PanelColumn, scale: Scale) -> int:
        """Draw a colour bar, its numbers, the words for its ends and the column's note; count its lines."""
        u, centre, width = self.unit, self.centre[i], self.widths[i]
        wide = round(min(width, max(NARROWEST * u, 0.86 * width)))
        x = centre - wide / 2
        axes = self.axes(x, self.y, wide, round(1.1 * u))
        colours = scale.paint(np.linspace(scale.low, scale.high, STEPS))[None]
        axes.imshow(colours, aspect="auto", interpolation="nearest")
        digits, ticks = digits_for(scale.low, scale.high), self.y + round(1.35 * u)
        low = "≤ " * scale.cut[0] + number(scale.low, digits)
        middle = number((scale.low + scale.high) / 2, digits)
        high = "≥ " * scale.cut[1] + number(scale.high, digits)
        for place, (value, side) in enumerate(((low, "left"), (middle, "center"), (high, "right"))):
            self.text(value, 0.85, x + place * wide / 2, ticks, width=wide / 3, ha=side)
        left, right = (BLUE, RED) if scale.signed else (GREY, INK)
        words = self.y + round(2.65 * u)
        self.text(column.ends[0], 0.85, x, words, width=wide * 0.55, color=left)
        self.text(column.ends[1], 0.85, x + wide, words, width=wide * 0.43, ha="right", color=right)
        length = text_width(column.note, 0.85 * u)
        letters = len(column.note) * (0.95 * wide / length if SMALLEST * length > wide else 1)
        lines = wrap(column.note, max(1, int(letters)))  # in one line if it fits at a smaller size
        for k, line in enumerate(lines):
            lower = words + round((1.25 + 1.2 * k) * u)
            self.text(line, 0.85, centre, lower, width=wide, ha="center", color=WARNING)
        return len(lines)


def fit_text(text: str, width: float, size: float, weight: str = "normal") -> tuple[str, float]:
    """Fit text: return it and its size in points, smaller if necessary, truncated if that is not enough."""
    wide = text_width(text, size, weight)
    factor = min(1.0, width / wide) if wide else 1.0
    if factor >= SMALLEST:
        return text, size * factor * 72 / DPI
    small, lengths = size * SMALLEST, range(1, len(text))
    fitting = bisect_right(lengths, width, key=lambda n: text_width(text[:n] + "…", small, weight))
    return text[:fitting].rstrip() + "…", small * 72 / DPI


def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Measure a line of text in pixels at a size in pixels, with room for the rounding of small letters."""
    font = FontProperties(family=families(text), weight=weight, size=size)
    wide, _, _ = text_to_path.get_text_width_height_descent(drawable(text), font, ismath=False)
    return float(wide) * 1.06


def extremes(explanation: Explanation, top: int) -> tuple[list[int], list[int]]:
    """Find the patches with the highest and the lowest scores, strongest first, ties in the bag's order.

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
    task: str = "classification",
    verdict: str = "",
) -> Picture:
    """Draw the `top` highest and lowest patches, framed in the colours of their scores."""
    boxes, wide = explanation.boxes(), EDGE + 2 * FRAME
    sheet = Sheet(max(13.0, EDGE / 13), [wide] * min(ACROSS, max(top, 3)), heading)
    sheet.line(f"{title(explanation)} {subtitle(explanation, task)}", 1.15)
    if verdict:
        sheet.line(verdict, 0.9, color=GREY)
    low, high = ends(explanation, task)
    if explanation.signed:
        target = explained(explanation)
        headings = (
            (f"{high}: highest scores", f"no patch with a positive score for {target}", RED),
            (f"{low}: lowest scores", f"no patch with a negative score for {target}", BLUE),
        )
    else:
        noun = high.removeprefix("high ")
        headings = ((f"highest {noun}", "no patches", INK), (f"lowest {noun}", "no further patches", GREY))
    for (words, otherwise, colour), rows in zip(headings, extremes(explanation, top), strict=True):
        sheet.line(words if rows else otherwise, 1.0, color=colour, weight="bold")
        for start in range(0, len(rows), len(sheet.left)):
            for x, i in zip(sheet.left, rows[start : start + len(sheet.left)], strict=False):
                score, below = explanation.scores[i], sheet.y + wide + round(0.3 * sheet.unit)
                framed = np.empty((wide, wide, 3), dtype=np.uint8)
                framed[:] = scale.paint(np.asarray([score]))[0, :3]
                framed[FRAME:-FRAME, FRAME:-FRAME] = cut_patch(slide, boxes[i], EDGE)
                sheet.image(framed, x, sheet.y)
                value = number(float(score), digits_for(scale.low, scale.high))
                sheet.text(value, 1.0, x + wide / 2, below, width=wide, ha="center")
                place = f"x {boxes[i][0]:,}   y {boxes[i][1]:,}"
                below += round(1.3 * sheet.unit)
                sheet.text(place, 0.75, x + wide / 2, below, width=wide, ha="center", color=GREY)
            sheet.y += wide + round(3.2 * sheet.unit)
    return sheet.close()


def cut_patch(slide: Slide, box: Sequence[int], edge: int) -> Pixels:
    """Read a patch's pixels from the slide."""
    x0, y0, x1, y1 = (int(value) for value in box)
    return slide.read_area((x0, y0, x1 - x0, y1 - y0), (edge, edge))
