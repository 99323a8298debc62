"""Deletion and insertion: what the model loses with a map's highest places, and what they alone keep.

Pixels give way to the tile's mean colour or to the tile blurred, with hard edges or soft ones, or to the
tissue of another tile of the same image. Edges that no tissue has cost score by themselves. Maps of noise
tell how much: where pixels give way without a trace, their curve is the straight line from the whole tile to
the empty one, whatever the shapes; what it falls short of the line is the fill's fault (`report.fault`).
Every map stands beside itself misplaced: turned, mirrored and rolled at random, the same shapes elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.inside.pictures import SEEN, TILE
from xmil.methods import VIEWS

GRID, STEPS = 24, 5  # places along the edge that lose their pixels, and in how many steps
WIDTH = 24  # pixels of the seen tile: the blur's standard deviation
SOFT = 6  # pixels of the seen tile: that of soft edges
MISPLACED = 2  # maps in wrong places beside each map
FILLS = ("colour", "blur", "soft blur", "tissue")
Scores = Callable[[Tensor], dict[str, np.ndarray]]  # of pictures (b, 3, h, w): per name one number a picture


class Fill(NamedTuple):
    """What pixels give way to (1, 3, h, w), and whether the edges are soft."""

    picture: Tensor
    soft: bool


def fills_of(pixels: Tensor, other: Tensor, names: Sequence[str] = FILLS) -> dict[str, Fill]:
    """The fills of a tile; `other` is the tile that lends its tissue."""
    colour = pixels.mean(dim=(2, 3), keepdim=True).expand_as(pixels)
    made = {
        "colour": lambda: Fill(colour, False),
        "blur": lambda: Fill(blurred(pixels), False),
        "soft blur": lambda: Fill(blurred(pixels), True),
        "tissue": lambda: Fill(other, True),
    }
    return {name: made[name]() for name in names}


def blurred(pixels: Tensor, width: int = WIDTH, *, widths: int = 2) -> Tensor:
    """Pictures (b, c, h, w) without what is smaller than `width`; nuclei can no longer be told."""
    reach, channels = widths * width, pixels.shape[1]
    at = torch.arange(-reach, reach + 1, dtype=pixels.dtype, device=pixels.device)
    bell = torch.exp(-0.5 * (at / width) ** 2)
    bell = (bell / bell.sum()).view(1, 1, 1, -1).expand(channels, 1, 1, -1)
    wide = F.pad(pixels, (reach,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(wide, bell, groups=channels), bell.mT, groups=channels)


def misplaced(drawn: np.ndarray, seed: int) -> np.ndarray:
    """The same map turned, mirrored and rolled at random."""
    rng = np.random.default_rng(seed)
    view = VIEWS[rng.integers(len(VIEWS))]
    shifts = rng.integers(TILE // 4, 3 * TILE // 4, size=2)
    return np.roll(view.of(torch.from_numpy(drawn)).numpy(), tuple(shifts), axis=(0, 1))


def masks_of(drawn: np.ndarray) -> Tensor:
    """Which pixels of the seen tile hold the highest places: one mask a step, none and all left out."""
    pooled = F.avg_pool2d(torch.from_numpy(np.ascontiguousarray(drawn)).float()[None, None], TILE // GRID)
    order = pooled.flatten().argsort(descending=True)
    masks = torch.zeros(STEPS - 1, GRID * GRID)
    for k in range(1, STEPS):
        masks[k - 1, order[: round(GRID * GRID * k / STEPS)]] = 1
    masks = masks.view(-1, 1, GRID, GRID)
    return masks.repeat_interleave(SEEN // GRID, 2).repeat_interleave(SEEN // GRID, 3)


def curves(
    pixels: Tensor, drawn: np.ndarray, scores: Scores, *, fills: Mapping[str, Fill], seed: int
) -> dict[str, float]:
    """Areas "{what} {fill} {deletion or insertion}", with "misplaced" the null's; "empty": all gone."""
    held = [("", drawn), *((" misplaced", misplaced(drawn, seed + 1 + k)) for k in range(MISPLACED))]
    names: list[str] = []
    pictures = [pixels]
    for fill, (blank, soft) in fills.items():
        pictures.append(blank)
        for where, shown in held:
            hard = masks_of(shown).to(pixels)
            mask = blurred(hard, SOFT, widths=3) if soft else hard
            names += [f"{fill} deletion{where}", f"{fill} insertion{where}"]
            pictures += [pixels + mask * (blank - pixels), blank + mask * (pixels - blank)]
    found = scores(torch.cat(pictures))
    return {f"{what} {name}": v for what, each in found.items() for name, v in _areas(each, names, fills)}


def _areas(values: np.ndarray, names: Sequence[str], fills: Mapping[str, Fill]) -> list[tuple[str, float]]:
    """Areas by the trapezoid rule, whole and empty tile at the ends; misplaced maps' are averaged."""
    whole, at = float(values[0]), 1
    found: dict[str, list[float]] = {}
    each = len(names) // max(1, len(fills))
    for k, fill in enumerate(fills):
        empty = float(values[at])
        found[f"{fill} empty"] = [empty]
        for name in names[k * each : (k + 1) * each]:
            inner = values[at + 1 : at + STEPS]
            found.setdefault(name, []).append((0.5 * (whole + empty) + float(inner.sum())) / STEPS)
            at += STEPS - 1
        at += 1
    return [(name, float(np.mean(areas))) for name, areas in found.items()]
