"""The maps under test, with the settings they may choose from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from benchmarks.inside.pictures import SEEN
from xmil.methods.inside_layers import is_cut, spatial_layers
from xmil.methods.inside_maps import PIXELS, MapSettings

Variant = tuple[str, str, str, MapSettings]  # map, variant, method, settings
RULES: dict[str, dict[str, float]] = {
    "plain": {"gamma": 0.0, "epsilon": 0.0},
    "gamma 0.25": {"gamma": 0.25},
    "gamma 10": {"gamma": 10.0},
    "epsilon 0.25": {"epsilon": 0.25},
}
BACKWARD = {
    "tokens": 1,
    "fine": 1,
    "lrp": 1,
    "gradient": 1,
    "ig": 16,
}  # passes backwards; fine counts per move


def depths(net: nn.Module, pixels: Tensor) -> dict[str, str]:
    """Layers to stop at: the last one of each finer grid that everything passes, and the pixels."""
    found = spatial_layers(net, pixels)
    names, edges = list(found), list(found.values())
    chosen: dict[str, str] = {}
    finer = sorted({edge for edge in edges if edges[-1] < edge < SEEN // 2})
    for edge in finer or [edges[-1]]:
        cuts = (name for name in reversed(names) if found[name] == edge and is_cut(net, name, pixels))
        layer = next(cuts, None)
        if layer is not None:
            chosen[f"{edge} x {edge}"] = layer
    if not finer:  # a transformer: one grid, stop at blocks
        cuts = [name for name in names if name.count(".") == 1 and is_cut(net, name, pixels)]
        chosen = {name: name for name in cuts[:-1:2]}
    return {**chosen, "pixels": PIXELS}


def variants(net: nn.Module, pixels: Tensor) -> list[Variant]:
    """Every map with every setting."""
    made: list[Variant] = [("tokens", "", "tokens", MapSettings())]
    made += [("fine", f"{parts} parts", "fine", MapSettings(parts=parts)) for parts in (2, 4)]
    for depth, layer in depths(net, pixels).items():
        name = "lrp to pixels" if layer == PIXELS else "lrp"
        for rule, settings in RULES.items():
            variant = f"{depth}, {rule}"
            made.append((name, variant, "lrp", MapSettings(layer=layer, **settings)))
    for square in (24, 32, 48):
        for name in ("occlusion", "keep"):
            made.append((name, f"{square} px", name, MapSettings(square=square / SEEN, batch=256)))
    made += [("shifted", f"1/{k}", "shifted", MapSettings(stride=1 / k, batch=256)) for k in (4, 8)]
    made += [("ig", "16 steps", "ig", MapSettings(steps=16)), ("gradient", "", "gradient", MapSettings())]
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


def random_map(seed: int) -> Tensor:
    """Noise on the grid of the tokens."""
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))
