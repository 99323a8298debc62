"""Draw docs/images/inside.png: nuclei speak for, stroma against, inside patches of drawn tissue.

PYTHONPATH=. python docs/draw_inside.py

Encoder and model are written by hand, so that one sees whether the maps lie where they must: dark blue-violet
pixels count for the class, pink ones against it. `--slide` takes a slide of your own.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import xmil
from xmil.encoders.encoder import Encoder, Transform

IMAGE = Path(__file__).parent / "images" / "inside.png"
EDGE, WIDTH = 128, 1400


class Stains(nn.Module):
    """How much violet and how much pink there is, by places of 8 px, then the mean over places."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(8)

    def forward(self, x: Tensor) -> Tensor:
        """(b, 3, h, w) with colours in 0 to 1, to (b, 2)."""
        red, green = x[:, :1], x[:, 1:2]
        stains = torch.cat([torch.relu(0.5 - red), torch.relu(red - green - 0.15)], dim=1)
        return self.pool(stains).mean(dim=(2, 3))


class Balance(nn.Module):
    """The mean over patches of violet minus a quarter of pink, as the second of two logits."""

    def forward(self, x: Tensor) -> Tensor:
        """(1, n, 2) to (1, 2)."""
        z = 4 * x[..., 0].mean(dim=1) - x[..., 1].mean(dim=1)
        return torch.stack([-z, z], dim=1)


def main() -> None:
    """Look into the patches that speak most, for and against."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--slide", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        draw(args.slide or drawn(Path(folder)))


def drawn(folder: Path) -> Path:
    """A slide of drawn tissue with nests of dark nuclei."""
    from tests.viewer.tissue import draw_tissue

    path = folder / "tissue.png"
    Image.fromarray(draw_tissue(4, tumour=True)[0]).save(path)
    return path


def draw(path: Path) -> None:
    """Look into the patches of a slide."""
    encoder = Encoder("stains", 2, Stains(), Transform(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)))
    with xmil.open_slide(path) as slide:
        width, height = slide.dimensions
        corners = np.array(
            [(x, y) for y in range(0, height - EDGE, EDGE) for x in range(0, width - EDGE, EDGE)]
        )
        cut = [slide.read_area((int(x), int(y), EDGE, EDGE), (EDGE, EDGE)) for x, y in corners]
        features = encoder(torch.stack([encoder.transform(patch) for patch in cut])).numpy()
        bag = xmil.Bag(features, coords=corners, patch_size=EDGE, mpp=slide.mpp, slide_id="Drawn tissue")
        e = xmil.explain(Balance(), bag, method="lrp", target=1, feature_level=True, baseline=None)
        order = np.argsort(-e.scores)
        found = xmil.explain_inside(None, encoder, slide, e, patches=[*order[:4], *order[-4:]], patch_px=EDGE)
        found.plot(slide).write(IMAGE)
    picture = Image.open(IMAGE).convert("RGB")
    size = (WIDTH, round(WIDTH * picture.height / picture.width))
    picture.resize(size, Image.Resampling.LANCZOS).save(IMAGE, optimize=True)


if __name__ == "__main__":
    main()
