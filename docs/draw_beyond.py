"""Draw images/beyond.png: sure and unsure signs, and patches that act together, on a made-up slide.

python docs/draw_beyond.py

The model is written by hand: tumour patches speak for the class, and more so beside immune cells. What the
picture shows is what the package finds in it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import xmil

OUT = Path(__file__).parent / "images" / "beyond.png"
ACROSS, DOWN, EDGE = 12, 8, 256


class Beside(nn.Module):
    """How much tumour, immune cells and stroma there is, summed, and the product of the first two."""

    def forward(self, x: Tensor) -> Tensor:
        """(1, n, 3) to two logits."""
        tumour, immune, stroma = x.sum(dim=1).split(1, dim=1)
        z = 0.2 * tumour + 0.04 * tumour * immune - 0.02 * stroma
        return torch.cat([-z, z], dim=1)


def made_up_bag() -> xmil.Bag:
    """A tumour, immune cells at its rim, stroma around, some noise everywhere."""
    rng = np.random.default_rng(3)
    places = np.stack(np.meshgrid(np.arange(ACROSS), np.arange(DOWN)), axis=-1).reshape(-1, 2)
    tumour = np.linalg.norm(places - (4, 3.5), axis=1) < 1.8
    immune = np.linalg.norm(places - (8, 4), axis=1) < 1.2
    kinds = np.stack([tumour, immune, ~(tumour | immune)], axis=1).astype(np.float32)
    features = kinds + rng.normal(scale=0.18, size=kinds.shape).astype(np.float32)
    return xmil.Bag(features, coords=places * EDGE, patch_size=EDGE, mpp=0.5, slide_id="made up")


def main() -> None:
    model, bag = Beside().eval(), made_up_bag()
    shapley = xmil.explain(model, bag, method="shapley", target=1, precision=None, permutations=200)
    contexts = xmil.explain(model, bag, method="lrp", target=1, contexts=24, keep=0.5)
    pairs = xmil.interactions(model, bag, target=1, top=20, by=shapley.scores, precision=None, draws=64)
    xmil.heatmap([shapley, contexts], pairs=pairs, size=700).write(OUT)


if __name__ == "__main__":
    main()
