"""What an encoder wants of a patch: its size, and how colours are scaled.

Cutting and resizing happen patch by patch in the readers' threads and stay in uint8; scaling happens batch by
batch where the encoder runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.core.errors import InputError

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
FILTERS = ("nearest", "bilinear", "bicubic", "lanczos")


@dataclass(frozen=True)
class Transform:
    """Resize the shorter edge to `size / crop`, cut the middle of `size`, scale by mean and std.

    Without a size, patches keep theirs.

    >>> tuple(Transform(size=224)(np.zeros((256, 256, 3), dtype=np.uint8)).shape)
    (3, 224, 224)
    """

    size: int | None = None
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]
    crop: float = 1.0
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise InputError("An encoder's mean and std are three numbers each, std above zero.")
        if self.interpolation not in FILTERS:
            raise InputError(f"The interpolation must be one of {', '.join(FILTERS)}.")

    def __call__(self, patch: npt.NDArray[np.uint8]) -> Tensor:
        """A patch (h, w, 3) in uint8 as the encoder sees it: (3, size, size), still in uint8."""
        pixels = patch if self.size is None else self._resized(patch)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    def scaled(self, batch: Tensor) -> Tensor:
        """A batch in uint8 as numbers around zero; batches of floats are passed on."""
        if batch.dtype != torch.uint8:
            return batch
        mean, std = (
            torch.tensor(values, device=batch.device).view(3, 1, 1) for values in (self.mean, self.std)
        )
        return (batch.float() / 255 - mean) / std

    def _resized(self, patch: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        from PIL import Image

        assert self.size is not None  # noqa: S101  # narrows the type for mypy
        height, width = patch.shape[:2]
        edge = floor(self.size / self.crop)
        short = min(height, width)
        wanted = (int(edge * width / short), int(edge * height / short))
        if wanted != (width, height):
            kind: Any = getattr(Image.Resampling, self.interpolation.upper())
            patch = np.asarray(Image.fromarray(patch).resize(wanted, kind))
        top, left = (round((length - self.size) / 2.0) for length in patch.shape[:2])
        return patch[top : top + self.size, left : left + self.size]
