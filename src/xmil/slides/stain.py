"""Stain normalisation: find the two stains of a slide and convert them to reference colours.

Macenko et al., "A method for normalizing histology slides for quantitative analysis", ISBI 2009. In optical
density a pixel is a sum of two stain vectors: the extreme directions of all pixels in the plane of the two
main directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError
from xmil.slides.slide import Pixels

Floats = npt.NDArray[np.float64]

LIGHT = 240.0  # the transmitted light in the authors' reference
FAINT = 0.15  # pixels with a lower mean optical density are background
TAIL = 1.0  # per cent of angles at each end that count as noise
# columns: haematoxylin and eosin, in optical density of red, green, blue; and their high concentrations
REFERENCE = np.array([[0.5626, 0.2159], [0.7201, 0.8012], [0.4062, 0.5581]])
STRONG = np.array([1.9705, 1.0308])
_DENSITY = -np.log((np.arange(256) + 1.0) / LIGHT)


@dataclass(frozen=True)
class Macenko:
    """The stains of a slide: `stains` (3, 2) in optical density, `strong` (2,) their high concentrations."""

    stains: Floats
    strong: Floats

    @classmethod
    def fit(cls, pixels: npt.NDArray[np.uint8]) -> Macenko:
        """Find the stains of pixels (..., 3), best from many patches of the slide."""
        density = _DENSITY[pixels.reshape(-1, 3)]
        stained = density[density.mean(axis=1) > FAINT]
        if len(stained) < 100:
            raise InputError("Too few stained pixels to find the stains; leave out `stain_norm=True`.")
        _, vectors = np.linalg.eigh(np.cov(stained.T))
        plane = vectors[:, [2, 1]]
        plane = plane * np.where(plane.sum(axis=0) < 0, -1.0, 1.0)
        flat = stained @ plane
        low, high = np.percentile(np.arctan2(flat[:, 1], flat[:, 0]), [TAIL, 100 - TAIL])
        ends = plane @ np.array([[np.cos(low), np.cos(high)], [np.sin(low), np.sin(high)]])
        stains = np.asarray(ends if ends[0, 0] > ends[0, 1] else ends[:, ::-1])
        amounts = np.linalg.lstsq(stains, stained.T, rcond=None)[0]
        strong = np.percentile(amounts, 99, axis=1)
        if not (strong > 1e-3).all():
            raise InputError("Found only one stain; leave out `stain_norm=True`.")
        return cls(stains, strong)

    def normalise(self, patch: Pixels) -> Pixels:
        """Convert a patch (h, w, 3) to the reference colours."""
        change = (REFERENCE * (STRONG / self.strong)) @ np.linalg.pinv(self.stains)  # (3, 3) on density
        density = _DENSITY.astype(np.float32)[patch] @ change.T.astype(np.float32)
        return np.asarray(np.clip(LIGHT * np.exp(-density), 0, 255), dtype=np.uint8)
