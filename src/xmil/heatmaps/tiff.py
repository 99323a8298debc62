"""OME-TIFF pyramids of scores and of colours, on the slide's own pixels or every n-th of them.

Levels are SubIFDs, as the OME standard asks. The first page's levels are linked behind the last page as well,
where OpenSlide looks for them. Each level is painted from the boxes, strip by strip, so memory stays small
however large the slide.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import ceil, log2
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import IntArray
from xmil.core.durable import write_atomically
from xmil.core.errors import UnsupportedError, bad_parameter
from xmil.core.explanation import Explanation
from xmil.heatmaps.canvas import Canvas, Cells
from xmil.heatmaps.scale import Scale
from xmil.slides.slide import Frame

TILE = 512
SMALLEST = 1024  # pixels of the smallest level's longer edge, at most
WIDEST = 16_384  # pixels of the first level's longer edge unless `downsample` says otherwise

Strip = Callable[[Cells, int], npt.NDArray[Any]]  # the picture of a strip's cells, for a channel


@dataclass(frozen=True)
class Pyramid:
    """A frame on levels: the first has a pixel for `downsample` of level 0, each next for twice as many."""

    frame: Frame
    downsample: int = 1
    mpp: float | None = None

    @classmethod
    def of(cls, frame: Frame, *, downsample: int | None = None, mpp: float | None = None) -> Pyramid:
        """Make the pyramid of a frame; the first level is level 0 unless that is very wide.

        >>> Pyramid.of((0, 0, 100_000, 60_000)).downsample
        8
        """
        if downsample is not None and downsample < 1:
            raise bad_parameter("downsample", "Pyramid.of", "an int in the range [1, inf)", downsample)
        fitting = 2 ** max(0, ceil(log2(max(frame[2:]) / WIDEST)))
        return cls(frame, downsample or fitting, mpp)

    def levels(self) -> list[Canvas]:
        """Give the canvases from the finest to the coarsest."""
        x, y, width, height = self.frame
        step = self.downsample
        canvases: list[Canvas] = []
        while not canvases or max(canvases[-1].size) > SMALLEST:
            size = (ceil(width / step), ceil(height / step))
            canvases.append(Canvas((x, y, size[0] * step, size[1] * step), size))
            step *= 2
        return canvases


def write_scores(
    path: str | PathLike[str],
    explanations: Sequence[Explanation],
    pyramid: Pyramid,
    *,
    boxes: IntArray | None = None,
) -> None:
    """Write raw scores in float32, a channel for each `<method>:<target>`, NaN where there is no patch.

    `boxes` (n, 4) are the places in level-0 pixels, if they are not the patches.
    """
    values = [e.scores for e in explanations]
    name = f"{explanations[0].bag or ''} scores".strip()
    about = {"axes": "CYX", "Name": name, "Channel": {"Name": [e.column for e in explanations]}}
    layout = {"dtype": np.dtype(np.float32), "photometric": "minisblack"}

    def strip(cells: Cells, channel: int) -> npt.NDArray[Any]:
        return cells.expand(cells.average(values[channel]))

    where = explanations[0].boxes() if boxes is None else boxes
    _write(path, where, pyramid, strip, channels=len(values), empty=np.nan, about=about, **layout)


def write_colours(
    path: str | PathLike[str], explanation: Explanation, scale: Scale, pyramid: Pyramid
) -> None:
    """Write the colours of one explanation as RGBA, transparent where there is no patch."""
    name = f"{explanation.bag or ''} {explanation.column}".strip()
    about = {"axes": "YXS", "Name": name, "Channel": {"Name": [explanation.column]}}
    layout = {"dtype": np.dtype(np.uint8), "photometric": "rgb", "extrasamples": ["unassalpha"]}

    def strip(cells: Cells, channel: int) -> npt.NDArray[Any]:  # noqa: ARG001  # there is one channel
        return cells.expand(scale.paint(cells.average(explanation.scores)))

    _write(path, explanation.boxes(), pyramid, strip, channels=0, empty=0, about=about, **layout)


def _write(
    path: str | PathLike[str],
    boxes: IntArray,
    pyramid: Pyramid,
    strip: Strip,
    *,
    channels: int,
    empty: float,
    about: dict[str, Any],
    **layout: Any,
) -> None:
    """Write every level; `channels` 0 means one picture of four samples a pixel."""
    tifffile = load_optional("tifffile", "slides")
    microns = None if pyramid.mpp is None else pyramid.mpp * pyramid.downsample
    for axis in "XY" if microns is not None else "":
        about |= {f"PhysicalSize{axis}": microns, f"PhysicalSize{axis}Unit": "µm"}

    def write(temporary: str) -> None:
        levels = pyramid.levels()
        with tifffile.TiffWriter(temporary, bigtiff=True, ome=True) as file:
            for i, canvas in enumerate(levels):
                width, height = canvas.size
                resolution = {}
                if microns is not None:
                    per_centimetre = 1e4 / (microns * 2**i)
                    resolution = {"resolution": (per_centimetre,) * 2, "resolutionunit": "CENTIMETER"}
                file.write(
                    _tiles(boxes, canvas, strip, channels=channels, empty=empty),
                    shape=(channels, height, width) if channels else (height, width, 4),
                    tile=(TILE, TILE),
                    compression="zlib",
                    subfiletype=1 if i else 0,
                    subifds=None if i else len(levels) - 1,
                    metadata=None if i else about,
                    **layout,
                    **resolution,
                )
        _link_levels(temporary)

    write_atomically(path, write)


def _tiles(
    boxes: IntArray, canvas: Canvas, strip: Strip, *, channels: int, empty: float
) -> Iterator[npt.NDArray[Any]]:
    """Give the tiles of a level in the order of the file: channel by channel, row by row."""
    for channel in range(max(channels, 1)):
        for _, part in canvas.strips(TILE):
            picture = strip(Cells.cut(boxes, part), channel)
            for left in range(0, canvas.size[0], TILE):
                pixels = picture[:, left : left + TILE]
                tile = np.full((TILE, TILE, *pixels.shape[2:]), empty, dtype=pixels.dtype)
                tile[: pixels.shape[0], : pixels.shape[1]] = pixels
                yield tile


def _link_levels(path: str) -> None:
    """Link the first page's levels, which tifffile has chained already, behind the last page."""
    with load_optional("tifffile", "slides").TiffFile(path) as file:
        last = int(file.pages[-1].offset)
        levels = file.pages[0].subifds
    if not levels:
        return
    with open(path, "r+b") as handle:
        handle.seek(last)
        (tags,) = struct.unpack("<Q", handle.read(8))  # a BigTIFF directory: count, 20 bytes a tag, next
        handle.seek(last + 8 + 20 * tags)
        handle.write(struct.pack("<Q", int(levels[0])))


def load_optional(package: str, extra: str) -> Any:
    """Import a package that an export needs, or say how to install it."""
    try:
        return import_module(package)
    except ImportError:
        raise UnsupportedError(f"This export needs {package}: pip install 'xmil[{extra}]'.") from None
