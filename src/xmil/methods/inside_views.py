"""A tile seen turned, mirrored and moved: tissue has no up or down, so what a map owes to a view is noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from xmil.methods.inside_maps import Tile, TileMap


class TileView(NamedTuple):
    """A tile mirrored left to right, or not, then turned by quarters."""

    turns: int
    mirrored: bool

    def of(self, values: Tensor) -> Tensor:
        """Pictures or maps (..., h, w) as this view sees them."""
        seen = values.flip(-1) if self.mirrored else values
        return torch.rot90(seen, self.turns, (-2, -1)).contiguous()

    def back(self, values: Tensor) -> Tensor:
        """What `of` gave, upright again."""
        upright = torch.rot90(values, -self.turns, (-2, -1))
        return (upright.flip(-1) if self.mirrored else upright).contiguous()


VIEWS = tuple(TileView(turns, mirrored) for mirrored in (False, True) for turns in (0, 2, 1, 3))
MOST = 2 * len(VIEWS) - 1
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1))  # where the views are moved to, in turn


def over_views(mapped: Callable[[Tile], TileMap], tile: Tile, *, n: int, reach: float) -> TileMap:
    """The mean of a map over the tile and n views of it; its sum, constant and rest are the tile's own.

    Views are turned, mirrored and moved by a share `reach` of the edge, in whole places; after the first
    eight they stay in place. A place has the mean of the views that hold it. What the mean's sum differs by
    is shared out evenly.
    """
    first = mapped(tile)
    edge = first.values.shape[0]
    step = round(edge * reach)
    views = (*VIEWS, *VIEWS[1:])[:n] if step else VIEWS[1:n]
    moves = [(step * right, step * down) for right, down in (SIDES * 2)]
    moves = [*moves, *((0, 0) for _ in VIEWS)][: len(views)]
    total, count = first.values.double().clone(), torch.ones_like(first.values)
    for view, (x, y), values in zip(views, moves, _seen(mapped, tile, views, moves, edge), strict=True):
        total[_within(edge, y), _within(edge, x)] += view.back(values)[_within(edge, -y), _within(edge, -x)]
        count[_within(edge, y), _within(edge, x)] += 1
    mean = total / count
    even = (first.values.double().sum() - mean.sum()) / mean.numel()
    return replace(first, values=(mean + even).to(first.values.dtype))


def _seen(
    mapped: Callable[[Tile], TileMap],
    tile: Tile,
    views: Sequence[TileView],
    moves: Sequence[tuple[int, int]],
    edge: int,
) -> list[Tensor]:
    """The maps as the views see them, all pictures in one batch."""
    if not views:
        return []
    pictures = [
        view.of(tile.shifted(x / edge, y / edge) if x or y else tile.pixels)
        for view, (x, y) in zip(views, moves, strict=True)
    ]
    values = mapped(replace(tile, pixels=torch.cat(pictures))).values.double()
    return list(values if values.ndim == 3 else values[None])


def _within(edge: int, by: int) -> slice:
    """The places of a tile that one moved by `by` places holds as well."""
    return slice(max(0, by), edge + min(0, by))
