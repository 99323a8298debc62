"""The encoder `tissue`: how much nuclear stain a patch has, in spots of which sizes, and how dark.

It has no weights. Stain is told from pink by fixed colours of haematoxylin and eosin (Ruifrok and Johnston,
"Quantification of histochemical staining by color deconvolution", 2001); spots are differences of blurs.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xmil.encoders import ENCODERS, Transform

NAME = "tissue"
HAEMATOXYLIN, EOSIN = (0.65, 0.70, 0.29), (0.07, 0.99, 0.11)  # optical density in red, green and blue
BLURS = (1, 3, 5, 9, 17, 33)  # pixels
LEVELS = (0.15, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3)  # of stain, for how dark it is
SPREAD = 8.0  # brings features to about 1


class NuclearStain(nn.Module):
    """Colours (b, 3, h, w) in [0, 1] to 2 x (5 x 3 + 7 + 2) features (b, 48)."""

    def forward(self, x: Tensor) -> Tensor:
        """For each stain its mean and spread, spots by size, and shares of pixels by darkness."""
        stains = unmix(x)  # (b, 2, h, w)
        blurred = [self._blurred(stains, edge) for edge in BLURS]
        features = [stains.mean(dim=(2, 3)), stains.std(dim=(2, 3))]
        for spots in (fine - coarse for fine, coarse in pairwise(blurred)):
            sides = [F.relu(spots).mean(dim=(2, 3)), F.relu(-spots).mean(dim=(2, 3))]
            features += [*sides, spots.std(dim=(2, 3))]
        features += [torch.sigmoid(20 * (blurred[1] - level)).mean(dim=(2, 3)) for level in LEVELS]
        return SPREAD * torch.cat(features, dim=1)

    @staticmethod
    def _blurred(x: Tensor, edge: int) -> Tensor:
        padded = F.pad(x, (edge // 2,) * 4, mode="reflect")
        rows = F.avg_pool2d(padded, (edge, 1), stride=1)
        return F.avg_pool2d(rows, (1, edge), stride=1)


def unmix(x: Tensor) -> Tensor:
    """Haematoxylin and eosin (b, 2, h, w) of colours in [0, 1], by least squares in optical density."""
    light = -torch.log10(x.clamp(1 / 255, 1.0))
    stains = torch.tensor((HAEMATOXYLIN, EOSIN), dtype=x.dtype, device=x.device)
    return torch.einsum("sc,bchw->bshw", torch.linalg.pinv(stains.T), light)


@ENCODERS.register(NAME)
def _tissue(weights: Path | None, random: bool) -> tuple[nn.Module, Transform]:  # noqa: ARG001  # a builder's signature
    return NuclearStain(), Transform(size=128, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
