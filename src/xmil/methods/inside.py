"""Inside a patch: what in this tile speaks for the explained output, or against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xmil.core.background import Background
from xmil.core.bag import Bag, FloatArray, IntArray
from xmil.core.errors import InputError, bad_parameter
from xmil.core.explanation import Explanation
from xmil.core.inside_patch import Inside, InsideAudit
from xmil.core.parsing import small_number
from xmil.encoders.encoder import Encoder, Transform, vectors
from xmil.methods.inside_maps import MAPS, EncoderNetwork, MapSettings, Tile, TileMap, map_tile
from xmil.methods.worth import find_worth
from xmil.nn.frozen import frozen

if TYPE_CHECKING:
    from xmil.slides.slide import Slide

ON_TOKENS = ("tokens", "turned")  # maps that a baseline is taken off place by place
PIXELS = 256  # of a patch where nothing says how many the encoder was given


def explain_inside(
    model: nn.Module | None,
    encoder: Encoder | nn.Module | str,
    slide: Slide | str | PathLike[str],
    explanation: Explanation,
    *,
    patches: int | npt.ArrayLike = 16,
    method: str = "turned",
    features: Bag | npt.ArrayLike | None = None,
    transform: Callable[[Any], Tensor] | None = None,
    patch_px: int | None = None,
    mpp: float | None = None,
    background: Background | None = None,
    on_patch: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Inside:
    """Where inside the strongest patches, or the given ones, their scores come from.

    `patches` is a number (the largest absolute scores), rows of the bag, or boxes (k, 4) in level-0 pixels:
    left, top, right and bottom, for the patches whose centre they hold. What a patch's features are worth
    comes from the explanation's stored relevance (`feature_level=True`), else from `lrp` on `features`; with
    neither, every patch of the explanation is read from the slide and encoded again. `encoder` is one of
    `load_encoder`, its name, or a module with its `transform`. `patch_px` is the size in pixels at which
    patches were cut for the encoder; `background` is what the scores are measured against, where the model
    does not have it. Settings of the maps: `layer`, `square` (share of the tile's edge), `steps`, `stride`,
    `epsilon`, `gamma`, `views`, `reach`, `batch`.
    """
    MAPS[method]
    used = _as_encoder(encoder, transform)
    chosen = MapSettings(**_known(settings))
    with _opened(slide, mpp) as opened:
        placed = explanation.placed(mpp=mpp or opened.mpp)
        reader = _Reader(opened, placed, used, patch_px or _patch_px(features, used, placed))
        rows = _chosen(placed, patches)
        worth = find_worth(
            model, explanation, rows, read=reader.features, features=features, background=background
        )
        network = _network(used)
        made = []
        for done, (row, g) in enumerate(zip(rows, worth.weights, strict=True), start=1):
            with frozen(network.module) if network.module is not None else nullcontext():
                made.append(map_tile(method, network, reader.tile(row, g, worth.ordinary), chosen))
            if on_patch is not None:
                on_patch(done, len(rows))
    if method in ON_TOKENS:
        made = [_against(one, float(kept)) for one, kept in zip(made, worth.baseline, strict=True)]
    maps = np.stack([m.values.detach().float().cpu().numpy() for m in made])
    audit = _audit(made, explanation.scores[rows], worth.features)
    boxes, target = placed.boxes()[rows], str(explanation.target)
    notes = [*worth.notes, *_without_background(explanation, method)]
    return Inside(maps, boxes, rows, audit, method, target, used.name, explanation.bag, notes)


def _without_background(e: Explanation, method: str) -> list[str]:
    """A note where even a place that looks like all others, or like glass, has a share of the score."""
    if method not in ON_TOKENS or e.params.get("baseline"):
        return []
    return [
        "The scores are measured against no background, so that ordinary tissue and empty glass have their "
        "share of the colour too; explain with a background to see what differs from it."
    ]


def _against(made: TileMap, kept: float) -> TileMap:
    """A map against the baseline: each place gives up its share of what the baseline would have."""
    even = kept / made.values.numel()
    return replace(made, values=made.values - even, constant=made.constant + kept)


def _audit(made: Sequence[TileMap], scores: FloatArray, worth: FloatArray) -> InsideAudit:
    """What the map places, what constants keep (without the map's share, the baseline's part), the rest."""
    spatial = np.array([float(m.values.double().sum()) for m in made])
    other = np.array([m.other for m in made])
    constant = np.asarray(scores, dtype=np.float64) - spatial - other
    told = np.array([m.constant for m in made]) + (np.asarray(scores, dtype=np.float64) - worth)
    return InsideAudit(
        np.asarray(scores, dtype=np.float32),
        spatial.astype(np.float32),
        told.astype(np.float32),
        (other + constant - told).astype(np.float32),
    )


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    from xmil.core.errors import unknown_name

    names = MapSettings.__dataclass_fields__
    for name in settings:
        if name not in names:
            raise unknown_name("setting of explain_inside", name, names)
    return settings


def _as_encoder(encoder: Any, transform: Callable[[Any], Tensor] | None) -> Encoder:
    if isinstance(encoder, Encoder):
        return encoder
    if isinstance(encoder, str):
        from xmil.encoders import load_encoder

        return load_encoder(encoder)
    if isinstance(encoder, nn.Module):
        return Encoder(type(encoder).__name__, 0, encoder.eval(), transform or Transform())
    raise bad_parameter("encoder", "explain_inside", "an encoder, its name or a torch.nn.Module", encoder)


def _network(encoder: Encoder) -> EncoderNetwork:
    def features(pixels: Tensor) -> Tensor:
        return vectors(encoder.network(pixels), encoder.name, len(pixels))

    module = encoder.network if isinstance(encoder.network, nn.Module) else None
    return EncoderNetwork(features, module)


def _patch_px(features: Any, encoder: Encoder, placed: Explanation) -> int:
    stored = str(features.extra.get("patch_size")) if isinstance(features, Bag) else ""
    if (edge := small_number(stored)) is not None and edge > 0:
        return edge
    size = getattr(encoder.transform, "size", None)
    return int(size) if size else min(PIXELS, placed.patch_size or PIXELS)


def _chosen(placed: Explanation, patches: int | npt.ArrayLike) -> IntArray:
    n = len(placed)
    if isinstance(patches, int):
        if patches < 1:
            raise bad_parameter(
                "patches", "explain_inside", "an int in the range [1, inf), rows or boxes", patches
            )
        return np.argsort(-np.abs(placed.scores), kind="stable")[:patches].astype(np.int64)
    given = np.asarray(patches)
    if given.ndim == 2 and given.shape[1] == 4:
        return _held(placed, given)
    rows = given.astype(np.int64)
    if rows.ndim != 1 or not len(rows) or rows.min() < 0 or rows.max() >= n:
        raise bad_parameter(
            "patches", "explain_inside", f"rows in the range [0, {n}), or boxes (k, 4)", patches
        )
    return rows


def _held(placed: Explanation, boxes: npt.NDArray[Any]) -> IntArray:
    """Rows of the patches whose centre a box holds, the largest absolute scores first."""
    each = placed.boxes()
    centre = (each[:, None, :2] + each[:, None, 2:]) / 2
    inside = np.all((centre >= boxes[None, :, :2]) & (centre < boxes[None, :, 2:]), axis=2)
    rows = np.flatnonzero(np.any(inside, axis=1))
    if not len(rows):
        raise InputError("No explained patch has its centre in the given boxes; they are in level-0 pixels.")
    return rows[np.argsort(-np.abs(placed.scores[rows]), kind="stable")].astype(np.int64)


class _Reader:
    """Tiles of the slide as the encoder sees them."""

    def __init__(self, slide: Slide, placed: Explanation, encoder: Encoder, size: int) -> None:
        placed.boxes()  # an error with the reason where places are unknown
        self.slide, self.placed, self.encoder, self.size = slide, placed, encoder, size
        assert placed.coords is not None and placed.patch_size is not None  # noqa: S101, PT018
        self.corners, self.edge = placed.coords, placed.patch_size

    def pixels(self, corner: npt.ArrayLike) -> Tensor:
        """The tile (1, 3, h, w) at a level-0 corner, scaled as the encoder wants it."""
        from xmil.slides.tiling import read_patch

        patch = read_patch(self.slide, corner, edge0=self.edge, size=self.size)
        batch = self.encoder.transform(patch).unsqueeze(0).to(self.encoder.device)
        return (
            self.encoder.transform.scaled(batch) if isinstance(self.encoder.transform, Transform) else batch
        )

    def tile(self, row: int, weights: Tensor, ordinary: Tensor | None) -> Tile:
        corner = self.corners[row]

        def moved(dx: float, dy: float) -> Tensor:
            return self.pixels(corner + np.rint(np.array([dx, dy]) * self.edge).astype(np.int64))

        pixels = self.pixels(corner)
        return Tile(pixels, weights.to(pixels), moved, None if ordinary is None else ordinary.to(pixels))

    @torch.no_grad()
    def features(self, rows: npt.ArrayLike) -> Tensor:
        """Features (k, d) of patches, read and encoded now."""
        parts = [self.pixels(self.corners[row]) for row in np.asarray(rows)]
        network = _network(self.encoder)
        return torch.cat([network.features(part) for part in parts]).float().cpu()


@contextmanager
def _opened(slide: Any, mpp: float | None) -> Iterator[Any]:
    if not isinstance(slide, str | PathLike):
        yield slide
        return
    from xmil.slides import open_slide

    with open_slide(slide, mpp) as opened:
        yield opened
