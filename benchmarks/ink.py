"""Pen marks drawn on real slides: the share of inked patches that tiling leaves out, and of clean ones.

    python -m benchmarks.ink [FOLDER]      the folder of real data; XMIL_DATA by default

Ink is a filter on the light: of each colour so much passes, to the power of its density, 0.8 to 1.4 for each
stroke. A patch is inked if a quarter of it is covered, clean if nothing is. Thresholds were chosen on
CMU-1-Small-Region and every other colon image; the TCGA slide and the other images are the test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage

from xmil.slides import open_slide
from xmil.slides.artefacts import INKED, density, ink_share
from xmil.slides.backends.pictures import PictureSlide
from xmil.slides.tiling import TileSettings, grid, tile_slide

INKS = {  # light that passes, of red, green and blue
    "blue": (0.18, 0.30, 0.80),
    "green": (0.15, 0.60, 0.30),
    "black": (0.12, 0.12, 0.13),
    "red": (0.85, 0.12, 0.15),
}
COVERED = 0.25
MPP = 0.5
Picture = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Rates:
    """Patches of one slide: inked and of these left out, clean and of these left out."""

    inked: int
    found: int
    clean: int
    lost: int


def drawn(picture: Picture, colour: str, rng: np.random.Generator) -> tuple[Picture, npt.NDArray[np.bool_]]:
    """The picture with two strokes of a pen, 150 to 300 µm wide, and where they are."""
    light, where = picture / 255.0, np.zeros(picture.shape[:2], dtype=bool)
    for _ in range(2):
        stroke = _stroke(picture.shape[:2], rng)
        light[stroke] *= np.power(INKS[colour], rng.uniform(0.8, 1.4))
        where |= stroke
    return np.asarray(np.rint(255 * light), dtype=np.uint8), where


def measure(picture: Picture, colour: str, seed: int = 0) -> Rates:
    """Draw on a picture at 0.5 µm per pixel, tile it, and compare what was left out with what was drawn."""
    inked, where = drawn(picture, colour, np.random.default_rng(seed))
    slide = PictureSlide(Path("drawn.png"), inked, kind="PNG")
    tiling = tile_slide(slide, TileSettings(slide_mpp=MPP))
    total = np.pad(where.astype(np.float64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    kept, left = (_covered(total, corners, tiling.edge0) for corners in (tiling.xy0, tiling.artefacts["pen"]))
    return Rates(
        inked=int((kept >= COVERED).sum() + (left >= COVERED).sum()),
        found=int((left >= COVERED).sum()),
        clean=int((kept == 0).sum() + (left == 0).sum()),
        lost=int((left == 0).sum()),
    )


def level0(path: Path) -> Picture:
    """All pixels of a small slide."""
    with open_slide(path) as slide:
        return slide.read_area((0, 0, *slide.dimensions), slide.dimensions)


def colon_patches(folder: Path, *, odd: bool) -> Iterator[Picture]:
    """Quarters of every other colon image: clean tissue."""
    for path in sorted(folder.glob("*.jpg"))[int(odd) :: 2]:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        for x, y in grid((0, 0, pixels.shape[1], pixels.shape[0]), 250, 250).tolist():
            yield pixels[y : y + 250, x : x + 250]


def main(data: Path) -> None:
    """Print the table."""
    for name in ("CMU-1-Small-Region.svs", "TCGA-CR-7395-01A-01-TS1.svs"):
        picture = level0(data / "slides" / name)
        for colour in INKS:
            each = [measure(picture, colour, seed) for seed in range(3)]
            inked, found, clean, lost = (sum(getattr(r, k) for r in each) for k in vars(each[0]))
            print(
                f"{name:<28} {colour:<6} inked left out {found:>4} of {inked:<4} clean {lost:>3} of {clean}"
            )
    for odd in (False, True):
        shares = np.array([ink_share(density(p, 32)) for p in colon_patches(data / "colon", odd=odd)])
        side = "odd" if odd else "even"
        print(f"colon images, {side}: clean left out {(shares >= INKED).sum()} of {len(shares)}")


def _stroke(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """A bent line across the picture."""
    points = rng.uniform(0.1, 0.9, size=(4, 2)) * shape[:2]
    t = np.linspace(0, 1, 400)[:, None]
    a, b, c, d = points
    curve = (1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t**2 * c + t**3 * d
    small = np.ones((shape[0] // 8 + 1, shape[1] // 8 + 1), dtype=bool)
    small[tuple((curve / 8).astype(int).T)] = False
    near = ndimage.distance_transform_edt(small) * 8 * MPP <= rng.uniform(75, 150)
    return np.asarray(np.kron(near, np.ones((8, 8), dtype=bool))[: shape[0], : shape[1]])


def _covered(
    total: npt.NDArray[np.float64], xy0: npt.NDArray[np.int64], edge: int
) -> npt.NDArray[np.float64]:
    """The covered share of each square, from sums of the mask."""
    x, y = xy0[:, 0], xy0[:, 1]
    inside = total[y + edge, x + edge] - total[y, x + edge] - total[y + edge, x] + total[y, x]
    return np.asarray(inside / edge**2)


if __name__ == "__main__":
    place = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("XMIL_DATA", "../shared/data")
    main(Path(place))
