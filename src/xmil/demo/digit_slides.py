"""Digit slides: pyramidal TIFFs in which each 256-px tile is a handwritten digit, stained like tissue.

The digits are scikit-learn's. A tile only depends on its digit, and compression is lossless: a tile read from
a slide is bit for bit the tile that was drawn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from xmil.bench import BAG_SIZE, TASKS, draw_digits, sklearn_images
from xmil.core.durable import write_atomically, write_text
from xmil.storage import write_table

TILE = 256  # edge of a tile in pixels
INK = 208  # edge of the digit inside its tile
MPP = 0.5  # microns per pixel
GRID = (8, 7)  # tiles of a slide, across and down; tiles without a digit are glass
MARGIN = 1  # glass tiles around the grid
DOWNSAMPLES = (1, 4, 16)
GLASS = (243, 242, 244)
EOSIN, HAEMATOXYLIN = (226, 158, 194), (88, 48, 128)
TEXTURE = 7.0  # standard deviation of the tissue's texture, in grey values

Image = npt.NDArray[np.uint8]
Cells = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DigitSlide:
    """The digits of a slide as rows of scikit-learn's set, and the cell (column, row) of each, row by row."""

    name: str
    rows: Rows
    cells: Cells

    @property
    def digits(self) -> Rows:
        """The digit of each tile."""
        return sklearn_images()[1][self.rows]

    @property
    def coords(self) -> Cells:
        """Top-left corners in level-0 pixels."""
        return (self.cells + MARGIN) * TILE


def place_digits(name: str, rows: npt.ArrayLike, *, seed: int) -> DigitSlide:
    """Place digits on the cells of tissue with a random outline, in the order in which tiles are read.

    >>> slide = place_digits("one", [0, 1, 2], seed=0)
    >>> slide.digits.tolist(), slide.coords.shape
    ([0, 1, 2], (3, 2))
    """
    digits = np.asarray(rows, dtype=np.int64)
    rng = np.random.default_rng(seed)
    cells = np.stack(np.meshgrid(np.arange(GRID[0]), np.arange(GRID[1])), axis=-1).reshape(-1, 2)
    distance = np.linalg.norm((cells - (np.array(GRID) - 1) / 2) / np.array(GRID), axis=1)
    nearest = np.sort(np.argsort(distance + rng.normal(scale=0.04, size=len(cells)))[: len(digits)])
    return DigitSlide(name, digits, cells[nearest])


