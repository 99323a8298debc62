"""Find artefacts by patch: pen marks, folds, blur, the edge of the coverslip.

Patches are divided into cells of a few microns, in optical density (Beer and Lambert: the densities of layers
add up). Haematoxylin and eosin absorb most light in green. Blue and green ink absorb more in red, black ink
equally in all colours, red ink as much in blue as in green: if enough cells do so strongly, the patch is
inked. A fold is two layers of tissue, far denser than the slide's usual tissue. Blur has little detail at the
size of a pixel, relative to its contrast. A coverslip's edge is a thin, dark, colourless, straight line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from xmil.slides.slide import Pixels

Floats = npt.NDArray[np.float64]
KINDS = ("pen", "fold", "blur", "coverslip")
CELLS = 32  # across a patch, for ink and lines
COARSE = 8  # across a patch, for density
INKED = 0.15  # share of inked cells that makes a patch inked
FOLDED = 0.25  # share of far denser coarse cells that makes a patch folded
DENSE = 3.0  # robust standard deviations above the slide's median density
SHARPEST_BLUR = 0.045  # a patch with less detail per contrast is blurred
LINE_DARKER, LINE_GREY = 0.12, 0.12  # optical density: above its surroundings; range of the colours
LINE_STRAIGHT, LINE_LONG = 0.85, 0.9  # share of cells within one cell of the line; length in patch edges
GREY = np.array([0.299, 0.587, 0.114])  # of red, green and blue


@dataclass(frozen=True)
class PatchLook:
    """Measures of one patch; to find folds, compare the density of all patches of a slide."""

    ink: float
    detail: float
    line: bool
    density: Floats

    @classmethod
    def at(cls, patch: Pixels) -> PatchLook:
        """Measure the pixels of a patch."""
        fine, coarse = density(patch, CELLS), density(patch, COARSE)
        return cls(ink_share(fine), detail(patch), has_line(fine), coarse.sum(axis=2).ravel())


def find_artefacts(looks: Sequence[PatchLook]) -> dict[str, npt.NDArray[np.bool_]]:
    """Find the patches of a slide that show each kind of artefact."""
    inked = np.array([look.ink >= INKED for look in looks], dtype=np.bool_)
    folded = np.zeros(len(looks), dtype=np.bool_)
    if not inked.all():
        densities = np.concatenate([look.density for look, ink in zip(looks, inked, strict=True) if not ink])
        median = float(np.median(densities))
        limit = median + DENSE * 1.4826 * float(np.median(np.abs(densities - median)))
        folded = np.array([np.mean(look.density > limit) >= FOLDED for look in looks], dtype=np.bool_)
    return {
        "pen": inked,
        "fold": folded & ~inked,
        "blur": np.array([look.detail < SHARPEST_BLUR for look in looks], dtype=np.bool_) & ~inked,
        "coverslip": np.array([look.line for look in looks], dtype=np.bool_) & ~inked,
    }


def density(patch: Pixels, cells: int) -> Floats:
    """Optical density (cells, cells, 3) of the mean light of each cell."""
    light = patch.astype(np.float64)
    for axis, edge in enumerate(patch.shape[:2]):
        edges = np.linspace(0, edge, min(cells, edge) + 1).astype(int)
        counts = np.diff(edges).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        light = np.add.reduceat(light, edges[:-1], axis=axis) / counts
    return np.asarray(-np.log10(np.clip(light, 1, 255) / 255))


def ink_share(cells: Floats) -> float:
    """The share of cells (h, w, 3), in optical density, covered by ink of any colour.

    >>> blue, tissue = np.full((1, 1, 3), (1.7, 1.2, 0.2)), np.full((1, 1, 3), (0.4, 0.8, 0.4))
    >>> ink_share(blue), ink_share(tissue)
    (1.0, 0.0)
    """
    r, g, b = np.moveaxis(cells, -1, 0)
    total = r + g + b + 0.1
    low, high = cells.min(axis=-1), cells.max(axis=-1)
    blue = (r > 0.5) & (r - b > 0.13 * total) & (r > 0.8 * g)
    green = (r > 0.5) & (r > g) & (b - g > -0.06 * total)
    red = (g > 0.6) & (b - g > -0.14 * total) & (r - b < -0.16 * total)
    black = (low > 0.55) & (low > 0.6 * high)
    return float(np.mean(blue | green | red | black))


def detail(patch: Pixels) -> float:
    """Detail at the size of a pixel relative to the contrast of the patch, in grey values."""
    grey = patch @ GREY
    fine = grey - ndimage.gaussian_filter(grey, 1.0)
    return float(fine.std() / (grey.std() + 1.0))


def has_line(cells: Floats) -> bool:
    """Whether a thin, dark, colourless, straight line crosses the cells (h, w, 3)."""
    grey = cells.mean(axis=2)
    darker = grey - ndimage.median_filter(grey, size=7)
    marked = (darker > LINE_DARKER) & (np.ptp(cells, axis=2) < LINE_GREY)
    points = np.argwhere(marked).astype(np.float64)
    if len(points) < LINE_LONG * min(marked.shape) / 2:
        return False
    centred = points - points.mean(axis=0)
    along, across = np.linalg.svd(centred, full_matrices=False)[2]
    straight = float(np.mean(np.abs(centred @ across) <= 1.0))
    length = float(np.ptp(centred @ along)) + 1
    return straight >= LINE_STRAIGHT and length >= LINE_LONG * min(marked.shape)


def counted_kinds(counts: dict[str, int]) -> str:
    """List the artefacts with counts above zero.

    >>> counted_kinds({"pen": 12, "fold": 0, "blur": 1})
    '12 pen, 1 blur'
    """
    return ", ".join(f"{n:,} {kind}" for kind, n in counts.items() if n)
