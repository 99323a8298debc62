"""The area that exports cover and where their origin lies: QuPath's, or level 0's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xmil._version import __version__
from xmil.core.bag import IntArray
from xmil.core.errors import InputError, unknown_name

if TYPE_CHECKING:
    from xmil.slides.slide import Slide

Frame = tuple[int, int, int, int]  # x, y, width, height in level-0 pixels; exports count from its corner
FRAMES = ("bounds", "level0")
KEY = "xmil"  # our own member of a GeoJSON collection; other readers pass over it


def frame_header(slide: str, origin: tuple[int, int]) -> dict[str, Any]:
    """What a GeoJSON file says of its slide and of where, in level-0 pixels, it counts from."""
    return {"version": __version__, "slide": slide, "origin": [int(value) for value in origin], "level": 0}


def export_frame(boxes: IntArray, slide: Slide | None, *, frame: str = "bounds") -> Frame:
    """The area of an export: the scanned bounds, as QuPath shows the slide, or the whole of level 0.

    QuPath cuts slides with a bounds offset (MRXS, SCN, some of Hamamatsu's) down to their bounds and counts
    from there. Most slides have no offset: then both are the same. Without a slide the area begins at level
    0's corner and ends with the patches.
    """
    if frame not in FRAMES:
        raise unknown_name("frame", frame, FRAMES)
    if slide is not None:
        return slide.bounds if frame == "bounds" else (0, 0, *slide.dimensions)
    if not len(boxes):
        raise InputError("There are no patches to export.")
    width, height = np.maximum(boxes[:, 2:].max(axis=0), 1).tolist()
    return 0, 0, width, height
