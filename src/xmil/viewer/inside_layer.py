"""Maps inside patches as the page draws them: places in level-0 pixels, values that add up to the score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.bag import FloatArray
from xmil.core.inside_patch import Inside
from xmil.viewer.score_block import Evidence

FINEST = 56  # places along the edge of a patch: as many as a screen shows


def read_layer(path: Path) -> dict[str, Any]:
    """What the page needs of a file of maps."""
    inside = Inside.load(path)
    maps = summed(inside.maps, FINEST)
    return {
        "method": inside.method,
        "target": inside.target,
        "encoder": inside.encoder,
        "warnings": list(inside.warnings),
        "limit": float(np.abs(maps).max(initial=0.0)),
        "height": maps.shape[1],
        "width": maps.shape[2],
        "maps": [_one(inside, maps, i) for i in range(len(inside))],
    }


def _one(inside: Inside, maps: FloatArray, i: int) -> dict[str, Any]:
    account = {name: float(getattr(inside.audit, name)[i]) for name in vars(inside.audit)}
    return {
        "patch": int(inside.patches[i]),
        "box": [int(value) for value in inside.boxes[i]],
        "values": [float(value) for value in maps[i].ravel()],
        "limit": float(np.abs(maps[i]).max(initial=0.0)),
        **account,
    }


def fits(layer: dict[str, Any], evidence: Evidence) -> bool:
    """Whether the maps are of these patches and these scores."""
    rows = np.array([one["patch"] for one in layer["maps"]], dtype=np.int64)
    corners = np.array([one["box"][:2] for one in layer["maps"]], dtype=np.int64).reshape(-1, 2)
    if evidence.coords is None or len(rows) == 0 or not 0 <= rows.min() <= rows.max() < evidence.n:
        return False
    scores = np.array([one["score"] for one in layer["maps"]], dtype=np.float32)
    near = np.isclose(evidence.scores[:, rows], scores, rtol=1e-4, atol=1e-7).all(axis=1)
    return bool((evidence.coords[rows] == corners).all() and near.any())


def summed(maps: FloatArray, finest: int) -> FloatArray:
    """Maps (k, h, w) on a grid of `finest` places at most; a place has the sum of what it covers.

    >>> summed(np.ones((1, 6, 6), dtype=np.float32), 4).tolist()
    [[[4.0, 4.0, 4.0], [4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]]
    """
    k, h, w = maps.shape
    down, across = _divisor(h, finest), _divisor(w, finest)
    parts = maps.reshape(k, down, h // down, across, w // across)
    return np.asarray(parts.sum(axis=(2, 4), dtype=np.float64), dtype=np.float32)


def _divisor(length: int, most: int) -> int:
    """The largest number of equal parts that is no more than `most`."""
    return next(parts for parts in range(min(length, most), 0, -1) if length % parts == 0)
