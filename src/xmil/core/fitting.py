"""Patches brought to the size an encoder wants, by Pillow: without torch, so reading processes use it too."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Any

import numpy as np
import numpy.typing as npt

Patch = npt.NDArray[np.uint8]  # (height, width, 3)


@dataclass(frozen=True)
class PatchFit:
    """Resize the shorter edge to `size / crop` and cut the middle of `size`; without a size, nothing.

    >>> PatchFit(224)(np.zeros((256, 256, 3), dtype=np.uint8)).shape
    (224, 224, 3)
    """

    size: int | None = None
    crop: float = 1.0
    interpolation: str = "bilinear"

    def edge(self, patch: int) -> int:
        """The edge of what becomes of a square patch."""
        return self.size or patch

    def __call__(self, patch: Patch) -> Patch:
        """The patch as the encoder sees it."""
        from PIL import Image

        if self.size is None:
            return patch
        height, width = patch.shape[:2]
        edge = floor(self.size / self.crop)
        short = min(height, width)
        wanted = (int(edge * width / short), int(edge * height / short))
        if wanted != (width, height):
            kind: Any = getattr(Image.Resampling, self.interpolation.upper())
            patch = np.asarray(Image.fromarray(patch).resize(wanted, kind))
        top, left = (round((length - self.size) / 2.0) for length in patch.shape[:2])
        return patch[top : top + self.size, left : left + self.size]
