"""Maps inside a patch: the places of a tile that its score comes from.

A patch scores g . f(x): f is the encoder, g the relevance per unit of feature in the slide's explanation.
Every map here distributes that number over the places of the tile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import fuse_conv_bn_weights

from xmil.core.errors import UnsupportedError, bad_parameter
from xmil.core.registry import Registry
from xmil.encoders.encoder import vectors
from xmil.lrp import AffineRule, Composite, hooked, trace

SMALL = 1e-2  # of all relevance: with less on the patch tokens, the class token has it all
OTHER = 1e-3  # of the largest term: larger gaps of the audit are refused
EXPLODED = 1e3  # times the sum over the features: larger maps are refused
PIXELS = "pixels"  # as the name of a layer: the picture itself
GAMMA = 0.25  # for networks with batch norm
LAYERS_AT_ONCE = 32  # with outputs in memory at the same time
PREFIX = 8  # class and register tokens that may stand before the patch tokens
NO_LAYER = (
    "No layer of this encoder has a known spatial layout; name one with `layer=`, or use "
    "`method='occlusion'`."
)


@dataclass(frozen=True, eq=False)
class Tile:
    """One patch as the encoder's input: pixels (1, 3, h, w) around zero, and its features' weights g (d,).

    `shifted(dx, dy)` reads the tile moved by shares of its edge, in the same form. `ordinary` (d,) is the
    features of an ordinary patch, if known.
    """

    pixels: Tensor
    weights: Tensor
    shifted: Callable[[float, float], Tensor]
    ordinary: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TileMap:
    """A map (h, w) and the parts of g . f(x) outside it: `constant` depends on no pixel of a place.

    For b pictures together, the maps (b, h, w) and the sums of both parts.
    """

    values: Tensor
    constant: float = 0.0
    other: float = 0.0


class TileView(NamedTuple):
    """A tile mirrored left to right, or not, then rotated by quarter turns."""

    turns: int
    mirrored: bool

    def of(self, values: Tensor) -> Tensor:
        """Mirror and rotate pictures or maps (..., h, w)."""
        mirrored = values.flip(-1) if self.mirrored else values
        return torch.rot90(mirrored, self.turns, (-2, -1)).contiguous()

    def back(self, values: Tensor) -> Tensor:
        """Undo `of`."""
        upright = torch.rot90(values, -self.turns, (-2, -1))
        return (upright.flip(-1) if self.mirrored else upright).contiguous()


VIEWS = tuple(TileView(turns, mirrored) for mirrored in (False, True) for turns in (0, 2, 1, 3))
MOST = 2 * len(VIEWS) - 1
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1))  # directions in which successive views are moved


@dataclass(frozen=True)
class MapSettings:
    """Settings of the maps: see `explain_inside`."""

    layer: str | None = None
    square: float = 1 / 6
    stride: float = 0.25
    epsilon: float | None = None
    gamma: float | None = None
    batch: int = 32
    views: int = len(VIEWS)
    reach: float = 1 / 3

    def __post_init__(self) -> None:
        for name in ("square", "stride"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise bad_parameter(name, "explain_inside", "a share in the range (0, 1]", value)
        for name in ("batch", "views"):
            if (value := getattr(self, name)) < 1:
                raise bad_parameter(name, "explain_inside", "an int in the range [1, inf)", value)
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

    def traceable(self) -> nn.Module:
        """Return the module; refuse one whose operations are hidden."""
        if self.module is None or isinstance(self.module, torch.jit.ScriptModule):
            raise UnsupportedError(
                "This encoder hides its operations; use `method='occlusion'` or `method='shifted'`."
            )
        return self.module

    def folded(self, pixels: Tensor) -> EncoderNetwork:
        """The network with batch norm folded into the layers before it, made once."""
        if "folded" not in self.copies:
            module = fold_batch_norm(self.traceable(), pixels).requires_grad_(False)
            name = type(module).__name__
            self.copies["folded"] = EncoderNetwork(lambda x: vectors(module(x), name, len(x)), module)
        return self.copies["folded"]


MAPS: Registry[Callable[[EncoderNetwork, Tile, MapSettings], TileMap]] = Registry(
    "map inside a patch", group="xmil.maps"
)


def map_tile(method: str, network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """Map one tile by a registered method, in full single precision, so that audits close."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        return MAPS[method](network, tile, settings)
    finally:
        torch.backends.cudnn.allow_tf32 = before


