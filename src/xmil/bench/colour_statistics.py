"""Vectors for patches: by an encoder of the package, or plain statistics of colour that need no weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xmil.core.bag import FloatArray

Patches = npt.NDArray[np.uint8]  # (n, h, w, 3)
Embed = Callable[[Patches], FloatArray]
STATISTICS = "statistics"
RINGS, CELLS, BATCH = 4, 6, 256


def embedder(name: str, device: str = "cpu") -> Embed:
    """What turns patches of one size into vectors: an encoder's name, or `statistics`."""
    if name == STATISTICS:
        return statistics
    from xmil.encoders import load_encoder

    encoder = load_encoder(name, device=device)

    def embed(patches: Patches) -> FloatArray:
        seen = [torch.stack([encoder.transform(p) for p in part]) for part in _batches(patches)]
        return np.concatenate([encoder(batch).cpu().numpy() for batch in seen]).astype(np.float32)

    return embed


def statistics(patches: Patches) -> FloatArray:
    """Optical densities: mean and spread in rings around the centre, and the means of a coarse grid.

    >>> statistics(np.full((2, 48, 48, 3), 200, dtype=np.uint8)).shape
    (2, 132)
    """
    density = -np.log((patches.astype(np.float32) + 1) / 256)
    n, h, w, _ = density.shape
    y, x = np.mgrid[:h, :w]
    away = np.hypot((y - (h - 1) / 2) / h, (x - (w - 1) / 2) / w) * 2
    parts: list[Any] = []
    for ring in range(RINGS):
        inside = (away >= ring / RINGS) & ((away < (ring + 1) / RINGS) | (ring == RINGS - 1))
        held = density[:, inside]
        parts += [held.mean(axis=1), held.std(axis=1)]
    rows, columns = (np.array_split(np.arange(length), CELLS) for length in (h, w))
    parts += [density[:, r[0] : r[-1] + 1, c[0] : c[-1] + 1].mean(axis=(1, 2)) for r in rows for c in columns]
    return np.concatenate(parts, axis=1).reshape(n, -1).astype(np.float32)


def scaled(features: FloatArray, rows: npt.NDArray[np.int64]) -> FloatArray:
    """Features with mean 0 and deviation 1 over some rows: those of training."""
    mean, std = features[rows].mean(axis=0), features[rows].std(axis=0)
    return np.asarray((features - mean) / np.where(std > 1e-6, std, 1.0), dtype=np.float32)


def _batches(patches: Patches) -> list[Patches]:
    return [patches[i : i + BATCH] for i in range(0, len(patches), BATCH)]
