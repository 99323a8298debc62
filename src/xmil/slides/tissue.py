"""Where the tissue is: Otsu's threshold on the thumbnail, cleaned up.

Otsu, "A threshold selection method from gray-level histograms", IEEE Trans. SMC 9(1), 1979. The value it
splits is how far the darkest colour channel lies below the background: it sees stained and grey tissue alike.
Otsu always splits, so its threshold is held within what glass and stain can have: a slide without tissue
gives none, and one without background is not cut in two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from xmil.slides.frames import KEY, frame_header
from xmil.slides.slide import Pixels, Slide

Mask = npt.NDArray[np.bool_]

MASK_MPP, FINEST = 8.0, 2.0  # microns per pixel of the thumbnail, and of that of a small slide
SHORTEST, LONGEST = 1024, 4096  # pixels of the thumbnail's longer edge
SMOOTH, SPECK = 8.0, 16.0  # microns: blur before the threshold, radius of what is opened and closed
FAINTEST, STRONGEST = 12.0, 45.0  # grey values below the background: certainly glass, certainly tissue
GLASS = 180.0  # background is at least so bright
INK = 20  # pixels darker than this in every channel are fill or ink, not tissue


@dataclass(frozen=True)
class Tissue:
    """A mask over the whole of level 0, the thumbnail it was made from, and level-0 pixels a mask pixel."""

    mask: Mask  # (rows, columns)
    picture: Pixels
    scale: tuple[float, float]  # along x, along y

    @property
    def share(self) -> float:
        """The part of the slide that is tissue."""
        return float(self.mask.mean())

    def shares(self, xy0: npt.NDArray[np.int64], edge0: int) -> npt.NDArray[np.float64]:
        """The part of each level-0 square that is tissue, exact to fractions of a mask pixel."""
        total = np.pad(self.mask.astype(np.float64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        left, top = xy0[:, 0] / self.scale[0], xy0[:, 1] / self.scale[1]
        right, bottom = (xy0[:, 0] + edge0) / self.scale[0], (xy0[:, 1] + edge0) / self.scale[1]

        def up_to(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            found = ndimage.map_coordinates(total, np.stack([y, x]), order=1, mode="nearest")
            return np.asarray(found, dtype=np.float64)

        inside = up_to(right, bottom) - up_to(left, bottom) - up_to(right, top) + up_to(left, top)
        return inside / ((right - left) * (bottom - top))


def find_tissue(slide: Slide, *, mpp: float, min_area: float = 0.02) -> Tissue:
    """The tissue of a slide of known mpp; pieces and holes under `min_area` mm² are noise."""
    width, height = slide.dimensions
    microns = max(width, height) * mpp
    longest = min(LONGEST, max(min(SHORTEST, round(microns / FINEST)), round(microns / MASK_MPP), 16))
    picture = slide.thumbnail(longest)
    scale = (width / picture.shape[1], height / picture.shape[0])
    microns = scale[0] * mpp
    mask = tissue_mask(picture, blur=SMOOTH / microns)
    mask = cleaned(mask, radius=max(1, round(SPECK / microns)), smallest=min_area * 1e6 / microns**2)
    return Tissue(mask, picture, scale)


def tissue_mask(picture: Pixels, *, blur: float = 1.0) -> Mask:
    """Which pixels of a thumbnail are stained."""
    depth = ndimage.gaussian_filter(_depth(picture), blur)
    scanned = picture.max(axis=2) >= INK
    if not scanned.any() or float(depth[scanned].max()) < FAINTEST:
        return np.zeros(depth.shape, dtype=np.bool_)
    threshold = min(max(_otsu(depth[scanned]), FAINTEST), STRONGEST)
    return np.asarray((depth > threshold) & scanned)


def cleaned(mask: Mask, *, radius: int = 2, smallest: float) -> Mask:
    """Specks opened away, cracks closed, small holes filled and small pieces dropped."""
    edge = 2 * radius + 1
    padded = np.pad(mask, edge, mode="edge")  # so that the border is not eaten
    opened = _grown(~_grown(~padded, radius / 2), radius / 2)
    smooth = ~_grown(~_grown(opened, radius), radius)[edge:-edge, edge:-edge]
    filled = ~_large(~smooth, smallest, connected=2)
    return _large(filled, smallest, connected=1)


def _depth(picture: Pixels) -> npt.NDArray[np.float32]:
    """How far the darkest channel lies below that of the background."""
    darkest = picture.min(axis=2).astype(np.float32)
    background = max(GLASS, float(np.percentile(darkest, 99)))
    return np.asarray(np.clip(background - darkest, 0, None), dtype=np.float32)


def _large(mask: Mask, smallest: float, *, connected: int) -> Mask:
    """The connected pieces of a mask of at least so many pixels."""
    labels, count = ndimage.label(mask, ndimage.generate_binary_structure(2, connected))
    if count == 0:
        return mask
    sizes = np.bincount(labels.ravel())
    kept = sizes >= max(1.0, smallest)
    kept[0] = False
    return np.asarray(kept[labels])


def _otsu(values: npt.NDArray[np.float32]) -> float:
    from skimage.filters import threshold_otsu

    return float(threshold_otsu(values))  # type: ignore[no-untyped-call, unused-ignore]


def _grown(mask: Mask, radius: float) -> Mask:
    """Dilation by a disk, through distances: its cost does not depend on the radius."""
    if not mask.any():
        return mask
    return np.asarray(ndimage.distance_transform_edt(~mask) <= radius)


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