@MAPS.register("tokens")
def tokens(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """Relevance on the encoder's last spatial map, or on the patch tokens that its pooling reads."""
    module = network.traceable()
    if (layer := settings.layer or network.layers.get("tokens")) is not None:
        return _at_layer(network, tile, layer, settings)
    names = list(reversed(spatial_layers(module, tile.pixels)))
    tried = []  # from the last one back: layers that everything passes through, then the rest
    for layer in chain(cuts(module, names, tile.pixels), names):
        if layer in tried:
            continue
        tried.append(layer)
        tile_map = _at_layer(network, tile, layer, settings)
        size = float(tile_map.values.abs().sum())
        if size > SMALL * (size + abs(tile_map.constant)):
            network.layers["tokens"] = layer
            return tile_map
    raise UnsupportedError(NO_LAYER)


@MAPS.register("turned")
def turned(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """Average `tokens` over rotated, mirrored and moved views of the tile; the sum stays the tile's own.

    If an ordinary patch is known, the map only shows features orthogonal to it: the part along it, as of a
    paler or denser copy, is spread evenly, because any network, even untrained, responds to dense tissue.
    """
    orthogonal = tile
    if tile.ordinary is not None and float(tile.ordinary.norm()):
        along = tile.ordinary.to(tile.weights) / tile.ordinary.to(tile.weights).norm()
        orthogonal = replace(tile, weights=tile.weights - (tile.weights @ along) * along)
    mean = average_views(
        lambda view: tokens(network, view, settings), orthogonal, n=settings.views, reach=settings.reach
    )
    if tile.ordinary is None:
        return mean
    with torch.no_grad():
        rest = network.features(tile.pixels)[0].double() @ (tile.weights - orthogonal.weights).double()
    return replace(mean, values=mean.values + (rest / mean.values.numel()).to(mean.values))


@MAPS.register("lrp")
def relevance(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """Relevance at a chosen depth: `layer`, "pixels", or the last grid finer than the tokens'.

    The default gamma is above zero with batch norm, whose activations are positive: it helps ResNets and
    similar networks (docs/studies/inside.md). After layer norm (ViT, Swin, ConvNeXt) signs matter as much as
    sizes, so the default is the plain rule.
    """
    if settings.gamma is None and settings.epsilon is None:
        has_batch_norm = any(isinstance(part, _BatchNorm) for part in network.traceable().modules())
        settings = replace(settings, gamma=GAMMA if has_batch_norm else 0.0)
    used = network.folded(tile.pixels) if settings.gamma or settings.epsilon else network
    if settings.layer is None and "lrp" not in network.layers:
        network.layers["lrp"] = finer_layer(network.traceable(), tile.pixels)
    layer = settings.layer or network.layers["lrp"]
    return _at_layer(used, tile, None if layer == PIXELS else layer, settings)


@MAPS.register("occlusion")
def occlusion(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """The loss when a square takes the tile's mean colour; squares overlap by half."""
    height = tile.pixels.shape[-1]
    half = max(1, round(settings.square * height / 2))
    cells = max(2, height // half)
    corners = [(y, x) for y in range(cells - 1) for x in range(cells - 1)]
    blank = tile.pixels.mean(dim=(2, 3), keepdim=True).expand_as(tile.pixels)
    scores = []
    with torch.no_grad():
        for start in range(0, len(corners), settings.batch):
            part = corners[start : start + settings.batch]
            pictures = tile.pixels.repeat(len(part), 1, 1, 1)
            for picture, (y, x) in zip(pictures, part, strict=True):
                area = (..., slice(y * half, (y + 2) * half), slice(x * half, (x + 2) * half))
                picture[area] = blank[0][area]
            scores.append(network.score(tile, pictures))
        full = float(network.score(tile, tile.pixels))
    each = full - torch.cat(scores).double()
    total = torch.zeros(cells, cells, dtype=torch.float64)
    count = torch.zeros_like(total)
    for (y, x), value in zip(corners, each.tolist(), strict=True):
        total[y : y + 2, x : x + 2] += value / 4
        count[y : y + 2, x : x + 2] += 1
    values = total / count
    return TileMap(values.float(), constant=full - float(values.sum()))


@MAPS.register("shifted")
def shifted(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """Encode the tile moved in small steps; a place gets the mean of the tiles that cover it."""
    cells = round(1 / settings.stride)
    moves = [k / cells for k in range(-(cells // 2), cells // 2 + 1)]
    places = [(dx, dy) for dy in moves for dx in moves]
    total, count = torch.zeros(cells, cells), torch.zeros(cells, cells)
    with torch.no_grad():
        pictures = torch.cat([tile.shifted(dx, dy) for dx, dy in places])
        scores = torch.cat([network.score(tile, part) for part in pictures.split(settings.batch)])
        full = float(network.score(tile, tile.pixels))
    for (dx, dy), value in zip(places, scores.tolist(), strict=True):
        x, y = round(dx * cells), round(dy * cells)
        covered = (slice(max(0, y), cells + min(0, y)), slice(max(0, x), cells + min(0, x)))
        total[covered] += value / cells**2
        count[covered] += 1
    values = total / count.clamp(min=1)
    return TileMap(values, constant=full - float(values.double().sum()))


def _at_layer(network: EncoderNetwork, tile: Tile, layer: str | None, settings: MapSettings) -> TileMap:
    """Compute the relevance of g . f at the output of a layer; the network before it does not matter."""
    module = network.traceable()
    rules = Composite(default=AffineRule(settings.epsilon or 0.0, settings.gamma or 0.0, signed=True))
    start, (layout, height, width, front) = tile.pixels, ("channels first", 0, 0, 0)
    if layer is not None:
        out: Any = _run_with(module, [layer], tile.pixels)[1].get(layer)
        if (grid := grid_of(out)) is None:
            shape = (
                f"{tuple(out.shape)}, which has no spatial layout" if isinstance(out, Tensor) else "no tensor"
            )
            raise UnsupportedError(f"The layer {layer!r} returns {shape}; name another.")
        start, (layout, height, width, front) = out, grid

    def forward(x: Tensor) -> Tensor:
        if layer is None:
            return network.features(x)
        with hooked(module, [layer], lambda *_: x):  # only what follows the layer depends on x
            return network.features(tile.pixels)

    traced = trace(forward, start, module=module, composite=rules)
    relevance = traced.relevance(lambda features: features @ tile.weights)
    constant = float(sum(relevance.shares.values()))
    values = relevance.input.features.sum(dim=1 if layout == "channels first" else -1)
    if layout == "tokens":  # tokens before the patches have no place
        constant += float(values[:, :front].double().sum())
        values = values[:, front:].reshape(-1, height, width)
    value = float(relevance.output.double().sum())
    other = value - constant - float(values.double().sum())
    size = max(abs(value), abs(constant), relevance.size)
    growth = float(values.abs().sum()) / max(float((traced.logits * tile.weights).abs().sum()), 1e-12)
    where = "the pixels" if layer is None else f"the layer {layer!r}"
    if not abs(other) <= OTHER * max(size, 1e-12):
        raise UnsupportedError(
            f"The audit does not close at {where}: {other:.3g} of {size:.3g} is unexplained. "
            "Stop at a later layer, leave gamma and epsilon out, or use `method='occlusion'`."
        )
    if not growth <= EXPLODED:  # terms far larger than the features' cancel, and mean nothing
        raise UnsupportedError(
            f"The audit explodes at {where}: its terms are {growth:.1g} times those of the features. "
            "Stop at a later layer, use a larger gamma, or `method='tokens'`."
        )
    return TileMap(values[0] if len(values) == 1 else values, constant=constant, other=other)


# A tile rotated, mirrored and moved: tissue has no up or down, so differences between views are noise.


def average_views(mapped: Callable[[Tile], TileMap], tile: Tile, *, n: int, reach: float) -> TileMap:
    """Average a map over the tile and n views of it; its sum, constant and rest are the tile's own.

    Views are rotated, mirrored and moved by a share `reach` of the edge, in whole places; after the first
    eight they are not moved. A place gets the mean of the views that cover it. The difference of the sums is
    spread evenly.
    """
    first = mapped(tile)
    edge = first.values.shape[0]
    step = round(edge * reach)
    views = (*VIEWS, *VIEWS[1:])[:n] if step else VIEWS[1:n]
    moves = [(step * right, step * down) for right, down in (SIDES * 2)]
    moves = [*moves, *((0, 0) for _ in VIEWS)][: len(views)]
    total, count = first.values.double().clone(), torch.ones_like(first.values)
    pictures = [
        view.of(tile.shifted(x / edge, y / edge) if x or y else tile.pixels)
        for view, (x, y) in zip(views, moves, strict=True)
    ]
    maps = []
    if pictures:  # all in one batch
        values = mapped(replace(tile, pixels=torch.cat(pictures))).values.double()
        maps = list(values if values.ndim == 3 else values[None])
    for view, (x, y), values in zip(views, moves, maps, strict=True):
        total[_within(edge, y), _within(edge, x)] += view.back(values)[_within(edge, -y), _within(edge, -x)]
        count[_within(edge, y), _within(edge, x)] += 1
    mean = total / count
    even = (first.values.double().sum() - mean.sum()) / mean.numel()
    return replace(first, values=(mean + even).to(first.values.dtype))


def _within(edge: int, by: int) -> slice:
    """The places that a tile shares with one moved by `by` places."""
    return slice(max(0, by), edge + min(0, by))


# The spatial layers of an encoder, and the layout of their outputs.


def spatial_layers(module: nn.Module, pixels: Tensor) -> dict[str, int]:
    """Find submodules with spatial outputs, in the order they finish, and their number of places per edge."""
    edges: dict[str, int] = {}

    def note(name: str, out: Any) -> None:
        if (grid := grid_of(out)) is not None:
            edges.setdefault(name, grid[1])

    with hooked(module, [name for name, _ in module.named_modules() if name], note), torch.no_grad():
        module(pixels)
    return edges


def grid_of(out: Any) -> tuple[str, int, int, int] | None:
    """Find the spatial layout of an output: layout, height, width, tokens in front; None if it has none."""
    if not isinstance(out, Tensor) or len(out) == 0:
        return None
    if out.ndim == 4:
        _, a, b, c = out.shape
        if b == c > 1:  # tiles are square, and so are their maps
            return "channels first", b, c, 0
        return ("channels last", a, b, 0) if a == b > 1 else None
    if out.ndim == 3:
        for front in range(PREFIX + 1):
            edge = isqrt(max(0, out.shape[1] - front))
            if edge > 1 and edge * edge == out.shape[1] - front:
                return "tokens", edge, edge, front
    return None


def _run_with(module: nn.Module, layers: Sequence[str], pixels: Tensor) -> tuple[Any, dict[str, Any]]:
    """Run a module on a picture; return its output, and the last output of each of its layers."""
    outputs: dict[str, Any] = {}

    def note(name: str, out: Any) -> None:
        outputs[name] = out.clone() if isinstance(out, Tensor) else out

    with hooked(module, layers, note), torch.no_grad():
        return module(pixels), outputs


def cuts(module: nn.Module, layers: Sequence[str], pixels: Tensor) -> Iterator[str]:
    """Find layers that all of a picture goes through: if their output is fixed, no pixel matters."""
    for start in range(0, len(layers), LAYERS_AT_ONCE):
        part = layers[start : start + LAYERS_AT_ONCE]
        result, outputs = _run_with(module, part, pixels)
        for layer in part:
            with torch.no_grad(), hooked(module, [layer], outputs.get):  # its output fixed
                other = module(torch.zeros_like(pixels))
            if torch.equal(result, other):
                yield layer


def finer_layer(module: nn.Module, pixels: Tensor) -> str:
    """Find the last layer with a finer grid than the final one's; if all grids are equal, the middle one."""
    edges = spatial_layers(module, pixels)
    names = list(edges)
    finer = [name for name in names if edges[name] > edges[names[-1]]] or names[: len(names) // 2 + 1]
    layer = next(cuts(module, finer[::-1], pixels), None)
    if layer is None:
        raise UnsupportedError(NO_LAYER)
    return layer


# Batch norm in eval mode, folded into the layer before it: the same function in fewer steps.

ALIKE = 1e-3  # of the largest output: folded networks that differ more are refused


@torch.no_grad()
def fold_batch_norm(module: nn.Module, x: Tensor) -> nn.Module:
    """Copy a module, and fold every batch norm that only reads one layer's output into that layer.

    `x` is a trial input: it shows which layer feeds which norm, and whether the copy computes the same. Norms
    with other inputs stay.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    >>> fold_batch_norm(net, torch.randn(1, 3, 8, 8))
    Sequential(
      (0): Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1))
      (1): Identity()
    )
    """
    twin = copy.deepcopy(module)
    for layer, norm in _pairs(twin, x):
        _fold(twin, layer, norm)
    before, after = module(x), twin(x)
    limit = ALIKE * max(float(before.abs().max()), 1e-12) if isinstance(before, Tensor) else 0.0
    if not isinstance(before, Tensor) or not float((before - after).abs().max()) <= limit:
        raise UnsupportedError(
            f"Batch norm of {type(module).__name__} cannot be folded: the folded copy has another output. "
            "Leave gamma and epsilon out, or use `method='tokens'` or `method='occlusion'`."
        )
    return twin


def _pairs(module: nn.Module, x: Tensor) -> list[tuple[nn.Module, _BatchNorm]]:
    """Find layers whose output goes into a batch norm, if each runs once."""
    outputs: list[tuple[Tensor, nn.Module]] = []  # kept alive, so that no id is reused
    read: list[tuple[nn.Module, _BatchNorm]] = []
    runs: dict[nn.Module, int] = {}

    def after(layer: nn.Module, _: Any, out: Any) -> None:
        runs[layer] = runs.get(layer, 0) + 1
        if isinstance(layer, nn.Conv2d | nn.Linear) and isinstance(out, Tensor):
            outputs.append((out, layer))

    def before(norm: nn.Module, args: Any) -> None:
        source = next((layer for out, layer in outputs if args and out is args[0]), None)
        if source is not None and isinstance(norm, _BatchNorm) and norm.running_mean is not None:
            read.append((source, norm))

    parts = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear | _BatchNorm)]
    handles = [part.register_forward_hook(after) for part in parts]
    handles += [part.register_forward_pre_hook(before) for part in parts if isinstance(part, _BatchNorm)]
    try:
        module(x)
    finally:
        for handle in handles:
            handle.remove()
    sources = [layer for layer, _ in read]
    return [(a, b) for a, b in read if runs[a] == runs[b] == sources.count(a) == 1]


def _fold(module: nn.Module, layer: nn.Module, norm: _BatchNorm) -> None:
    """Fold a norm into its layer; replace it by an identity, or by a scale of one if it has an activation."""
    assert isinstance(layer, nn.Conv2d | nn.Linear)  # noqa: S101  # _pairs finds no others
    assert norm.running_mean is not None and norm.running_var is not None  # noqa: S101, PT018
    layer.weight, layer.bias = fuse_conv_bn_weights(  # linear layers fuse in the same way
        layer.weight, layer.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    if type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        for parent in list(module.modules()):
            for name, child in parent.named_children():
                if child is norm:
                    setattr(parent, name, nn.Identity())
        return
    norm.running_mean.zero_()
    norm.running_var.fill_(1 - norm.eps)
    if norm.weight is not None:
        norm.weight.fill_(1.0)
        norm.bias.zero_()
