"""The colon images cut into overlapping tiles, with their nuclei."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from xmil.bench import EPITHELIAL, nuclei

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TILE, STRIDE, SEEN = 96, 48, 192
STRONGEST, PER_IMAGE, MARGIN, LEAST = 30, 3, 6, 2
FOLDS = 5


@dataclass(frozen=True, eq=False)
class TiledImage:
    """An image cut into overlapping tiles: corners (n, 2), features (n, d), nuclei and their types."""

    name: str
    corners: np.ndarray
    features: Tensor
    centres: np.ndarray
    cells: np.ndarray

    @property
    def label(self) -> int:
        """Whether it holds an epithelial nucleus."""
        return int((self.cells == EPITHELIAL).any())


def picture(data: Path, name: str) -> Tensor:
    """An image (3, h, w), scaled as for ImageNet."""
    pixels = np.array(Image.open(data / "colon" / f"{name}.jpg").convert("RGB"))
    x = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def seen(image: Tensor, corners: np.ndarray) -> Tensor:
    """Tiles (n, 3, SEEN, SEEN) at corners (n, 2); beyond the image's edge its border is reflected."""
    padded = F.pad(image.unsqueeze(0), (TILE,) * 4, mode="reflect")[0]
    places = np.asarray(corners, dtype=int).reshape(-1, 2) + TILE
    cut = torch.stack([padded[:, y : y + TILE, x : x + TILE] for x, y in places])
    return F.interpolate(cut, size=(SEEN, SEEN), mode="bilinear", align_corners=False)


def corners_of(image: Tensor) -> np.ndarray:
    """Corners of all whole tiles, row by row."""
    height, width = image.shape[1:]
    return np.array(
        [[x, y] for y in range(0, height - TILE + 1, STRIDE) for x in range(0, width - TILE + 1, STRIDE)]
    )


@torch.no_grad()
def features_of(net: nn.Module, tiles: Tensor, device: str) -> Tensor:
    """Features (n, d) of tiles, on the CPU."""
    return torch.cat([net(part.to(device)).float().cpu() for part in tiles.split(81)])


def embed(net: nn.Module, data: Path, device: str, limit: int | None = None) -> list[TiledImage]:
    """Every image with the features of its tiles."""
    images = []
    for name, (centres, cells) in sorted(nuclei(data / "colon").items())[:limit]:
        image = picture(data, name).to(device)
        corners = corners_of(image)
        images.append(
            TiledImage(name, corners, features_of(net, seen(image, corners), device), centres, cells)
        )
    return images


def folds(images: list[TiledImage], *, seed: int = 0) -> list[np.ndarray]:
    """Test rows of each fold, the labels spread evenly."""
    rng = np.random.default_rng(seed)
    fold = np.empty(len(images), dtype=int)
    for label in (0, 1):
        rows = rng.permutation([i for i, image in enumerate(images) if image.label == label])
        fold[rows] = np.arange(len(rows)) % FOLDS
    return [np.flatnonzero(fold == k) for k in range(FOLDS)]


def telling_tiles(
    image: TiledImage, scores: np.ndarray, *, most: int = PER_IMAGE
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Strongly positive tiles with nuclei of both kinds: row, centres inside the tile, epithelial or not."""
    found = 0
    for row in np.argsort(-scores, kind="stable")[:STRONGEST]:
        inside = image.centres - image.corners[row]
        held = ((inside >= MARGIN) & (inside < TILE - MARGIN)).all(axis=1)
        positive = image.cells[held] == EPITHELIAL
        if scores[row] > 0 and positive.sum() >= LEAST and (~positive).sum() >= LEAST:
            yield int(row), inside[held], positive
            found += 1
            if found == most:
                return
