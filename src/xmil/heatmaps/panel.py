"""Figures laid out in pixels: pictures in columns, each with title and colour bar, under one heading.

A pixel of a picture is a pixel of the figure. Text is measured and made to fit its column: nothing overlaps.
"""

from __future__ import annotations

import io
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

from xmil.core.errors import unknown_name
from xmil.core.lettering import drawable, families, letter_figure
from xmil.core.storage import write_atomically
from xmil.heatmaps.scale import STEPS, Scale
from xmil.heatmaps.words import digits_for, number

Mark = tuple[float, float, float, float]  # x, y, width, height in pixels of a picture

DPI = 200
FORMATS = ("png", "pdf", "svg")
RED, BLUE, GREY, INK = "#8E0F23", "#1B4F87", "#555555", "#111111"
SMALLEST = 0.62  # of the wished size; text that still does not fit is cut short
NARROWEST = 30  # units that a column's words need
WIDEST = 6600  # pixels of a panel; columns that would go beyond stand in further rows


class Picture(Figure):
    """A figure that shows itself in a notebook and knows how to be written whole or not at all."""

    def write(self, path: str | PathLike[str], format: str | None = None) -> None:  # noqa: A002  # savefig's word
        """Write as PNG, PDF or SVG, by the path's suffix or `format`."""
        kind = (format or Path(path).suffix.lstrip(".")).lower()
        if kind not in FORMATS:
            raise unknown_name("picture format", kind, FORMATS)
        about = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)  # same input, same file
        write_atomically(path, lambda part: self.savefig(part, format=kind, dpi=DPI, metadata=about))

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """As matplotlib does; letters that no font has are spelt."""
        letter_figure(self)
        super().savefig(*args, **kwargs)

    def _repr_png_(self) -> bytes:
        held = io.BytesIO()
        self.savefig(held, format="png", dpi=DPI)
        return held.getvalue()


@dataclass(frozen=True, eq=False)
class Lines:
    """Segments (k, 4) in pixels of a picture, each with a colour and a width of its own, in text sizes."""

    segments: npt.NDArray[np.float64]
    colours: Sequence[str]
    widths: npt.NDArray[np.float64]


@dataclass(frozen=True)
class PanelColumn:
    """Pictures below each other (whole slide, zoomed region) with a title and the scale of their colours."""

    title: str
    subtitle: str
    images: tuple[npt.NDArray[np.uint8], ...]
    scale: Scale | None = None
    ends: tuple[str, str] = ("", "")
    lines: tuple[Lines, ...] = ()  # over each of the images
    note: str = ""  # below the colour bar


@dataclass(frozen=True)
class Ruler:
    """A bar of known length on a picture: its pixels and its name."""

    pixels: float
    name: str

    @classmethod
    def fit(cls, width: int, microns: float | None) -> Ruler | None:
        """The longest round length within a quarter of the picture; None where microns per pixel are unknown.

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
    """The lines above a panel: the slide's name, what is known of it, and what to beware of."""

    name: str
    facts: str = ""
    warnings: tuple[str, ...] = ()


