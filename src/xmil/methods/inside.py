"""Explain the inside of patches: which parts of a tile speak for or against the explained output."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xmil.core.background import Background
from xmil.core.bag import Bag, FloatArray, IntArray
from xmil.core.errors import InputError, UnsupportedError, bad_parameter, check_names
from xmil.core.explanation import Explanation
from xmil.core.inside import Inside, InsideAudit
from xmil.core.text import small_number
from xmil.encoders import load_encoder
from xmil.encoders.encoder import Encoder, Transform, vectors
from xmil.methods.explain import explain
from xmil.methods.inside_maps import MAPS, EncoderNetwork, MapSettings, Tile, map_tile
from xmil.methods.method import OF_BAG
from xmil.network import frozen
from xmil.slides import open_slide

if TYPE_CHECKING:
    from xmil.slides.slide import Slide

ON_TOKENS = ("tokens", "turned")  # maps from which the baseline is subtracted at every place
PIXELS = 256  # edge of a patch for the encoder, if nothing states it
ALIKE, REFUSED = 0.995, 0.9  # cosine of a patch's features in the bag and the encoder's features now
SAME = 1e-3  # of the largest score: larger differences mean another explanation
RULES = ("preset", "epsilon", "gamma", "bias", "gates")


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
    """Show where inside the strongest patches, or the chosen ones, their scores come from.

    `patches` is a number (the largest absolute scores), rows of the bag, or boxes (k, 4) in level-0 pixels:
    left, top, right and bottom, for the patches with their centre inside. The weights of a patch's features
    come from the explanation's stored relevance (`feature_level=True`), else from `lrp` on `features`. With
    neither, every patch of the explanation is read from the slide and encoded again. `encoder` comes from
    `load_encoder`, or is its name or a module with its `transform`. `patch_px` is the size in pixels of the
    encoder's patches; `background` is what the scores were compared with, if the model does not have it.
    Settings of the maps: `layer`, `square` (share of the tile's edge), `stride`, `epsilon`, `gamma`, `views`,
    `reach`, `batch`.
    """
    MAPS[method]  # refuses an unknown name
    check_names("setting of explain_inside", settings, MapSettings.__dataclass_fields__)
    used = load_encoder(encoder) if isinstance(encoder, str) else encoder
    if isinstance(used, nn.Module):
        used = Encoder(type(used).__name__, 0, used.eval(), transform or Transform())
    if not isinstance(used, Encoder):
        raise bad_parameter("encoder", "explain_inside", "an encoder, its name or a torch.nn.Module", encoder)
    backbone, name = used.network, used.name
    network = EncoderNetwork(
        lambda pixels: vectors(backbone(pixels), name, len(pixels)),
        backbone if isinstance(backbone, nn.Module) else None,
    )
    map_settings = MapSettings(**settings)
    with open_slide(slide, mpp) if isinstance(slide, str | PathLike) else nullcontext(slide) as opened:
        placed = explanation.placed(mpp=mpp or opened.mpp)
        stored = small_number(str(features.extra.get("patch_size"))) if isinstance(features, Bag) else None
        size = patch_px or stored or getattr(used.transform, "size", None)
        size = int(size or min(PIXELS, placed.patch_size or PIXELS))
        reader = _Reader(opened, placed, used, network, size)
        rows = _choose_rows(placed, patches)
        weighting = _find_weighting(
            model, explanation, rows, read=reader.features, features=features, background=background
        )
        tile_maps = []
        for done, (row, g) in enumerate(zip(rows, weighting.weights, strict=True), start=1):
            with frozen(network.module) if network.module is not None else nullcontext():
                tile_maps.append(
                    map_tile(method, network, reader.tile(row, g, weighting.ordinary), map_settings)
                )
            if on_patch is not None:
                on_patch(done, len(rows))
    if method in ON_TOKENS:  # each place gives up its part of the baseline's share
        tile_maps = [
            replace(m, values=m.values - float(share) / m.values.numel(), constant=m.constant + float(share))
            for m, share in zip(tile_maps, weighting.of(weighting.shift), strict=True)
        ]
    maps = np.stack([m.values.detach().float().cpu().numpy() for m in tile_maps])
    # what the map places, what constants keep (without the map's share, the baseline's part), the rest
    exact = explanation.scores[rows].astype(np.float64)
    spatial = np.array([float(m.values.double().sum()) for m in tile_maps])
    other = np.array([m.other for m in tile_maps])
    constant = np.array([m.constant for m in tile_maps]) + (exact - weighting.of(weighting.now))
    rest = other + (exact - spatial - other) - constant
    audit = InsideAudit(*(part.astype(np.float32) for part in (exact, spatial, constant, rest)))
    boxes, target = placed.boxes()[rows], str(explanation.target)
    notes = [*weighting.notes]
    if method in ON_TOKENS and not explanation.params.get("baseline"):
        notes.append(
            "The scores are not compared with a background, so ordinary tissue and empty glass are coloured, "
            "too; explain with a background to see what differs from it."
        )
    return Inside(maps, boxes, rows, audit, method, target, used.name, explanation.bag, notes)


def _choose_rows(placed: Explanation, patches: int | npt.ArrayLike) -> IntArray:
    """Choose the rows of the patches; by number or box, the largest absolute scores first."""
    n = len(placed)
    if isinstance(patches, int):
        if patches < 1:
            must = "an int in the range [1, inf), rows or boxes"
            raise bad_parameter("patches", "explain_inside", must, patches)
        return np.argsort(-np.abs(placed.scores), kind="stable")[:patches].astype(np.int64)
    rows = np.asarray(patches)
    if rows.ndim == 2 and rows.shape[1] == 4:  # boxes
        each = placed.boxes()
        centre = (each[:, None, :2] + each[:, None, 2:]) / 2
        inside = np.all((centre >= rows[None, :, :2]) & (centre < rows[None, :, 2:]), axis=2)
        at = np.flatnonzero(np.any(inside, axis=1))
        if not len(at):
            raise InputError("No explained patch has its centre in the boxes, which are in level-0 pixels.")
        return at[np.argsort(-np.abs(placed.scores[at]), kind="stable")].astype(np.int64)
    rows = rows.astype(np.int64)
    if rows.ndim != 1 or not len(rows) or rows.min() < 0 or rows.max() >= n:
        raise bad_parameter(
            "patches", "explain_inside", f"rows in the range [0, {n}), or boxes (k, 4)", patches
        )
    return rows


class _Reader:
    """Read tiles of the slide for the encoder."""

    def __init__(
        self, slide: Slide, placed: Explanation, encoder: Encoder, network: EncoderNetwork, size: int
    ) -> None:
        placed.boxes()  # refuses unknown places, with the reason
        self.slide, self.encoder, self.network, self.size = slide, encoder, network, size
        assert placed.coords is not None and placed.patch_size is not None  # noqa: S101, PT018
        self.corners, self.edge = placed.coords, placed.patch_size

    def pixels(self, corner: npt.ArrayLike) -> Tensor:
        """Read the tile (1, 3, h, w) at a level-0 corner, normalised for the encoder."""
        from xmil.slides.tiling import read_patch

        patch = read_patch(self.slide, corner, edge0=self.edge, size=self.size)
        batch = self.encoder.transform(patch).unsqueeze(0).to(self.encoder.device)
        transform = self.encoder.transform
        return transform.scaled(batch) if isinstance(transform, Transform) else batch

    def tile(self, row: int, weights: Tensor, ordinary: Tensor | None) -> Tile:
        corner = self.corners[row]

        def moved(dx: float, dy: float) -> Tensor:
            return self.pixels(corner + np.rint(np.array([dx, dy]) * self.edge).astype(np.int64))

        pixels = self.pixels(corner)
        return Tile(pixels, weights.to(pixels), moved, None if ordinary is None else ordinary.to(pixels))

    @torch.no_grad()
    def features(self, rows: npt.ArrayLike) -> Tensor:
        """Read and encode patches: features (k, d)."""
        parts = [self.network.features(self.pixels(self.corners[row])) for row in np.asarray(rows)]
        return torch.cat(parts).float().cpu()


@dataclass(frozen=True, eq=False)
class _Weighting:
    """Weights g (k, d) of the chosen patches, which score g . (f - shift); shift (d,) is the baseline's."""

    weights: Tensor
    shift: Tensor
    now: Tensor  # the encoder's features (k, d)
    notes: list[str] = field(default_factory=list)
    ordinary: Tensor | None = None  # (d,) the mean patch of the background, if there is one

    def of(self, features: Tensor) -> FloatArray:
        """g . f (k,) of features (k, d) or (d,)."""
        return (self.weights * features.double()).sum(dim=1).numpy()


def _find_weighting(
    model: nn.Module | None,
    e: Explanation,
    rows: IntArray,
    *,
    read: Callable[[IntArray], Tensor],  # features of rows of the bag, encoded now
    features: Any,
    background: Background | None,
) -> _Weighting:
    """Take weights from the explanation's stored relevance, else explain again by `lrp` with the model."""
    now = read(rows)
    if background is None and isinstance(stored := getattr(model, "background", None), Background):
        background = stored
    has_width = background is not None and background.dim == now.shape[1]
    ordinary = torch.from_numpy(background.mean) if background is not None and has_width else None
    if features is None and e.relevance is not None:
        shift, notes = baseline_shift(e, None, background, width=now.shape[1])
        weights = _ratio(torch.from_numpy(np.asarray(e.relevance[rows])), now - shift)
        return _Weighting(weights, shift, now, notes, ordinary)
    if features is None:
        x = read(np.arange(len(e)))
    else:
        values = features.features if isinstance(features, Bag) else np.asarray(features, dtype=np.float32)
        if values.ndim != 2 or len(values) != len(e):
            raise InputError(
                f"The features must be those of the {len(e)} explained patches. Got {values.shape}."
            )
        x = torch.from_numpy(np.ascontiguousarray(values))
    notes = _compare(x[rows], now)
    if model is None or e.method != "lrp":
        raise UnsupportedError(
            "Maps inside a patch need relevance per feature: explain with `method='lrp'` and "
            "`feature_level=True`, or pass the model and an explanation of 'lrp'."
        )
    again = explain_again(model, x, e)
    shift, more = baseline_shift(again, x, background, width=now.shape[1])
    notes += more
    scores = e.scores[rows]
    gap = float(np.abs(again.scores[rows] - scores).max() / max(float(np.abs(scores).max()), 1e-12))
    if gap > SAME:
        notes.append(
            f"With this model the patches score differently from the explanation (by up to {100 * gap:.0f} "
            "% of the largest): it had another model, another baseline, or contexts; the difference is in "
            "the audit's constant."
        )
    relevance = torch.from_numpy(np.asarray(again.relevance)[rows])
    return _Weighting(_ratio(relevance, x[rows] - shift), shift, now, notes, ordinary)


def baseline_shift(
    e: Explanation, x: Tensor | None, background: Background | None, *, width: int
) -> tuple[Tensor, list[str]]:
    """Find the baseline of an explanation times its strength; zero, with a note, if it is missing.

    `x` is the explained features (n, d), if known.
    """
    name, strength = e.params.get("baseline"), float(e.params.get("strength") or 0.0)
    if name is None or strength == 0:
        return torch.zeros(width), []
    if x is not None and name == OF_BAG:
        return strength * x.mean(dim=0), []
    if background is not None and name == background.title and background.dim == width:
        return strength * torch.from_numpy(background.mean), []
    return torch.zeros(width), [
        f"The scores are relative to a baseline ({name}) that is missing here, so features are weighted "
        "without it; pass the model or the background."
    ]


def _ratio(relevance: Tensor, features: Tensor) -> Tensor:
    """g = R / f; a feature of zero has no weight."""
    if relevance.shape != features.shape:
        raise InputError(
            f"The explanation has relevance for {relevance.shape[1]} features, but the encoder has "
            f"{features.shape[1]}; use the encoder that the features came from."
        )
    tiny = features.abs() <= 1e-7 * features.abs().amax(dim=1, keepdim=True)
    return torch.where(tiny, torch.zeros_like(features), relevance / features.masked_fill(tiny, 1.0))


def _compare(features: Tensor, now: Tensor) -> list[str]:
    """Note features of the encoder that differ slightly from the bag's; refuse entirely different ones."""
    if features.shape != now.shape:
        raise InputError(
            f"The features have width {features.shape[1]}, but the encoder's have {now.shape[1]}; use the "
            "encoder that the features came from."
        )
    alike = float(torch.nn.functional.cosine_similarity(features.double(), now.double(), dim=1).min())
    if alike < REFUSED:
        raise InputError(
            f"The encoder's features of these patches differ from the bag's (cosine {alike:.2f}): the "
            "encoder, slide or patch size is another; check encoder, slide and patch_px."
        )
    if alike < ALIKE:
        return [f"The encoder's features differ slightly from the bag's (cosine {alike:.3f})."]
    return []


def explain_again(model: nn.Module, bag: Bag | Tensor, e: Explanation) -> Explanation:
    """Explain again with relevance per feature, by the same rules and with the same kind of baseline."""
    params = e.params if e.method == "lrp" else {}
    rules = {key: value for key, value in params.items() if key in RULES}
    against: dict[str, Any] = {} if params.get("baseline") else {"baseline": None}
    return explain(model, bag, method="lrp", target=e.target, feature_level=True, **against, **rules)
