"""Pen marks drawn on real slides: the share of inked patches that tiling leaves out, and of clean ones.

    python -m benchmarks.ink [FOLDER]      the folder of real data; XMIL_DATA by default
    python -m benchmarks.ink SLIDE...      slides of your own: other shapes, other seeds, other pens

Ink is a filter on the light: of each colour so much passes, to the power of its density, 0.8 to 1.4 for each
stroke. A patch is inked if a quarter of it is covered, clean if nothing is. Thresholds were chosen on
CMU-1-Small-Region and every other colon image, with the TCGA slide and the other images in view. Slides of
your own are a test apart: dots, rings and hatching in place of bent lines, and each pen's colour is drawn
anew around that of its kind.
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
from xmil.slides.backends.picture import PictureSlide
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


def drawn(
    picture: Picture, colour: str, rng: np.random.Generator, *, fresh: bool = False
) -> tuple[Picture, npt.NDArray[np.bool_]]:
    """The picture with two strokes of a pen, 150 to 300 µm wide, and where they are.

    `fresh`: shapes and pens that the thresholds never saw.
    """
    light, where = picture / 255.0, np.zeros(picture.shape[:2], dtype=bool)
    for _ in range(2):
        stroke = (_fresh if fresh else _stroke)(picture.shape[:2], rng)
        passes = np.array(INKS[colour]) * (rng.uniform(0.8, 1.2, size=3) if fresh else 1.0)
        light[stroke] *= np.power(passes, rng.uniform(0.8, 1.4))
        where |= stroke
    return np.asarray(np.rint(255 * light), dtype=np.uint8), where


def measure(picture: Picture, colour: str, seed: int = 0, *, fresh: bool = False) -> Rates:
    """Draw on a picture at 0.5 µm per pixel, tile it, and compare what was left out with what was drawn."""
    inked, where = drawn(picture, colour, np.random.default_rng(seed), fresh=fresh)
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


def held_out(paths: list[Path], seeds: range = range(100, 104)) -> None:
    """Print what becomes of fresh ink on slides that nothing was chosen on."""
    for path in paths:
        picture = half_micron(path)
        for colour in INKS:
            each = [measure(picture, colour, seed, fresh=True) for seed in seeds]
            print(f"{path.name[:28]:<28} {colour:<6} {_told(each)}")


def half_micron(path: Path) -> Picture:
    """The middle of a slide at 0.5 µm per pixel, at most 4,000 px wide; where no mpp is stored, as it is."""
    with open_slide(path) as slide:
        scale = MPP / (slide.mpp or MPP)
        size = [min(4000, int(edge / scale)) for edge in slide.dimensions]
        x, y = ((edge - s * scale) / 2 for edge, s in zip(slide.dimensions, size, strict=True))
        return slide.read_area((x, y, size[0] * scale, size[1] * scale), (size[0], size[1]))


def _told(each: list[Rates]) -> str:
    inked, found, clean, lost = (sum(getattr(r, k) for r in each) for k in vars(each[0]))
    return f"inked left out {found:>4} of {inked:<4} clean {lost:>3} of {clean}"


def main(data: Path) -> None:
    """Print the table."""
    for name in ("CMU-1-Small-Region.svs", "TCGA-CR-7395-01A-01-TS1.svs"):
        picture = level0(data / "slides" / name)
        for colour in INKS:
            each = [measure(picture, colour, seed) for seed in range(3)]
            print(f"{name:<28} {colour:<6} {_told(each)}")
    for odd in (False, True):
        shares = np.array([ink_share(density(p, 32)) for p in colon_patches(data / "colon", odd=odd)])
        side = "odd" if odd else "even"
        print(f"colon images, {side}: clean left out {(shares >= INKED).sum()} of {len(shares)}")


def _fresh(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """A ring, a row of dots, or hatching, in strokes of 120 to 350 µm."""
    y, x = np.mgrid[: shape[0], : shape[1]] * MPP
    (cy, cx), wide = rng.uniform(0.25, 0.75, size=2) * shape[:2] * MPP, rng.uniform(120, 350)
    kind = rng.integers(3)
    if kind == 0:
        return np.asarray(np.abs(np.hypot(x - cx, y - cy) - rng.uniform(200, 450)) < wide / 2)
    angle = rng.uniform(0, np.pi)
    along = (x - cx) * np.cos(angle) + (y - cy) * np.sin(angle)
    across = (y - cy) * np.cos(angle) - (x - cx) * np.sin(angle)
    if kind == 1:
        return np.asarray(np.hypot((along + wide) % (2 * wide) - wide, across) < wide / 2)
    return np.asarray((np.abs(across) < 400) & (along % (2.5 * wide) < wide))


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
    given = [Path(word) for word in sys.argv[1:]] or [Path(os.environ.get("XMIL_DATA", "../shared/data"))]
    main(given[0]) if given[0].is_dir() else held_out(given)
