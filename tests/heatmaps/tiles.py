"""Tiles of a GeoJSON file that xmil wrote, as another program would read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Tiles(NamedTuple):
    """Level-0 boxes (n, 4), with their measurements and the names of their classes."""

    boxes: npt.NDArray[np.float64]
    measurements: Mapping[str, npt.NDArray[np.float64]]
    classes: tuple[str | None, ...]


def read_tiles(path: Path) -> Tiles:
    content = json.loads(path.read_text(encoding="utf-8"))
    rings = np.array([each["geometry"]["coordinates"][0] for each in content["features"]], dtype=np.float64)
    boxes = np.concatenate([rings.min(axis=1), rings.max(axis=1)], axis=1)
    boxes += np.tile(content["xmil"]["origin"], 2)
    about = [each["properties"] for each in content["features"]]
    names = about[0]["measurements"]
    columns = {name: np.array([each["measurements"][name] for each in about]) for name in names}
    return Tiles(boxes, columns, tuple(each.get("classification", {}).get("name") for each in about))
