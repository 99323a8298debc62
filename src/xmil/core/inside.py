"""Explanations of the inside of patches: one map per patch, with its audit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

import numpy as np

from xmil.core.bag import FloatArray, IntArray
from xmil.core.services import service

LAYOUT = 1


@dataclass(frozen=True, eq=False)
class InsideAudit:
    """Per patch: score = spatial + constant + other. `spatial` is the sum of the map."""

    score: FloatArray
    spatial: FloatArray
    constant: FloatArray
    other: FloatArray


@dataclass(frozen=True, eq=False)
class Inside:
    """Maps (k, h, w) inside k patches of a slide, on the grid of the encoder's tokens.

    `boxes` (k, 4) are the patches in level-0 pixels, `patches` (k,) their rows in the bag. Each map with its
    `constant` adds up to the patch's score; see `audit`.
    """

    maps: FloatArray
    boxes: IntArray
    patches: IntArray
    audit: InsideAudit
    method: str
    target: str
    encoder: str
    bag: str | None = None
    warnings: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.maps)

    def __repr__(self) -> str:
        k, h, w = self.maps.shape
        return f"Inside({self.method}, {k} patches x {h} x {w} places, {self.encoder})"

    def cells(self) -> IntArray:
        """Level-0 boxes (k, h, w, 4) of the places of each map."""
        _, h, w = self.maps.shape
        x0, y0, x1, y1 = (self.boxes[:, i].astype(np.float64)[:, None] for i in range(4))
        across = np.rint(x0 + (x1 - x0) * np.arange(w + 1) / w).astype(np.int64)
        down = np.rint(y0 + (y1 - y0) * np.arange(h + 1) / h).astype(np.int64)
        edges = across[:, None, :-1], down[:, :-1, None], across[:, None, 1:], down[:, 1:, None]
        return np.stack(np.broadcast_arrays(*edges), axis=-1)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the maps as one compressed NumPy file, whole or not at all."""
        facts = {key: getattr(self, key) for key in ("method", "target", "encoder", "bag", "warnings")}
        arrays = {"maps": self.maps, "boxes": self.boxes, "patches": self.patches, **asdict(self.audit)}
        service("save_arrays")(path, arrays, {"layout": LAYOUT, **facts})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Inside:
        """Read a file written by `save`."""

        def build(arrays: dict[str, Any], facts: dict[str, Any]) -> Inside:
            facts.pop("layout")
            audit = InsideAudit(**{key: arrays.pop(key) for key in ("score", "spatial", "constant", "other")})
            return cls(arrays["maps"], arrays["boxes"], arrays["patches"], audit, **facts)

        kind, way_out = "file of maps inside patches", "make it again"
        stored: Inside = service("load_arrays")(path, build, kind, way_out)
        return stored

    def plot(self, slide: Any = None, **look: Any) -> Any:
        """Draw a sheet of the patches with their maps, over the tissue if there is a slide."""
        return service("draw_inside")(self, slide, **look)
