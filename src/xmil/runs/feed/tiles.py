"""JPEG tiles decoded by the GPU: read raw, each once for a block of patches, which are cut from them there.

Taken only where the pixels are those of the CPU within one grey level, which is looked at for every slide.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.runs.feed.pillow_resize import FILTERS, fitted, resized
from xmil.runs.feed.reader import PatchSource
from xmil.slides import Slide
from xmil.slides.backends.direct import JpegLevel, jpeg_level

LOOKED_AT = 8  # tiles of a slide that are decoded both ways
NEAR = 1  # grey levels by which they may differ
WHITE = 255
Corners = npt.NDArray[np.int64]


class UnfitForGpuError(Exception):
    """Why a slide's tiles are decoded by the CPU."""


class GpuTiles:
    """The patches of one slide by way of tiles on a device."""

    def __init__(self, slide: Slide, source: PatchSource, xy0: Corners, device: str) -> None:
        self._source, self._device = source, device
        self._level, self._edge, self._scale = _level(slide, source, xy0)
        self._size = slide.level_dimensions[slide.best_level(source.edge0 / source.size)]
        gap = self._gap(slide, xy0)
        if gap > NEAR:
            why = "RGB is taken for YCbCr" if self._level.is_rgb else "colour is subsampled otherwise"
            raise UnfitForGpuError(f"the GPU's pixels differ by {gap} grey levels: {why}")

    def patches(self, xy0: Corners) -> Tensor:
        """Patches (n, h, w, 3) in uint8 as the encoder sees them."""
        corners = xy0 // self._scale
        table, first, tiles = self._table(corners)
        stack = torch.cat([self.decoded(tiles), self._blank()])
        places, steps = (
            torch.from_numpy(table).to(self._device),
            torch.arange(self._edge, device=self._device),
        )
        x, y = (torch.from_numpy(corners[:, axis]).to(self._device)[:, None] + steps for axis in (0, 1))
        width, height = self._level.tile
        column = (x.div(width, rounding_mode="floor") - first[0]).clamp(0, table.shape[1] - 1)
        row = (y.div(height, rounding_mode="floor") - first[1]).clamp(0, table.shape[0] - 1)
        slot = places[row[:, :, None], column[:, None, :]]
        found = stack[slot, (y % height)[:, :, None], (x % width)[:, None, :]]
        outside = [(part < 0) | (part >= side) for part, side in zip((x, y), self._size, strict=True)]
        found.masked_fill_((outside[1][:, :, None] | outside[0][:, None, :])[..., None], WHITE)
        return fitted(resized(found, self._source.size), self._source.fit)

    def _table(self, corners: Corners) -> tuple[Corners, tuple[int, int], list[int]]:
        """Where each tile of an area lies among those decoded, the area's first tile, and these tiles.

        The area has a margin of tiles that are not there: their place is that of the white tile at the end.
        """
        edges = np.array(self._level.tile)
        first, last = corners // edges, (corners + self._edge - 1) // edges
        start = first.min(axis=0) - 1
        used = np.zeros((last.max(axis=0) - start + 2)[::-1], dtype=np.bool_)
        across, down = (last - first).max(axis=0)
        for i in range(down + 1):
            for j in range(across + 1):
                at = np.minimum(first + np.array((j, i)), last)
                kept = ((at >= 0) & (at < (self._level.across, self._level.down))).all(axis=1)
                used[tuple((at - start)[kept].T[::-1])] = True
        rows, columns = np.nonzero(used)
        table = np.full(used.shape, len(rows), dtype=np.int64)
        table[used] = np.arange(len(rows))
        tiles = (rows + start[1]) * self._level.across + columns + start[0]
        return table, (int(start[0]), int(start[1])), [int(tile) for tile in tiles]

    def decoded(self, tiles: list[int]) -> Tensor:
        """Tiles (n, h, w, 3)."""
        if not tiles:
            return self._blank()[:0]
        streams = [self._level.stream(tile) for tile in tiles]
        return torch.stack(decode(streams, self._device)).permute(0, 2, 3, 1)

    def _blank(self) -> Tensor:
        width, height = self._level.tile
        return torch.full((1, height, width, 3), WHITE, dtype=torch.uint8, device=self._device)

    def _gap(self, slide: Slide, xy0: Corners) -> int:
        """By how much patches from all over the slide differ, this way and the CPU's."""
        places = np.linspace(0, len(xy0) - 1, LOOKED_AT) if len(xy0) else np.empty(0)
        gaps = [0]
        for i in np.unique(places.astype(int)):
            ours = self.patches(xy0[i : i + 1])[0].cpu().numpy().astype(np.int16)
            gaps.append(int(np.abs(ours - self._source.pixels(slide, xy0[i])).max()))
        return max(gaps)


def decode(streams: list[bytes], device: str) -> list[Tensor]:
    """JPEG files as pictures (3, h, w) on a device."""
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(_by_pillow(stream)) for stream in streams]
    try:
        from torchvision.io import ImageReadMode, decode_jpeg

        given = [torch.frombuffer(bytearray(stream), dtype=torch.uint8) for stream in streams]
        found: Any = decode_jpeg(given, mode=ImageReadMode.RGB, device=device)
        return list(found)
    except (
        ImportError,
        RuntimeError,
    ) as error:  # without a decoder, or built for another torch
        reason = " ".join(str(error).split())[:120]
        raise UnfitForGpuError(f"torchvision does not decode here: {reason}") from None


def _by_pillow(stream: bytes) -> npt.NDArray[np.uint8]:
    from PIL import Image

    with Image.open(BytesIO(stream)) as picture:
        return np.array(np.asarray(picture.convert("RGB")).transpose(2, 0, 1))


def _level(slide: Slide, source: PatchSource, xy0: Corners) -> tuple[JpegLevel, int, int]:
    """The level that patches are cut from, their edge there, and its scale."""
    level = slide.best_level(source.edge0 / source.size)
    tiles = jpeg_level(slide, level)
    if tiles is None:
        raise UnfitForGpuError("its tiles are no plain JPEG")
    scale = round(slide.level_downsamples[level])
    whole = tuple(scale * side for side in slide.level_dimensions[level]) == slide.dimensions
    if (level and not whole) or source.edge0 % scale or (xy0 % scale).any():
        raise UnfitForGpuError("its patches do not lie on whole pixels")
    if source.stain is not None:
        raise UnfitForGpuError("stains are normalised by the CPU")
    if source.fit.interpolation not in FILTERS:
        raise UnfitForGpuError(f"the encoder resizes by {source.fit.interpolation}")
    return tiles, source.edge0 // scale, scale