def write_digit_slide(path: Path, slide: DigitSlide) -> None:
    """Write a slide atomically as a tiled, pyramidal TIFF that OpenSlide and tifffile read."""
    from PIL import Image as Pictures

    image = Pictures.fromarray(draw_slide(slide))
    sizes = [(image.width // scale, image.height // scale) for scale in DOWNSAMPLES]
    pixels = [np.asarray(image.resize(size, Pictures.Resampling.BOX)) for size in sizes]
    levels = dict(zip(DOWNSAMPLES, pixels, strict=True))
    write_levels(path, levels, mpp=MPP, description="A digit slide of xmil demo")


def write_levels(
    path: Path, levels: dict[int, Image], *, mpp: float, description: str | None = None, effort: int = 6
) -> None:
    """Write the levels of a slide, by downsampling from 1 up, atomically as a tiled TIFF."""
    import tifffile

    def write(temporary: str) -> None:
        with tifffile.TiffWriter(temporary) as file:
            for scale, level in levels.items():
                file.write(
                    level,
                    photometric="rgb",
                    tile=(TILE, TILE),
                    compression="zlib",
                    compressionargs={"level": effort},
                    subfiletype=int(scale > 1),
                    resolution=(1e4 / (mpp * scale),) * 2,
                    resolutionunit="CENTIMETER",
                    description=description if scale == 1 else None,
                    metadata=None,
                )

    write_atomically(path, write)


def draw_slide(slide: DigitSlide) -> Image:
    """Draw the pixels (h, w, 3) of a slide at full resolution."""
    width, height = (TILE * (side + 2 * MARGIN) for side in GRID)
    image = np.full((height, width, 3), GLASS, dtype=np.uint8)
    for row, (x0, y0) in zip(slide.rows, slide.coords, strict=True):
        image[y0 : y0 + TILE, x0 : x0 + TILE] = draw_tile(int(row))
    return image


@lru_cache(maxsize=256)
def draw_tile(row: int) -> Image:
    """Draw a digit of scikit-learn's set in purple on pink, with fibres that depend on the digit."""
    from PIL import Image as Pictures

    small = Pictures.fromarray(sklearn_images()[0][row].astype(np.float32))
    large = np.clip(np.asarray(small.resize((INK, INK), Pictures.Resampling.BICUBIC)) / 16.0, 0.0, 1.0)
    stain = np.pad(large, (TILE - INK) // 2)[..., None]
    plain, full = np.array(EOSIN, dtype=np.float32), np.array(HAEMATOXYLIN, dtype=np.float32)
    colour = plain + stain * (full - plain)
    texture = np.rot90(_streaks(row % 16), row // 16 % 4)  # the same each time for the same digit
    tile: Image = np.clip(colour + texture[..., None], 0, 255).astype(np.uint8)
    tile.setflags(write=False)
    return tile


@lru_cache(maxsize=16)
def _streaks(seed: int) -> npt.NDArray[np.float32]:
    """Soft streaks (256, 256) that look like fibres."""
    from PIL import Image as Pictures

    noise = np.random.default_rng(seed).normal(size=(18, 48)).astype(np.float32)
    wide = Pictures.fromarray(noise).resize((TILE * 3 // 2,) * 2, Pictures.Resampling.BICUBIC)
    turned = np.asarray(wide.rotate(seed * 37.0, Pictures.Resampling.BILINEAR), dtype=np.float32)
    edge = TILE // 4  # cut away the corners that the rotation left empty
    streaks: npt.NDArray[np.float32] = turned[edge : edge + TILE, edge : edge + TILE] * TEXTURE
    return streaks


TASK_NAMES = ("pos_neg", "adjacent_pairs")
CLASS_NAMES = ("no", "yes")
QUESTIONS = {
    "pos_neg": "More kinds of 4, 6, 8 than of 5, 7, 9?",
    "adjacent_pairs": "Are 0 and 1, 1 and 2, 2 and 3, or 3 and 4 both there?",
}
POOLS = {"train": (0, 1, 2, 4, 5, 6), "val": (3,), "test": (7,), "slide": (7,)}  # digits by row modulo 8
SEEDS = {"train": 0, "val": 1, "test": 2, "slide": 3}


def draw_bags(split: str, n_bags: int, *, seed: int) -> list[DigitSlide]:
    """Draw the bags of a split (train, val, test, or slide), each with the layout of a slide.

    >>> [bag] = draw_bags("slide", 1, seed=0)
    >>> bag.name, len(bag.digits)
    ('slide-000', 30)
    """
    rng = np.random.default_rng((seed, SEEDS[split]))
    pool = np.flatnonzero(np.isin(np.arange(len(sklearn_images()[1])) % 8, POOLS[split]))
    digits = sklearn_images()[1][pool]
    bags = []
    for i, numbers in enumerate(draw_digits(rng, n_bags, BAG_SIZE)):
        rows = np.array([rng.choice(pool[digits == number]) for number in numbers])
        bags.append(place_digits(f"{split}-{i:03d}", rows, seed=int(rng.integers(2**31))))
    return bags


def labels(slide: DigitSlide) -> dict[str, str]:
    """The class of a slide in each task, by name."""
    return {name: CLASS_NAMES[int(TASKS[name].label(slide.digits))] for name in TASK_NAMES}


def evidence(slide: DigitSlide, task: str) -> Rows:
    """The true evidence (n,) for "yes": +1, -1 or 0 for each digit."""
    signs: Rows = TASKS[task].evidence(slide.digits)[1].astype(np.int64)
    return signs


def most_instructive(slides: Sequence[DigitSlide], task: str) -> DigitSlide:
    """Pick the slide with the most tiles of its rarest kind: for, against (if any), neither."""
    kinds = (-1, 0, 1) if task == "pos_neg" else (0, 1)
    return max(slides, key=lambda slide: min(int((evidence(slide, task) == kind).sum()) for kind in kinds))


def write_cohort(path: Path, splits: dict[str, Sequence[DigitSlide]]) -> None:
    """Write a table of all bags: slide, split, and a column of labels for each task."""
    rows = [
        (slide.name, slide.name, split, *labels(slide).values())
        for split, slides in splits.items()
        for slide in slides
    ]
    write_table(path, ["slide_id", "case_id", "split", *TASK_NAMES], rows)


def write_truth(folder: Path, slide: DigitSlide, task: str) -> None:
    """Write the evidence of every tile as a table (`xmil evaluate --truth`) and as polygons for QuPath."""
    (folder / "qupath").mkdir(parents=True, exist_ok=True)
    rows = np.column_stack([slide.coords, slide.digits, evidence(slide, task)]).tolist()
    write_table(folder / f"{slide.name}.csv", ["x0", "y0", "digit", "evidence"], rows)
    shapes = []
    for x, y, digit, sign in (row for row in rows if row[-1]):
        ring = [[x, y], [x + TILE, y], [x + TILE, y + TILE], [x, y + TILE], [x, y]]
        name, colour = ("supports", [178, 24, 43]) if sign > 0 else ("refutes", [33, 102, 172])
        kind = {"name": name, "color": colour}
        shapes.append(
            {
                "type": "Feature",
                "geometry": {"type": "Polygon", "coordinates": [ring]},
                "properties": {"objectType": "annotation", "name": str(digit), "classification": kind},
            }
        )
    collection = {"type": "FeatureCollection", "features": shapes}
    write_text(folder / "qupath" / f"{slide.name}.geojson", json.dumps(collection))
