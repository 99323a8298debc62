"""Pyramidal slides with coloured squares at known places, and explanations of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from xmil.core.explanation import Explanation
from xmil.core.task import Target

tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
openslide = pytest.importorskip("openslide", reason="OpenSlide is not installed")


NEAR = 60  # a pixel this near to a square's colour belongs to it; mixtures at borders are farther away


def colours(n: int) -> np.ndarray:
    """Corners of a cube of colours: neighbours differ, and no mixture of two comes near to a third."""
    corners = np.array([[(i >> k & 1) * 180 for k in range(3)] for i in range(7)], dtype=np.uint8)
    return corners[np.arange(n) % 7]


def picture(size: tuple[int, int], boxes: np.ndarray) -> np.ndarray:
    """White, with a square for each box (x0, y0, x1, y1)."""
    pixels = np.full((size[1], size[0], 3), 255, dtype=np.uint8)
    for (x0, y0, x1, y1), colour in zip(boxes, colours(len(boxes)), strict=True):
        pixels[max(y0, 0) : y1, max(x0, 0) : x1] = colour
    return pixels


def reduced(pixels: np.ndarray, step: int) -> np.ndarray:
    """Means over step x step pixels; what is left over at the border is dropped, as scanners do."""
    height, width = pixels.shape[0] // step * step, pixels.shape[1] // step * step
    blocks = pixels[:height, :width].reshape(height // step, step, width // step, step, 3)
    return np.rint(blocks.mean(axis=(1, 3))).astype(np.uint8)


def write_tiff(
    path: Path,
    size: tuple[int, int],
    boxes: np.ndarray,
    *,
    mpp: float | None,
    steps: tuple[int, ...] = (2, 8),
) -> Path:
    """A tiled pyramid that OpenSlide reads as generic TIFF."""
    pixels = picture(size, boxes)
    options = {
        "tile": (256, 256),
        "photometric": "rgb",
        "compression": "zlib",
        "compressionargs": {"level": 1},
        "metadata": None,
    }
    with tifffile.TiffWriter(path) as file:
        for step in (1, *steps):
            level = pixels if step == 1 else reduced(pixels, step)
            scale = (
                {} if mpp is None else {"resolution": (1e4 / mpp / step,) * 2, "resolutionunit": "CENTIMETER"}
            )
            file.write(level, subfiletype=0 if step == 1 else 1, **options, **scale)
    return path


def write_scn(
    path: Path, size: tuple[int, int], boxes: np.ndarray, *, mpp: float, bounds: tuple[int, int, int, int]
) -> Path:
    """Leica's layout, the one with a bounds offset that can be written by hand: boxes are level-0 pixels."""
    pixels = picture(size, boxes)
    x, y, width, height = bounds
    scanned = pixels[y : y + height, x : x + width]
    nm = round(mpp * 1000)
    head = '<image name="i" uuid="u"><creationDate>2020-01-01T00:00:00Z</creationDate>'
    head += '<device model="m" version="1"/>'
    tail = (
        "<scanSettings><objectiveSettings><objective>{}</objective></objectiveSettings><illuminationSettings>"
        "<numericalAperture>0.65</numericalAperture><illuminationSource>brightfield</illuminationSource>"
        "</illuminationSettings></scanSettings></image>"
    )
    view = '<view sizeX="{}" sizeY="{}" offsetX="{}" offsetY="{}" spacingZ="0"/>'
    text = (
        '<?xml version="1.0"?><scn xmlns="http://www.leica-microsystems.com/scn/2010/10/01" uuid="u">'
        f'<collection name="c" uuid="u" sizeX="{size[0] * nm}" sizeY="{size[1] * nm}">'
        f'{head}<pixels sizeX="100" sizeY="80"><dimension sizeX="100" sizeY="80" r="0" ifd="0"/></pixels>'
        f"{view.format(size[0] * nm, size[1] * nm, 0, 0)}{tail.format(1)}"
        f'{head}<pixels sizeX="{width}" sizeY="{height}">'
        f'<dimension sizeX="{width}" sizeY="{height}" r="0" ifd="1"/>'
        f'<dimension sizeX="{width // 4}" sizeY="{height // 4}" r="1" ifd="2"/></pixels>'
        f"{view.format(width * nm, height * nm, x * nm, y * nm)}{tail.format(40)}</collection></scn>"
    )
    options = {
        "tile": (256, 256),
        "photometric": "rgb",
        "compression": "zlib",
        "compressionargs": {"level": 1},
        "metadata": None,
    }
    scale = {"resolution": (1e4 / mpp,) * 2, "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        file.write(np.full((80, 100, 3), 200, np.uint8), description=text, **options)
        file.write(scanned, **options, **scale)
        file.write(reduced(scanned, 4), **options)
    return path


def grid(
    columns: int, rows: int, edge: int, *, stride: int | None = None, at: tuple[int, int] = (0, 0)
) -> np.ndarray:
    """Corners of a grid of patches."""
    x, y = np.meshgrid(np.arange(columns), np.arange(rows))
    return np.stack([x.ravel(), y.ravel()], axis=1) * (stride or edge) + at


def boxes_of(xy: np.ndarray, edge: int) -> np.ndarray:
    return np.concatenate([xy, xy + edge], axis=1)


def explanation(
    xy: np.ndarray | None,
    edge: int | None,
    *,
    scores: np.ndarray | None = None,
    method: str = "lrp",
    signed: bool = True,
    name: str = "HPV+",
    **more: object,
) -> Explanation:
    """An explanation with scores that all differ; zero is not among them."""
    n = len(xy) if xy is not None else len(more["raw_coords"])  # type: ignore[arg-type]
    values = np.linspace(-1, 1, 2 * n)[::2] + 1 / (2 * n) if scores is None else scores
    return Explanation(
        np.asarray(values, dtype=np.float32),
        np.array([0.2, 1.4], dtype=np.float32),
        1.4,
        method,
        Target(1, name=name),
        signed,
        bag=str(more.pop("bag", "s1")),
        coords=xy,
        patch_size=edge,
        **more,  # type: ignore[arg-type]
    )


def extent(mask: np.ndarray) -> tuple[int, int, int, int]:
    """x0, y0, x1, y1 of what is set."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def seen(thumbnail: np.ndarray, i: int, n: int, around: np.ndarray) -> tuple[int, int, int, int]:
    """The extent of the i-th square in a picture of the slide, looked for around a place (x0, y0, x1, y1)."""
    margin = (around[2] - around[0]) * 0.3 + 2
    x0, y0 = np.maximum(around[:2] - margin, 0).astype(int)
    x1, y1 = np.ceil(around[2:] + margin).astype(int)
    far = np.linalg.norm(thumbnail[y0:y1, x0:x1].astype(np.float32) - colours(n)[i], axis=-1)
    left, top, right, bottom = extent(far <= NEAR)
    return left + int(x0), top + int(y0), right + int(x0), bottom + int(y0)
