"""Maps inside a patch: where, in one tile, its score comes from.

A patch scores g . f(x): f is the encoder, g the relevance per unit of feature that the slide's explanation
gives this patch. Every map here shares that one number among places of the tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from xmil.core.errors import UnsupportedError, bad_parameter
from xmil.core.registry import Registry
from xmil.encoders.encoder import vectors
from xmil.lrp import Composite, trace
from xmil.lrp.composite import AffineRule
from xmil.methods.inside_layers import (
    finer_layer,
    grid_of,
    last_layers,
    on_grid,
    output_of,
    preset_gamma,
    replaced,
)
from xmil.methods.inside_views import MOST, VIEWS, over_views
from xmil.nn.folded import fold_batch_norm

SMALL = 1e-2  # of all relevance: less than this on the patch tokens, and the class token has it all
OTHER = 1e-3  # of the largest term: an account that is further from closing is refused
EXPLODED = 1e3  # times what the features hold: a map with larger terms is refused
PIXELS = "pixels"  # as the name of a layer: the picture itself


@dataclass(frozen=True, eq=False)
class Tile:
    """One patch as the encoder sees it: pixels (1, 3, h, w) around zero, and its features' weights g (d,).

    `shifted(dx, dy)` reads the tile moved by shares of its edge, as the encoder sees it. `ordinary` (d,) are
    the features of an ordinary patch, where they are known.
    """

    pixels: Tensor
    weights: Tensor
    shifted: Callable[[float, float], Tensor]
    ordinary: Tensor | None = None

    def in_kind(self) -> Tensor:
        """The weights without their part along the ordinary patch: a copy of it, pale or dense, has none."""
        if self.ordinary is None or not float(self.ordinary.norm()):
            return self.weights
        along = self.ordinary.to(self.weights) / self.ordinary.to(self.weights).norm()
        kept: Tensor = self.weights - (self.weights @ along) * along
        return kept


@dataclass(frozen=True, eq=False)
class TileMap:
    """A map (h, w) and what of g . f(x) it does not place: `constant` at places that no pixel decides.

    Of b pictures at once, the maps (b, h, w) and the sums of what they do not place.
    """

    values: Tensor
    constant: float = 0.0
    other: float = 0.0


@dataclass(frozen=True)
class MapSettings:
    """What the maps take: see `explain_inside`."""

    layer: str | None = None
    square: float = 1 / 6
    steps: int = 16
    stride: float = 0.25
    epsilon: float | None = None
    gamma: float | None = None
    batch: int = 32
    views: int = len(VIEWS)
    reach: float = 1 / 3

    def __post_init__(self) -> None:
        for name in ("square", "stride"):
            if not 0 < getattr(self, name) <= 1:
                raise bad_parameter(
                    name, "explain_inside", "a share in the range (0, 1]", getattr(self, name)
                )
        for name in ("steps", "batch", "views"):
            if getattr(self, name) < 1:
                raise bad_parameter(
                    name, "explain_inside", "an int in the range [1, inf)", getattr(self, name)
                )
        if self.views > MOST:
            raise bad_parameter("views", "explain_inside", f"an int in the range [1, {MOST}]", self.views)
        if not 0 <= self.reach <= 0.5:
            raise bad_parameter("reach", "explain_inside", "a share in the range [0, 0.5]", self.reach)


@dataclass(frozen=True, eq=False)
class EncoderNetwork:
    """The network of an encoder: images (b, 3, h, w) to features (b, d); `module` if it is a torch module."""

    features: Callable[[Tensor], Tensor]
    module: nn.Module | None
    layers: dict[str, str] = field(default_factory=dict)  # found once per encoder
    copies: dict[str, EncoderNetwork] = field(default_factory=dict)

    def score(self, tile: Tile, pixels: Tensor) -> Tensor:
        """g . f(x) (b,) of pictures (b, 3, h, w)."""
        return self.features(pixels) @ tile.weights

    def seen(self) -> nn.Module:
        """The module whose operations can be followed; an error for others."""
        if self.module is None or isinstance(self.module, torch.jit.ScriptModule):
            raise UnsupportedError("This encoder hides its operations; use method='occlusion' or 'shifted'.")
        return self.module

    def folded(self, pixels: Tensor) -> EncoderNetwork:
        """The network with batch norm folded into the layers before it, made once."""
        if "folded" not in self.copies:
            module = fold_batch_norm(self.seen(), pixels).requires_grad_(False)
            name = type(module).__name__
            self.copies["folded"] = EncoderNetwork(lambda x: vectors(module(x), name, len(x)), module)
        return self.copies["folded"]


MapMethod = Callable[[EncoderNetwork, Tile, MapSettings], TileMap]
MAPS: Registry[MapMethod] = Registry("map inside a patch", group="xmil.maps")


def map_tile(method: str, network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """The map of one tile by a registered method, in whole single precision: accounts have to close."""
    if not tile.pixels.is_cuda:
        return MAPS[method](network, tile, settings)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        return MAPS[method](network, tile, settings)
    finally:
        torch.backends.cudnn.allow_tf32 = before


@MAPS.register("tokens")
def tokens(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """Relevance on the encoder's last spatial map, or on the patch tokens that its pooling reads."""
    module = network.seen()
    if settings.layer is not None:
        return _at_layer(network, tile, settings.layer, settings)
    if "tokens" in network.layers:
        return _at_layer(network, tile, network.layers["tokens"], settings)
    for layer in last_layers(module, tile.pixels):
        made = _at_layer(network, tile, layer, settings)
        size = float(made.values.abs().sum()) + abs(made.constant)
        if float(made.values.abs().sum()) > SMALL * size:
            network.layers["tokens"] = layer
            return made
    raise UnsupportedError(
        "No layer of this encoder keeps places apart in a way that is known; name one with layer=, "
        "or use method='occlusion'."
    )


