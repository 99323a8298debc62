"""Deletion and insertion: what the model loses with a map's highest places, and what they alone keep.

A square that takes one colour makes edges that no tissue has, and many small squares make more of them than
one region. So pixels are also replaced by the tile blurred (`blur`), and every map stands beside itself
misplaced: turned, mirrored and rolled at random, with the same shapes elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.inside.pictures import SEEN, TILE
from xmil.methods.inside_views import VIEWS

GRID, STEPS = 24, 8  # places along the edge that lose their pixels, and in how many steps
WIDTH = 24  # pixels of the seen tile: the blur's standard deviation
Scores = Callable[[Tensor], dict[str, np.ndarray]]  # of pictures (b, 3, h, w): per name one number a picture


def blurred(pixels: Tensor) -> Tensor:
    """A tile (1, 3, h, w) whose nuclei can no longer be told."""
    reach = 2 * WIDTH
    at = torch.arange(-reach, reach + 1, dtype=pixels.dtype, device=pixels.device)
    bell = torch.exp(-0.5 * (at / WIDTH) ** 2)
    bell = (bell / bell.sum()).view(1, 1, 1, -1).expand(3, 1, 1, -1)
    wide = F.pad(pixels, (reach,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(wide, bell, groups=3), bell.mT, groups=3)


def misplaced(drawn: np.ndarray, seed: int) -> np.ndarray:
    """The same map turned, mirrored and rolled at random."""
    rng = np.random.default_rng(seed)
    view = VIEWS[rng.integers(len(VIEWS))]
    shifts = rng.integers(TILE // 4, 3 * TILE // 4, size=2)
    return np.roll(view.of(torch.from_numpy(drawn)).numpy(), tuple(shifts), axis=(0, 1))


def masks_of(drawn: np.ndarray) -> Tensor:
    """Which pixels of the seen tile hold the highest places, (STEPS + 1, 1, SEEN, SEEN)."""
    pooled = F.avg_pool2d(torch.from_numpy(np.ascontiguousarray(drawn)).float()[None, None], TILE // GRID)
    order = pooled.flatten().argsort(descending=True)
    masks = torch.zeros(STEPS + 1, GRID * GRID, dtype=torch.bool)
    for k in range(STEPS + 1):
        masks[k, order[: round(GRID * GRID * k / STEPS)]] = True
    masks = masks.view(-1, 1, GRID, GRID)
    return masks.repeat_interleave(SEEN // GRID, 2).repeat_interleave(SEEN // GRID, 3)


def curves(pixels: Tensor, drawn: np.ndarray, scores: Scores, seed: int) -> dict[str, float]:
    """Mean of each curve: "{what} {fill} {deletion or insertion}", and with "misplaced" those of the null."""
    fills = {
        "colour": pixels.mean(dim=(2, 3), keepdim=True).expand_as(pixels),
        "blur": blurred(pixels),
    }
    names, pictures = [], []
    for where, held in (("", drawn), (" misplaced", misplaced(drawn, seed))):
        wide = masks_of(held).to(pixels.device)
        for fill, blank in fills.items():
            for kind, under, over in (("deletion", blank, pixels), ("insertion", pixels, blank)):
                names.append(f"{fill} {kind}{where}")
                pictures.append(torch.where(wide, under, over))
    found = scores(torch.cat(pictures))
    means = {what: values.reshape(len(names), -1).mean(axis=1) for what, values in found.items()}
    return {f"{what} {name}": float(each[i]) for what, each in means.items() for i, name in enumerate(names)}
