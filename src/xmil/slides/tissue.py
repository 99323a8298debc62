"""Where the tissue is: Otsu's threshold on the thumbnail, cleaned up.

Otsu, "A threshold selection method from gray-level histograms", IEEE Trans. SMC 9(1), 1979. The value it
splits is how far the darkest colour channel lies below the background: it sees stained and grey tissue alike.
Otsu always splits, so its threshold is held within what glass and stain can have: a slide without tissue
gives none, and one without background is not cut in two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from xmil.slides.slide import Pixels, Slide

Mask = npt.NDArray[np.bool_]

MASK_MPP, FINEST = 8.0, 2.0  # microns a pixel of the thumbnail, and of that of a small slide
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
