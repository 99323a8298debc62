"""The layers of an encoder that keep places apart, and how their outputs lay them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from xmil.core.errors import UnsupportedError, unknown_name

GAMMA = 0.25  # of networks with batch norm
HELD = 32  # outputs of layers that are held at once
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
    """Relevance summed over channels (b, h, w), and what the tokens in front of the patches hold."""
    if layer is None:
        return features.sum(dim=1), 0.0
    grid = grid_of(features)
    assert grid is not None  # noqa: S101  # checked before the trace
    layout, height, width, front = grid
    if layout == "channels first":
        return features.sum(dim=1), 0.0
    if layout == "channels last":
        return features.sum(dim=-1), 0.0
    per_token = features.sum(dim=-1)
    return per_token[:, front:].reshape(-1, height, width), float(per_token[:, :front].double().sum())


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


def is_cut(module: nn.Module, layer: str, pixels: Tensor) -> bool:
    """Whether all that the network tells of a picture goes through this layer, none of it around."""
    return next(cuts(module, [layer], pixels), None) is not None


def cuts(module: nn.Module, layers: Sequence[str], pixels: Tensor) -> Iterator[str]:
    """Those of the layers that all of a picture goes through: their output held, another changes nothing."""
    for start in range(0, len(layers), HELD):
        part = layers[start : start + HELD]
        with torch.no_grad():
            held, whole = _outputs(module, part, pixels)
        for layer in part:
            with torch.no_grad(), replaced(module, layer, held[layer]):
                other = module(torch.zeros_like(pixels))
            if torch.equal(whole, other):
                yield layer


def _outputs(module: nn.Module, layers: Sequence[str], pixels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What layers give for a picture, and what the network gives."""
    held: dict[str, Tensor] = {}

    def note(name: str, out: Tensor) -> None:
        held[name] = out.clone()

    handles = [
        submodule(module, name).register_forward_hook(lambda _, __, out, name=name: note(name, out))
        for name in layers
    ]
    try:
        return held, module(pixels)
    finally:
        for handle in handles:
            handle.remove()


def last_layers(module: nn.Module, pixels: Tensor) -> Iterator[str]:
    """From the last one back: layers that everything passes, then the others."""
    names = list(reversed(spatial_layers(module, pixels)))
    found = []
    for name in cuts(module, names, pixels):
        found.append(name)
        yield name
    yield from (name for name in names if name not in found)


def preset_gamma(module: nn.Module) -> float:
    """The gamma `lrp` takes by itself: above zero with batch norm, whose activations are positive.

    ResNets and their like gain by it (docs/inside.md); behind layer norm (ViT, Swin, ConvNeXt) signs carry as
    much as sizes, and the plain rule stays.
    """
    return GAMMA if any(isinstance(part, _BatchNorm) for part in module.modules()) else 0.0


def finer_layer(module: nn.Module, pixels: Tensor) -> str:
    """The last layer on a grid finer than the last one's; where all have one grid, that of the middle."""
    found = spatial_layers(module, pixels)
    names, edges = list(found), list(found.values())
    finer = [name for name in names if found[name] > edges[-1]] or names[: len(names) // 2 + 1]
    layer = next(cuts(module, finer[::-1], pixels), None)
    if layer is None:
        raise UnsupportedError(
            "No layer of this encoder keeps places apart in a way that is known; name one with layer=, "
            "or use method='occlusion'."
        )
    return layer
