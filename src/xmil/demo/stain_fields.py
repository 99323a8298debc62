"""The encoder `digits`: how much stain lies on each of 8 x 8 fields of a tile.

It has no weights, so that it needs no download. Installed packages find it through the entry points of
`xmil.encoders`, as they would find an encoder of yours.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xmil.core.bag import FloatArray
from xmil.demo.digit_slides import EOSIN, HAEMATOXYLIN, INK, TILE, draw_tiles, known_digits
from xmil.encoders import ENCODERS, Transform, load_encoder

NAME = "digits"
FIELDS = 8
SPAN = 2.0  # the value of full stain; glass and plain tissue are near 0
BATCH = 128


class StainFields(nn.Module):
    """Grey values (b, 3, 256, 256) in [0, 1] to the stain of 64 fields (b, 64)."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean over each field, as a share of the way from eosin to haematoxylin."""
        edge = (TILE - INK) // 2
        grey = x.mean(dim=1, keepdim=True)[..., edge : TILE - edge, edge : TILE - edge]
        fields = F.adaptive_avg_pool2d(grey, FIELDS).flatten(1)
        plain, full = sum(EOSIN) / 765, sum(HAEMATOXYLIN) / 765
        return SPAN * (plain - fields) / (plain - full)


@ENCODERS.register(NAME)
def _digits(weights: Path | None, random: bool) -> tuple[nn.Module, Transform]:  # noqa: ARG001  # a builder's signature
    return StainFields(), Transform(size=TILE, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


@lru_cache(maxsize=1)
def encode_digits() -> FloatArray:
    """Features (1797, 64) of every digit's tile, by the encoder that `xmil embed --encoder digits` runs."""
    encoder = load_encoder(NAME)
    rows = np.arange(len(known_digits()[1]))
    batches = np.split(rows, range(BATCH, len(rows), BATCH))
    tiles = (torch.stack([encoder.transform(tile) for tile in draw_tiles(batch)]) for batch in batches)
    return np.concatenate([encoder(batch).numpy() for batch in tiles])
