"""The demonstration's encoders, `digits` and `tissue`; without weights, so that they need no download.

They are registered through the entry points of `xmil.encoders`, like those of plugins. `digits` measures the
stain in each of 8 x 8 fields of a tile. `tissue` measures the amount, spot sizes and darkness of nuclear
stain in a patch: fixed colours of haematoxylin and eosin separate the stains (Ruifrok and Johnston,
"Quantification of histochemical staining by color deconvolution", 2001), and spots are differences of blurs.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xmil.bench import sklearn_images
from xmil.core.bag import FloatArray
from xmil.demo.digit_slides import EOSIN, HAEMATOXYLIN, INK, TILE, draw_tile
from xmil.encoders import ENCODERS, Transform, load_encoder

DIGITS = "digits"
FIELDS = 8
SPAN = 2.0  # the value of full stain; glass and plain tissue are near 0
BATCH = 128
STAINS = ((0.65, 0.70, 0.29), (0.07, 0.99, 0.11))  # optical density of haematoxylin and eosin in RGB
BLURS = (1, 3, 5, 9, 17, 33)  # pixels
LEVELS = (0.15, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3)  # thresholds of stain
SPREAD = 8.0  # scales features to about 1


class StainFields(nn.Module):
    """Grey values (b, 3, 256, 256) in [0, 1] to the stain of 64 fields (b, 64)."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean stain of each field, from eosin (0) to haematoxylin (`SPAN`)."""
        edge = (TILE - INK) // 2
        grey = x.mean(dim=1, keepdim=True)[..., edge : TILE - edge, edge : TILE - edge]
        fields = F.adaptive_avg_pool2d(grey, FIELDS).flatten(1)
        plain, full = sum(EOSIN) / 765, sum(HAEMATOXYLIN) / 765
        return SPAN * (plain - fields) / (plain - full)


@ENCODERS.register(DIGITS)
def _digits(weights: Path | None, random: bool) -> tuple[nn.Module, Transform]:  # noqa: ARG001  # a builder's signature
    return StainFields(), Transform(size=TILE, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


@lru_cache(maxsize=1)
def encode_digits() -> FloatArray:
    """Features (1797, 64) of every digit's tile, from the encoder of `xmil embed --encoder digits`."""
    encoder = load_encoder(DIGITS)
    n = len(sklearn_images()[1])
    batches = (range(i, min(i + BATCH, n)) for i in range(0, n, BATCH))
    tiles = (torch.stack([encoder.transform(draw_tile(row)) for row in batch]) for batch in batches)
    return np.concatenate([encoder(batch).numpy() for batch in tiles])


class NuclearStain(nn.Module):
    """Colours (b, 3, h, w) in [0, 1] to 2 x (5 x 3 + 7 + 2) features (b, 48)."""

    def forward(self, x: Tensor) -> Tensor:
        """For each stain: mean and spread, spots by size, and shares of pixels by darkness."""
        stains = unmix(x)  # (b, 2, h, w)
        blurred = [self._blurred(stains, edge) for edge in BLURS]
        features = [stains.mean(dim=(2, 3)), stains.std(dim=(2, 3))]
        for spots in (fine - coarse for fine, coarse in pairwise(blurred)):
            by_sign = [F.relu(spots).mean(dim=(2, 3)), F.relu(-spots).mean(dim=(2, 3))]
            features += [*by_sign, spots.std(dim=(2, 3))]
        features += [torch.sigmoid(20 * (blurred[1] - level)).mean(dim=(2, 3)) for level in LEVELS]
        return SPREAD * torch.cat(features, dim=1)

    @staticmethod
    def _blurred(x: Tensor, edge: int) -> Tensor:
        padded = F.pad(x, (edge // 2,) * 4, mode="reflect")
        rows = F.avg_pool2d(padded, (edge, 1), stride=1)
        return F.avg_pool2d(rows, (1, edge), stride=1)


def unmix(x: Tensor) -> Tensor:
    """Separate colours in [0, 1] into haematoxylin and eosin (b, 2, h, w), by least squares in density."""
    light = -torch.log10(x.clamp(1 / 255, 1.0))
    stains = torch.tensor(STAINS, dtype=x.dtype, device=x.device)
    return torch.einsum("sc,bchw->bshw", torch.linalg.pinv(stains.T), light)


@ENCODERS.register("tissue")
def _tissue(weights: Path | None, random: bool) -> tuple[nn.Module, Transform]:  # noqa: ARG001  # a builder's signature
    return NuclearStain(), Transform(size=128, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
