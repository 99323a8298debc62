"""Draw docs/images/inside.png: what inside the patches of a public slide speaks for epithelium.

python docs/draw_inside.py --data PREPARED --work OUT --slide CMU-1-Small-Region.svs

PREPARED and OUT are the folders of `python -m benchmarks.inside`; AttnMIL is trained on all colon images of
the study, and looks at another slide of another tissue.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from benchmarks.inside.jobs import images_of, network_of
from benchmarks.inside.measure import fit
from benchmarks.inside.pictures import SEEN, TILE

import xmil
from xmil.encoders.encoder import Encoder, Transform

IMAGE = Path(__file__).parent / "images" / "inside.png"


def tissue_corners(slide: xmil.Slide, step: int) -> np.ndarray:
    """Corners of patches that are not mostly glass."""
    width, height = slide.dimensions
    places = [(x, y) for y in range(0, height - TILE, step) for x in range(0, width - TILE, step)]
    dark = [slide.read_area((x, y, TILE, TILE), (8, 8)).mean() < 200 for x, y in places]
    return np.array(places)[np.array(dark)]


def main() -> None:
    """Train, look, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--slide", type=Path, required=True)
    parser.add_argument("--step", type=int, default=288)
    parser.add_argument("--out", type=Path, default=IMAGE)
    args = parser.parse_args()
    net = network_of("resnet18", str(args.data), str(args.work), "cpu")
    encoder = Encoder("resnet18", 512, net, Transform(size=SEEN))
    model = fit(images_of("resnet18", str(args.work)), seed=0)
    with xmil.open_slide(args.slide) as slide:
        corners = tissue_corners(slide, args.step)
        patches = [slide.read_area((int(x), int(y), TILE, TILE), (TILE, TILE)) for x, y in corners]
        parts = torch.stack([encoder.transform(patch) for patch in patches]).split(16)
        features = torch.cat([encoder(part) for part in parts]).numpy()
        bag = xmil.Bag(features, coords=corners, patch_size=TILE, mpp=slide.mpp, slide_id=args.slide.stem)
        e = xmil.explain(model, bag, method="lrp", target=1, preset="exact", feature_level=True)
        order = np.argsort(-e.scores)
        rows = [*order[:8], *order[-4:]]
        found = xmil.explain_inside(model, encoder, slide, e, patches=rows, patch_px=TILE)
        found.plot(slide).write(args.out)


if __name__ == "__main__":
    main()