@MAPS.register("turned")
def turned(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """Tokens averaged over turned, mirrored and moved views of the tile; they add up to the tile's own.

    Where an ordinary patch is known, places differ by what they hold beside it: what a paler or denser copy
    of it would have is shared out evenly, for any network answers to dense tissue, trained or not.
    """
    told = replace(tile, weights=tile.in_kind())
    made = over_views(
        lambda seen: tokens(network, seen, settings), told, n=settings.views, reach=settings.reach
    )
    if tile.ordinary is None:
        return made
    with torch.no_grad():
        rest = network.features(tile.pixels)[0].double() @ (tile.weights - told.weights).double()
    return replace(made, values=made.values + (rest / made.values.numel()).to(made.values))


@MAPS.register("lrp")
def relevance(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """Relevance at a chosen depth: `layer`, "pixels", or the last grid finer than the tokens'."""
    if settings.gamma is None and settings.epsilon is None:
        settings = replace(settings, gamma=preset_gamma(network.seen()))
    used = network.folded(tile.pixels) if settings.gamma or settings.epsilon else network
    if settings.layer is None and "lrp" not in network.layers:
        network.layers["lrp"] = finer_layer(network.seen(), tile.pixels)
    layer = settings.layer or network.layers["lrp"]
    return _at_layer(used, tile, None if layer == PIXELS else layer, settings)


@MAPS.register("gradient")
def gradient(network: EncoderNetwork, tile: Tile, _settings: MapSettings) -> TileMap:
    """Pixel times gradient; zero is the encoder's mean colour."""
    network.seen()
    x = tile.pixels.clone().requires_grad_(True)
    with torch.enable_grad():
        value = network.score(tile, x).sum()
        (slope,) = torch.autograd.grad(value, x)
    values = (x.detach() * slope).sum(dim=1)[0]
    return TileMap(values, constant=float(value.detach().double() - values.double().sum()))


@MAPS.register("ig")
def integrated_gradients(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """Integrated gradients from the tile's own mean colour; `constant` is the score of that colour."""
    network.seen()
    blank = _blank(tile.pixels)
    total = torch.zeros_like(tile.pixels)
    for k in range(settings.steps):
        x = (blank + (k + 0.5) / settings.steps * (tile.pixels - blank)).requires_grad_(True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(network.score(tile, x).sum(), x)
        total += slope / settings.steps
    values = ((tile.pixels - blank) * total).sum(dim=1)[0]
    with torch.no_grad():
        ends = network.score(tile, torch.cat([tile.pixels, blank])).double()
    gap = float(ends[0] - ends[1] - values.double().sum())
    return TileMap(values, constant=float(ends[1]), other=gap)


@MAPS.register("occlusion")
def occlusion(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """What is lost when a square takes the tile's mean colour; squares overlap by half."""
    return _squares(network, tile, settings, keep=False)


@MAPS.register("keep")
def keep(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """What a square alone brings, the rest of the tile in its mean colour."""
    return _squares(network, tile, settings, keep=True)


@MAPS.register("shifted")
def shifted(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """The tile moved in small steps and encoded again; a place has the mean of the tiles that cover it."""
    cells = round(1 / settings.stride)
    moves = [k / cells for k in range(-(cells // 2), cells // 2 + 1)]
    places = [(dx, dy) for dy in moves for dx in moves]
    total, count = torch.zeros(cells, cells), torch.zeros(cells, cells)
    with torch.no_grad():
        pictures = torch.cat([tile.shifted(dx, dy) for dx, dy in places])
        scores = torch.cat([network.score(tile, part) for part in pictures.split(settings.batch)])
        whole = float(network.score(tile, tile.pixels))
    for (dx, dy), value in zip(places, scores.tolist(), strict=True):
        x, y = round(dx * cells), round(dy * cells)
        covered = (slice(max(0, y), cells + min(0, y)), slice(max(0, x), cells + min(0, x)))
        total[covered] += value / cells**2
        count[covered] += 1
    values = total / count.clamp(min=1)
    return TileMap(values, constant=whole - float(values.double().sum()))


def _at_layer(network: EncoderNetwork, tile: Tile, layer: str | None, settings: MapSettings) -> TileMap:
    """Relevance of g . f at the output of a layer, the network below it left alone."""
    module = network.seen()
    rules = Composite(default=AffineRule(settings.epsilon or 0.0, settings.gamma or 0.0, signed=True))
    start = tile.pixels if layer is None else output_of(module, layer, tile.pixels)
    if layer is not None and grid_of(start) is None:
        raise UnsupportedError(
            f"The layer {layer!r} gives {tuple(start.shape)}, which keeps no places apart; name another."
        )

    def forward(x: Tensor) -> Tensor:
        if layer is None:
            return network.features(x)
        with replaced(module, layer, x):
            return network.features(tile.pixels)

    traced = trace(forward, start, module=module, composite=rules)
    found = traced.relevance(lambda features: features @ tile.weights)
    values, front = on_grid(found.input.features, layer)
    kept = float(sum(found.shares.values())) + front
    value = float(found.output.double().sum())
    other = value - kept - float(values.double().sum())
    held = float((traced.logits * tile.weights).abs().sum())
    _check_closes(other, size=max(abs(value), abs(kept), found.size), layer=layer)
    _check_size(float(values.abs().sum()), held, layer)
    return TileMap(values[0] if len(values) == 1 else values, constant=kept, other=other)


def _check_closes(other: float, *, size: float, layer: str | None) -> None:
    if not abs(other) <= OTHER * max(size, 1e-12):
        where = "the pixels" if layer is None else f"the layer {layer!r}"
        raise UnsupportedError(
            f"The account does not close at {where}: {other:.3g} of {size:.3g} is unexplained. "
            "Stop at a later layer, leave gamma and epsilon out, or use method='occlusion'."
        )


def _check_size(placed: float, held: float, layer: str | None) -> None:
    """Refuse a map whose terms have grown beyond what the features hold: they cancel, and say nothing."""
    if not placed <= EXPLODED * max(held, 1e-12):
        where = "the pixels" if layer is None else f"the layer {layer!r}"
        raise UnsupportedError(
            f"The account explodes at {where}: its terms are {placed / max(held, 1e-12):.1g} times what the "
            "features hold. Stop at a later layer, take a larger gamma, or use method='tokens'."
        )


def _blank(pixels: Tensor) -> Tensor:
    return pixels.mean(dim=(2, 3), keepdim=True).expand_as(pixels)


def _squares(network: EncoderNetwork, tile: Tile, settings: MapSettings, *, keep: bool) -> TileMap:
    """Squares of a share of the tile, each beside the next by half of its edge."""
    height = tile.pixels.shape[-1]
    half = max(1, round(settings.square * height / 2))
    cells = max(2, height // half)
    corners = [(y, x) for y in range(cells - 1) for x in range(cells - 1)]
    blank = _blank(tile.pixels)
    scores = []
    with torch.no_grad():
        for start in range(0, len(corners), settings.batch):
            part = [
                _square(tile.pixels, blank, y * half, x * half, 2 * half, keep)
                for y, x in corners[start : start + settings.batch]
            ]
            scores.append(network.score(tile, torch.cat(part)))
        whole, empty = network.score(tile, torch.cat([tile.pixels, blank])).tolist()
    each = torch.cat(scores).double()
    each = each - empty if keep else whole - each
    total, count = (
        torch.zeros(cells, cells, dtype=torch.float64),
        torch.zeros(cells, cells, dtype=torch.float64),
    )
    for (y, x), value in zip(corners, each.tolist(), strict=True):
        total[y : y + 2, x : x + 2] += value / 4
        count[y : y + 2, x : x + 2] += 1
    values = total / count
    return TileMap(values.float(), constant=whole - float(values.sum()))


def _square(pixels: Tensor, blank: Tensor, top: int, left: int, edge: int, keep: bool) -> Tensor:
    area = (..., slice(top, top + edge), slice(left, left + edge))
    under, over = (blank, pixels) if keep else (pixels, blank)
    changed = under.clone()
    changed[area] = over[area]
    return changed
