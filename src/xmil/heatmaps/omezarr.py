"""Scores as OME-Zarr (OME-NGFF 0.4): a float32 image with one channel for each method and class.

Written with Zarr alone: `ome-zarr` keeps Dask and a file system for S3 about, and pins both. It reads what is
written here, and so do napari, QuPath and Bio-Formats.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from xmil._version import __version__
from xmil.core.durable import write_folder
from xmil.core.errors import UnsupportedError
from xmil.core.explanation import Explanation
from xmil.heatmaps.canvas import Canvas, Cells
from xmil.heatmaps.ometiff import Pyramid
from xmil.heatmaps.registry import Exported

CHUNK = 512
NGFF = "0.4"
CHANNEL_COLOURS = ("CA0020", "0571B0", "1A9641", "7B3294", "E66101", "404040")


def write_omezarr(path: Path, given: Exported) -> None:
    """A pyramid over the slide's own pixels, or every n-th; NaN where there is no patch."""
    write_folder(path, partial(_fill, given=given))


def _fill(folder: Path, *, given: Exported) -> None:
    zarr = zarr_package()
    pyramid = Pyramid.of(given.frame, downsample=given.downsample, mpp=given.mpp)
    levels = pyramid.levels()
    group = zarr.create_group(str(folder), zarr_format=2)
    for number, canvas in enumerate(levels):
        _write_level(group, str(number), given, canvas)
    group.attrs.update(
        {
            "multiscales": [_multiscales(given, pyramid, len(levels))],
            "omero": {"channels": [_channel(e, given, i) for i, e in enumerate(given.explanations)]},
            "xmil": {"version": __version__, "slide": given.explanations[0].bag, "origin": given.frame[:2]},
        }
    )


def _write_level(group: Any, name: str, given: Exported, canvas: Canvas) -> None:
    """Strip by strip, so that memory stays small; chunks without a patch are not written."""
    width, height = canvas.size
    boxes, step = given.explanations[0].boxes(), canvas.downsample[1]
    array = group.create_array(
        name,
        shape=(len(given.explanations), height, width),
        chunks=(1, CHUNK, CHUNK),
        dtype="float32",
        fill_value=float("nan"),
        chunk_key_encoding={"name": "v2", "separator": "/"},
    )
    for top in range(0, height, CHUNK):
        rows = min(CHUNK, height - top)
        box = (canvas.box[0], canvas.box[1] + top * step, canvas.box[2], rows * step)
        cells = Cells.cut(boxes, Canvas(box, (width, rows)))
        for channel, e in enumerate(given.explanations):
            array[channel, top : top + rows] = cells.expand(cells.average(e.scores))


def _multiscales(given: Exported, pyramid: Pyramid, levels: int) -> dict[str, Any]:
    """Axes, and for each level the size of its pixels: in microns where the mpp is known."""
    unit = {} if given.mpp is None else {"unit": "micrometer"}
    axes = [{"name": "c", "type": "channel"}, *({"name": n, "type": "space", **unit} for n in "yx")]
    edges = [(given.mpp or 1.0) * pyramid.downsample * 2**level for level in range(levels)]
    return {
        "version": NGFF,
        "name": f"{given.explanations[0].bag or ''} scores".strip(),
        "axes": axes,
        "datasets": [
            {
                "path": str(level),
                "coordinateTransformations": [{"type": "scale", "scale": [1.0, edge, edge]}],
            }
            for level, edge in enumerate(edges)
        ],
    }


def _channel(e: Explanation, given: Exported, number: int) -> dict[str, Any]:
    """A channel's name and the range at which a viewer shows it: that of our pictures."""
    low, high = _window(e, given)
    return {
        "label": e.column,
        "active": number == 0,
        "color": CHANNEL_COLOURS[number % len(CHANNEL_COLOURS)],
        "window": {"min": low, "start": low, "end": high, "max": high},
    }


def _window(e: Explanation, given: Exported) -> tuple[float, float]:
    scale = given.scales.get(e.column)
    if scale is not None:
        return float(scale.low), float(scale.high)
    low, high = float(np.min(e.scores)), float(np.max(e.scores))
    return low, high if high > low else low + 1.0


@cache
def zarr_package() -> Any:
    """Zarr, or how to get it."""
    try:
        import zarr
    except ImportError:
        raise UnsupportedError("OME-Zarr and SpatialData need zarr: pip install 'xmil[zarr]'.") from None
    return zarr
