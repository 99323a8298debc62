"""Swin-T with a convolutional stem: the network of CTransPath, with the names of its published state dict.

Liu et al., "Swin Transformer", ICCV 2021, arXiv:2103.14030; Wang et al., "Transformer-based unsupervised
contrastive learning for histopathological image classification", Medical Image Analysis 81, 2022.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WINDOW = 7
DEPTHS, HEADS, WIDTH = (2, 2, 6, 2), (3, 6, 12, 24), 96
FAR = -100.0  # added to the attention between areas that only the cyclic shift brought together


class ConvStem(nn.Module):
    """Two 3 x 3 convolutions of stride 2 and a 1 x 1: tokens of 4 x 4 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before, after = 3, width // 8
        for _ in range(2):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
            before, after = after, after * 2
        self.proj = nn.Sequential(*layers, nn.Conv2d(before, width, 1))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(b, 3, h, w) to (b, h / 4, w / 4, width)."""
        out: Tensor = self.norm(self.proj(x).permute(0, 2, 3, 1))
        return out


class WindowAttention(nn.Module):
    """Self-attention inside windows, with a learned bias for each relative position."""

    relative_position_index: Tensor

    def __init__(self, width: int, heads: int, window: int = WINDOW) -> None:
        super().__init__()
        self.heads = heads
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.register_buffer("relative_position_index", relative_positions(window))
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Windows (b * windows, t, width); `mask` (windows, t, t) is added after a shift."""
        rows, t, width = x.shape
        qkv = self.qkv(x).reshape(rows, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        index = self.relative_position_index.reshape(-1)
        bias = self.relative_position_bias_table[index].reshape(t, t, -1).permute(2, 0, 1).unsqueeze(0)
        if mask is not None:
            images = rows // len(mask)
            bias = (bias + mask.unsqueeze(1)).repeat(images, 1, 1, 1)  # (b * windows, heads, t, t)
        out = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=bias.to(qkv.dtype))
        result: Tensor = self.proj(out.transpose(1, 2).reshape(rows, t, width))
        return result


class SwinBlock(nn.Module):
    """Attention in windows, shifted by half a window in every other block, then an MLP."""

    attn_mask: Tensor | None

    def __init__(self, width: int, heads: int, *, side: int, shifted: bool) -> None:
        super().__init__()
        self.shift = WINDOW // 2 if shifted and side > WINDOW else 0
        self.norm1 = nn.LayerNorm(width)
        self.attn = WindowAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential()
        self.mlp.add_module("fc1", nn.Linear(width, 4 * width))
        self.mlp.add_module("act", nn.GELU())
        self.mlp.add_module("fc2", nn.Linear(4 * width, width))
        self.register_buffer("attn_mask", shift_mask(side, self.shift) if self.shift else None)

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, width) to the same."""
        h, w = x.shape[1:3]
        shifted = self.norm1(x)
        if self.shift:
            shifted = torch.roll(shifted, (-self.shift, -self.shift), dims=(1, 2))
        attended = from_windows(self.attn(to_windows(shifted), self.attn_mask), h, w)
        if self.shift:
            attended = torch.roll(attended, (self.shift, self.shift), dims=(1, 2))
        x = x + attended
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PatchMerging(nn.Module):
    """Four neighbouring tokens into one of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, width) to (b, h / 2, w / 2, 2 width)."""
        corners = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        out: Tensor = self.reduction(self.norm(torch.cat(corners, dim=-1)))
        return out


class Stage(nn.Module):
    """Blocks at one resolution, then a merging but for the last stage."""

    def __init__(self, width: int, depth: int, heads: int, *, side: int, last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            SwinBlock(width, heads, side=side, shifted=i % 2 == 1) for i in range(depth)
        )
        self.downsample = None if last else PatchMerging(width)

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, width) to the next stage's input."""
        for block in self.blocks:
            x = block(x)
        return x if self.downsample is None else self.downsample(x)


class CTransPath(nn.Module):
    """Images (b, 3, 224, 224), normalised as for ImageNet, to features (b, 768): the mean over tokens."""

    size = 224

    def __init__(self) -> None:
        super().__init__()
        self.dim = WIDTH << (len(DEPTHS) - 1)
        self.patch_embed = ConvStem(WIDTH)
        self.layers = nn.ModuleList(
            Stage(WIDTH << i, depth, heads, side=self.size >> (2 + i), last=i == len(DEPTHS) - 1)
            for i, (depth, heads) in enumerate(zip(DEPTHS, HEADS, strict=True))
        )
        self.norm = nn.LayerNorm(self.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(b, 3, 224, 224) to (b, 768)."""
        x = self.patch_embed(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x).mean(dim=(1, 2))
        return out


def to_windows(x: Tensor) -> Tensor:
    """(b, h, w, d) to (b * windows, 49, d)."""
    b, h, w, d = x.shape
    x = x.reshape(b, h // WINDOW, WINDOW, w // WINDOW, WINDOW, d)
    return x.transpose(2, 3).reshape(-1, WINDOW * WINDOW, d)


def from_windows(x: Tensor, h: int, w: int) -> Tensor:
    """(b * windows, 49, d) back to (b, h, w, d)."""
    d = x.shape[-1]
    x = x.reshape(-1, h // WINDOW, w // WINDOW, WINDOW, WINDOW, d)
    return x.transpose(2, 3).reshape(-1, h, w, d)


def relative_positions(window: int) -> Tensor:
    """For each pair of places in a window, the row of the bias table: (t, t)."""
    places = torch.cartesian_prod(torch.arange(window), torch.arange(window))  # (t, 2)
    apart = places[:, None] - places[None] + window - 1
    return apart[..., 0] * (2 * window - 1) + apart[..., 1]


def shift_mask(side: int, shift: int) -> Tensor:
    """What is added to the attention in shifted windows: (windows, t, t)."""
    area = torch.zeros(1, side, side, 1)
    cuts = (slice(0, -WINDOW), slice(-WINDOW, -shift), slice(-shift, None))
    for i, rows in enumerate(cuts):
        for j, columns in enumerate(cuts):
            area[:, rows, columns] = 3 * i + j
    marks = to_windows(area).squeeze(-1)  # (windows, t)
    return torch.where(marks[:, :, None] == marks[:, None], 0.0, FAR)
