"""An encoder: the mean colour of a patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from xmil.encoders import ENCODERS, Transform


class MeanColour(nn.Module):
    """(b, 3, h, w) to (b, 3)."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean over pixels."""
        return x.mean(dim=(2, 3))


@ENCODERS.register("mean_colour")
def build(weights: Path | None, random: bool) -> tuple[Any, Transform]:
    """No weights to load."""
    return MeanColour(), Transform(mean=(0, 0, 0), std=(1, 1, 1))
