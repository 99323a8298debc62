"""The layers of an encoder that keep places apart, and how their outputs lay them out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from xmil.core.errors import UnsupportedError, unknown_name

PREFIX = 8  # class and register tokens that may stand before the patch tokens


def spatial_layers(module: nn.Module, pixels: Tensor) -> dict[str, int]:
    """Submodules whose outputs keep places apart, with places along the edge, in the order they finish."""
    found: dict[str, int] = {}

    def note(name: str, out: Any) -> None:
        grid = grid_of(out)
        if grid is not None:
            found.setdefault(name, grid[1])

    handles = [
        part.register_forward_hook(lambda _, __, out, name=name: note(name, out))
        for name, part in module.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            module(pixels)
    finally:
        for handle in handles:
            handle.remove()
    return found


def grid_of(out: Any) -> tuple[str, int, int, int] | None:
    """How an output lays out places: layout, height, width, tokens in front; None where it does not."""
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


def on_grid(features: Tensor, layer: str | None) -> tuple[Tensor, float]:
    """Relevance summed over channels (h, w), and what the tokens in front of the patches hold."""
    if layer is None:
        return features.sum(dim=1)[0], 0.0
    grid = grid_of(features)
    assert grid is not None  # noqa: S101  # checked before the trace
    layout, height, width, front = grid
    if layout == "channels first":
        return features.sum(dim=1)[0], 0.0
    if layout == "channels last":
        return features.sum(dim=-1)[0], 0.0
    per_token = features.sum(dim=-1)[0]
    return per_token[front:].reshape(height, width), float(per_token[:front].double().sum())


def output_of(module: nn.Module, layer: str, pixels: Tensor) -> Tensor:
    """What a layer gives for a picture, the last time it runs."""
    held: list[Tensor] = []
    handle = submodule(module, layer).register_forward_hook(lambda _, __, out: held.append(out))
    try:
        with torch.no_grad():
            module(pixels)
    finally:
        handle.remove()
    if not held or not isinstance(held[-1], Tensor):
        raise UnsupportedError(f"The layer {layer!r} gives no tensor; name another.")
    return held[-1].clone()


@contextmanager
def replaced(module: nn.Module, layer: str, value: Tensor) -> Iterator[None]:
    """The network with a layer's output given: only what follows depends on it."""
    handle = submodule(module, layer).register_forward_hook(lambda *_: value)
    try:
        yield
    finally:
        handle.remove()


def submodule(module: nn.Module, layer: str) -> nn.Module:
    """A part of a network by its dotted name."""
    parts: dict[str, nn.Module] = dict(module.named_modules())
    if layer not in parts or not layer:
        raise unknown_name("layer", layer, (name for name in parts if name))
    return parts[layer]


@torch.no_grad()
def is_cut(module: nn.Module, layer: str, pixels: Tensor) -> bool:
    """Whether all that the network tells of a picture goes through this layer, none of it around."""
    held = output_of(module, layer, pixels)
    with replaced(module, layer, held):
        whole, blank = module(pixels), module(torch.zeros_like(pixels))
    return bool(torch.equal(whole, blank))


def finer_layer(module: nn.Module, pixels: Tensor) -> str:
    """The last layer on a grid finer than the last one's; where all have one grid, that of the middle."""
    found = spatial_layers(module, pixels)
    names, edges = list(found), list(found.values())
    finer = [name for name in names if found[name] > edges[-1]] or names[: len(names) // 2 + 1]
    for name in reversed(finer):
        if is_cut(module, name, pixels):
            return name
    raise UnsupportedError(
        "No layer of this encoder keeps places apart in a way that is known; name one with layer=, "
        "or use method='occlusion'."
    )
