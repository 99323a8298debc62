"""The maps under test, with the settings they may choose from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.inside.pictures import SEEN
from xmil.methods.inside_maps import (
    MAPS,
    PIXELS,
    EncoderNetwork,
    MapSettings,
    Tile,
    TileMap,
    average_views,
    cuts,
    relevance,
    spatial_layers,
    turned,
)

Variant = tuple[str, str, str, MapSettings]  # map, variant, method, settings
RULES: dict[str, dict[str, float]] = {
    "plain": {"gamma": 0.0, "epsilon": 0.0},
    "gamma 0.25": {"gamma": 0.25},
    "gamma 10": {"gamma": 10.0},
    "epsilon 0.25": {"epsilon": 0.25},
}
BACKWARD = {"tokens": 1, "lrp": 1}
VIEWED = ((4, 0.0), (4, 1 / 3), (8, 0.0), (8, 1 / 6), (8, 1 / 3), (8, 0.5), (15, 1 / 3))


@MAPS.register("turned plain")
def turned_plain(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """`turned` as if no ordinary patch were known: density counts as much as kind."""
    return turned(network, replace(tile, ordinary=None), settings)


@MAPS.register("lrp turned")
def lrp_turned(network: EncoderNetwork, tile: Tile, settings: MapSettings) -> TileMap:
    """Relevance on the finer grid, averaged over turned and mirrored tiles."""
    return average_views(
        lambda seen: relevance(network, seen, settings), tile, n=settings.views, reach=settings.reach
    )


def depths(net: nn.Module, pixels: Tensor) -> dict[str, str]:
    """Layers to stop at: the last one of each finer grid that everything passes, and the pixels."""
    found = spatial_layers(net, pixels)
    names, edges = list(found), list(found.values())
    chosen: dict[str, str] = {}
    finer = sorted({edge for edge in edges if edges[-1] < edge < SEEN // 2})
    for edge in finer or [edges[-1]]:
        layer = next(cuts(net, [name for name in reversed(names) if found[name] == edge], pixels), None)
        if layer is not None:
            chosen[f"{edge} x {edge}"] = layer
    if not finer:  # a transformer: one grid, stop at blocks
        blocks = list(cuts(net, [name for name in names if name.count(".") == 1], pixels))
        chosen = {name: name for name in blocks[:-1:2]}
    return {**chosen, "pixels": PIXELS}


def variants(net: nn.Module, pixels: Tensor) -> list[Variant]:
    """Every map with every setting."""
    made: list[Variant] = [("tokens", "", "tokens", MapSettings())]
    for n, reach in VIEWED:
        about = f"{n} views, moved by {reach:.2g}"
        made.append(("turned", about, "turned", MapSettings(views=n, reach=reach)))
    made.append(("turned plain", "", "turned plain", MapSettings()))
    for rule, given in RULES.items():
        made.append(("lrp turned", rule, "lrp turned", MapSettings(**given)))
    for depth, layer in depths(net, pixels).items():
        name = "lrp to pixels" if layer == PIXELS else "lrp"
        for rule, settings in RULES.items():
            variant = f"{depth}, {rule}"
            made.append((name, variant, "lrp", MapSettings(layer=layer, **settings)))
    made += [
        (name, f"{square} px", name, MapSettings(square=square / SEEN, batch=256))
        for square in (24, 32, 48)
        for name in ("occlusion",)
    ]
    made += [("shifted", f"1/{k}", "shifted", MapSettings(stride=1 / k, batch=256)) for k in (4, 8)]
    return made


@contextmanager
def counted(*nets: nn.Module | None) -> Iterator[list[int]]:
    """How many pictures go through the networks, one number per call."""
    seen: list[int] = []
    handles = [
        net.register_forward_pre_hook(lambda _, given: seen.append(len(given[0]))) for net in nets if net
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def random_map(seed: int, edge: int = 6) -> Tensor:
    """Noise on the grid of the tokens, or another."""
    return torch.randn(edge, edge, generator=torch.Generator().manual_seed(seed))
