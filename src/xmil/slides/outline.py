"""A tissue mask as polygons with holes, in level-0 pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from xmil.slides.frames import KEY, frame_header
from xmil.slides.tissue import Mask, Tissue

Ring = npt.NDArray[np.float64]  # (points, 2): x, y; the last point is the first


def outlines(tissue: Tissue) -> list[list[Ring]]:
    """A list of rings for each piece of tissue: its outer border first, then its holes."""
    labels, count = ndimage.label(tissue.mask)
    boxes = ndimage.find_objects(labels)
    return [_piece(labels[box] == i + 1, box, tissue) for i, box in zip(range(count), boxes, strict=True)]


def tissue_geojson(
    tissue: Tissue, *, name: str = "Tissue", slide: str = "", origin: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    """A FeatureCollection of annotations that QuPath opens; they count from `origin`, which it names."""
    pieces = [[ring - origin for ring in rings] for rings in outlines(tissue)]
    about = {KEY: frame_header(slide, origin)}
    return {"type": "FeatureCollection", **about, "features": [_feature(rings, name) for rings in pieces]}


def _feature(rings: list[Ring], name: str) -> dict[str, Any]:
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [ring.tolist() for ring in rings]},
        "properties": {
            "objectType": "annotation",
            "classification": {"name": name, "color": [0, 160, 80]},
            "isLocked": True,
        },
    }


def _piece(mask: Mask, box: tuple[slice, slice], tissue: Tissue) -> list[Ring]:
    """The rings of one piece; only the outer one turns the other way."""
    from skimage.measure import find_contours

    origin = np.array([box[1].start, box[0].start])
    padded = np.pad(mask, 1).astype(np.float64)
    found = find_contours(padded, 0.5)  # type: ignore[no-untyped-call, unused-ignore]
    rings = [_straightened(contour[:, ::-1] - 1) for contour in found]
    rings.sort(key=lambda ring: -abs(_area(ring)))
    # the centre of the pixel i lies at i + 1/2
    return [np.round((ring + origin + 0.5) * tissue.scale, 2) for ring in rings]


def _straightened(ring: Ring) -> Ring:
    """A ring without the points that lie on a line between their neighbours."""
    step = np.diff(ring, axis=0)
    before = np.roll(step, 1, axis=0)
    turns = np.abs(step[:, 0] * before[:, 1] - step[:, 1] * before[:, 0]) > 1e-9
    corners = ring[:-1][turns]
    return np.concatenate([corners, corners[:1]])


def _area(ring: Ring) -> float:
    x, y = ring[:, 0], ring[:, 1]
    return float(np.sum(x[:-1] * y[1:] - x[1:] * y[:-1]) / 2)