def draw_panel(
    columns: Sequence[PanelColumn],
    *,
    heading: Heading,
    rulers: Sequence[Ruler | None] = (),
    mark: Mark | None = None,
    across: int = 5,
) -> Picture:
    """Columns side by side, `across` of them in a row; `mark` frames a region in the first pictures."""
    sheet = Sheet(_unit(columns))
    wide = max(_width(column, sheet.unit) for column in columns)
    across = min(across, max(1, int(WIDEST // (wide + 1.6 * sheet.unit))))
    blocks = [columns[i : i + across] for i in range(0, len(columns), across)]
    widths = [wide] * min(across, len(columns))
    sheet.open(widths)
    sheet.heading(heading)
    for block in blocks:
        sheet.block(block, rulers=rulers, mark=mark)
    return sheet.close()


class Sheet:
    """A figure that grows downwards; places are pixels from its upper left corner."""

    def __init__(self, unit: float) -> None:
        self.unit = unit
        self.y = round(1.2 * unit)
        self.figure = Picture(figsize=(1, 1), dpi=DPI, facecolor="white")
        self.left: list[int] = []
        self.widths: list[int] = []
        self.width = 1
        self.placed: list[tuple[Any, tuple[float, float, float, float]]] = []
        self.texts: list[tuple[Any, float, float]] = []

    def open(self, widths: Sequence[int]) -> None:
        """Fix the columns' widths."""
        gap, edge = round(1.6 * self.unit), round(1.4 * self.unit)
        self.widths = list(widths)
        self.left = [edge + sum(widths[:i]) + gap * i for i in range(len(widths))]
        self.width = self.left[-1] + widths[-1] + edge

    def heading(self, heading: Heading) -> None:
        """The slide's name in bold, the facts below it."""
        inner = self.width - 2 * self.left[0]
        if heading.name:
            self.line(heading.name, 1.35, x=self.left[0], width=inner, weight="bold")
        if heading.facts:
            self.line(heading.facts, 1.0, x=self.left[0], width=inner, color=GREY)
        for text in heading.warnings:
            for part in wrap(f"warning: {text}", max(20, int(inner / (0.5 * self.unit)))):
                self.line(part, 0.85, x=self.left[0], width=inner, color=RED)
        self.y += round(0.4 * self.unit)

    def line(self, text: str, size: float, *, x: float, width: float, **look: Any) -> None:
        """One line of text from `x` on, then move below it."""
        self.text(text, size, x, self.y, width=width, **look)
        self.y += round(1.5 * size * self.unit)

    def block(
        self, columns: Sequence[PanelColumn], *, rulers: Sequence[Ruler | None], mark: Mark | None
    ) -> None:
        """Titles, one row of pictures for each of the columns' images, colour bars."""
        self._titles(columns)
        for row in range(max(len(column.images) for column in columns)):
            ruler = rulers[row] if row < len(rulers) else None
            self._row(columns, row, ruler=ruler, mark=mark if row == 0 else None)
        if any(column.scale for column in columns):
            for i, column in enumerate(columns):
                self._bar(i, column)
            self.y += round((5.6 if any(column.note for column in columns) else 4.4) * self.unit)

    def text(self, text: str, size: float, x: float, y: float, *, width: float, **look: Any) -> None:
        """Text whose upper edge is at `y`, made to fit `width` pixels."""
        shown, points = fit_text(drawable(text), width, size * self.unit, look.get("weight", "normal"))
        look = {"va": "top", "ha": "left", "color": INK, "parse_math": False, **look}
        self.texts.append((self.figure.text(0, 0, shown, fontsize=points, **look), x, y))

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        """Bare axes at a place."""
        found = self.figure.add_axes((0, 0, 1, 1), label=str(len(self.placed)))
        found.set_axis_off()
        self.placed.append((found, (x, y, width, height)))
        return found

    def image(self, pixels: npt.NDArray[Any], x: float, y: float) -> Any:
        """A picture, pixel for pixel, with a hairline around it."""
        height, width = pixels.shape[:2]
        found = self.axes(x, y, width, height)
        found.imshow(pixels, aspect="auto", interpolation="none", extent=(0, width, height, 0))
        frame = Rectangle((0, 0), width, height, fill=False, ec="#BBBBBB", lw=0.4, clip_on=False)
        found.add_patch(frame)
        return found

    def close(self) -> Picture:
        """The figure at its final size, everything in its place."""
        width, height = self.width, self.y + round(0.6 * self.unit)
        self.figure.set_size_inches(width / DPI, height / DPI)
        for axes, (x, y, w, h) in self.placed:
            axes.set_position((x / width, 1 - (y + h) / height, w / width, h / height))
        for text, x, y in self.texts:
            text.set_position((x / width, 1 - y / height))
        return self.figure

    def _titles(self, columns: Sequence[PanelColumn]) -> None:
        for i, column in enumerate(columns):
            centre, width = self._centre(i)
            self.text(column.title, 1.1, centre, self.y, width=width, ha="center", weight="bold")
            lower = self.y + round(1.45 * self.unit)
            self.text(column.subtitle, 0.9, centre, lower, width=width, ha="center", color=GREY)
        two = any(column.subtitle for column in columns)
        self.y += round((2.9 if two else 1.7) * self.unit)

    def _row(
        self,
        columns: Sequence[PanelColumn],
        row: int,
        *,
        ruler: Ruler | None,
        mark: Mark | None,
    ) -> None:
        tallest = max(column.images[row].shape[0] for column in columns)
        for i, column in enumerate(columns):
            pixels = column.images[row]
            x = self.left[i] + (self.widths[i] - pixels.shape[1]) // 2
            axes = self.image(pixels, x, self.y)
            for lines in column.lines[row : row + 1]:
                _lines(axes, lines, self.unit * 72 / DPI)
            if mark is not None:
                _mark(axes, mark, self.unit * 72 / DPI)
            if ruler is not None and i == 0:
                self.ruler(axes, ruler, pixels.shape[0])
        self.y += tallest + round(0.8 * self.unit)

    def ruler(self, axes: Any, ruler: Ruler, height: int) -> None:
        """A bar of known length in the lower left corner of a picture."""
        u = self.unit
        wide = max(ruler.pixels, text_width(ruler.name, 0.85 * u)) + 1.2 * u
        axes.add_patch(Rectangle((0, height - 2.6 * u), wide, 2.6 * u, fc="white", ec="none", alpha=0.85))
        bar = Rectangle((0.6 * u, height - 0.8 * u), ruler.pixels, 0.35 * u, fc="black", ec="none")
        axes.add_patch(bar)
        points = 0.85 * u * 72 / DPI
        axes.text(0.6 * u, height - 1.1 * u, ruler.name, fontsize=points, va="bottom", color="black")

    def _bar(self, i: int, column: PanelColumn) -> None:
        if column.scale is None:
            return
        u, (centre, width) = self.unit, self._centre(i)
        wide = round(min(width, max(NARROWEST * u, 0.86 * width)))
        x, scale = centre - wide / 2, column.scale
        axes = self.axes(x, self.y, wide, round(1.1 * u))
        colours = scale.paint(np.linspace(scale.low, scale.high, STEPS))[None]
        axes.imshow(colours, aspect="auto", interpolation="nearest")
        self._ticks(scale, x, wide, self.y + round(1.35 * u))
        low, high = (BLUE, RED) if scale.signed else (GREY, INK)
        words = self.y + round(2.65 * u)
        self.text(column.ends[0], 0.85, x, words, width=wide * 0.55, color=low)
        self.text(column.ends[1], 0.85, x + wide, words, width=wide * 0.43, ha="right", color=high)
        if column.note:
            self.text(column.note, 0.85, centre, words + round(1.25 * u), width=wide, ha="center", color=GREY)

    def _ticks(self, scale: Scale, x: float, wide: float, y: float) -> None:
        digits = digits_for(scale.low, scale.high)
        low, high = number(scale.low, digits), number(scale.high, digits)
        low = f"≤ {low}" if scale.cut[0] else low
        high = f"≥ {high}" if scale.cut[1] else high
        self.text(low, 0.85, x, y, width=wide / 3)
        middle = number((scale.low + scale.high) / 2, digits)
        self.text(middle, 0.85, x + wide / 2, y, width=wide / 3, ha="center")
        self.text(high, 0.85, x + wide, y, width=wide / 3, ha="right")

    def _centre(self, i: int) -> tuple[float, float]:
        return self.left[i] + self.widths[i] / 2, self.widths[i]


def fit_text(text: str, width: float, size: float, weight: str = "normal") -> tuple[str, float]:
    """The text and its size in points, smaller where it must be, cut short where that is not enough."""
    wide = text_width(text, size, weight)
    factor = min(1.0, width / wide) if wide else 1.0
    if factor >= SMALLEST:
        return text, size * factor * 72 / DPI
    small, shortest, longest = size * SMALLEST, 0, len(text)
    while longest - shortest > 1:
        middle = (shortest + longest) // 2
        fits = text_width(text[:middle] + "…", small, weight) <= width
        shortest, longest = (middle, longest) if fits else (shortest, middle)
    return text[:shortest].rstrip() + "…", small * 72 / DPI


def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Pixels that a line of text takes at a size in pixels, with room for the rounding of small letters."""
    font = FontProperties(family=families(text), weight=weight, size=size)
    wide, _, _ = text_to_path.get_text_width_height_descent(drawable(text), font, ismath=False)
    return float(wide) * 1.06


def _mark(axes: Any, mark: Mark, size: float) -> None:
    x, y, wide, high = mark
    for colour, width in (("white", 0.3), ("black", 0.15)):
        axes.add_patch(Rectangle((x, y), wide, high, fill=False, ec=colour, lw=width * size))


def _lines(axes: Any, lines: Lines, size: float) -> None:
    ends = lines.segments.reshape(-1, 2, 2)
    for colour, extra in (("white", 0.06), (lines.colours, 0.0)):  # a light rim, to be seen on any colour
        drawn = LineCollection(
            list(ends), colors=colour, linewidths=(lines.widths + extra) * size, capstyle="round"
        )
        axes.add_collection(drawn, autolim=False)


def _unit(columns: Sequence[PanelColumn]) -> float:
    """The size of ordinary text in pixels, in proportion to the pictures."""
    longest = max(max(image.shape[:2]) for column in columns for image in column.images)
    return float(max(13, longest / (44 if len(columns) < 3 else 36)))


def _width(column: PanelColumn, unit: float) -> int:
    widest = max(int(image.shape[1]) for image in column.images)
    return max(widest, round((NARROWEST if column.scale else 18) * unit * 0.7))
