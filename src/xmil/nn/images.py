"""Image networks in plain torch, with the names of their published state dicts: ResNet and CTransPath."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmil.core.errors import CheckpointError, unknown_name

STAGES = {  # number of blocks per stage
    "resnet18": (2, 2, 2, 2),
    "resnet50": (3, 4, 6, 3),
    "resnet50_trunc": (3, 4, 6),  # CLAM's: without the last stage
}


class Block(nn.Module):
    """A residual block with batch norms: two 3 x 3 convolutions, or a bottleneck of 1 x 1, 3 x 3, 1 x 1.

    As in torchvision, a bottleneck has its stride in the 3 x 3.
    """

    def __init__(self, in_dim: int, dim: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        self.dim = 4 * dim if bottleneck else dim
        layers = [(in_dim, dim, 3, stride), (dim, dim, 3, 1)]
        if bottleneck:
            layers = [(in_dim, dim, 1, 1), (dim, dim, 3, stride), (dim, self.dim, 1, 1)]
        self.n_layers = len(layers)
        for i, (before, after, kernel, step) in enumerate(layers, start=1):
            setattr(self, f"conv{i}", _convolution(before, after, kernel, step))
            setattr(self, f"bn{i}", nn.BatchNorm2d(after))
        self.downsample = None
        if stride != 1 or in_dim != self.dim:
            projection = _convolution(in_dim, self.dim, 1, stride)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(self.dim))

    def forward(self, x: Tensor) -> Tensor:
        """(b, in_dim, h, w) to (b, dim, h / stride, w / stride)."""
        out = x
        for i in range(1, self.n_layers + 1):
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out))
            out = F.relu(out) if i < self.n_layers else out
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Images (b, 3, h, w), normalised as for ImageNet, to features (b, dim): the mean over the last map.

    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385.
    """

    def __init__(self, name: str = "resnet18") -> None:
        super().__init__()
        if name not in STAGES:
            raise unknown_name("ResNet", name, STAGES)
        depths = STAGES[name]
        self.conv1 = _convolution(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        width = 64
        for i, depth in enumerate(depths):
            strides = [1 if i == 0 else 2] + [1] * (depth - 1)
            blocks = []
            for stride in strides:
                blocks.append(Block(width, 64 << i, stride, bottleneck=name != "resnet18"))
                width = blocks[-1].dim
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.dim, self.stages = width, len(depths)

    def forward(self, x: Tensor) -> Tensor:
        """(b, 3, h, w) to (b, dim)."""
        return self.feature_map(x).mean(dim=(2, 3))

    def feature_map(self, x: Tensor) -> Tensor:
        """(b, 3, h, w) to (b, dim, h / 32, w / 32), or h / 16 and w / 16 with three stages."""
        out: Tensor = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for i in range(1, self.stages + 1):
            out = getattr(self, f"layer{i}")(out)
        return out


def _convolution(in_dim: int, dim: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_dim, dim, kernel, stride=stride, padding=kernel // 2, bias=False)


WINDOW = 7
DEPTHS, HEADS, WIDTH = (2, 2, 6, 2), (3, 6, 12, 24), 96
MASKED = -100.0  # added to the attention between areas that are neighbours only by the cyclic shift


class ConvStem(nn.Module):
    """Two 3 x 3 convolutions of stride 2 and a 1 x 1: tokens of 4 x 4 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.Conv2d(3, width // 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width // 8),
            nn.ReLU(inplace=True),
            nn.Conv2d(width // 8, width // 4, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width // 4),
            nn.ReLU(inplace=True),
            nn.Conv2d(width // 4, width, 1),
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(b, 3, h, w) to (b, h / 4, w / 4, width)."""
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class WindowAttention(nn.Module):
    """Self-attention inside windows, with a learned bias for each relative position."""

    relative_position_index: Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * WINDOW - 1) ** 2, heads))
        positions = torch.cartesian_prod(torch.arange(WINDOW), torch.arange(WINDOW))  # (t, 2)
        offsets = positions[:, None] - positions[None] + WINDOW - 1
        rows = offsets[..., 0] * (2 * WINDOW - 1) + offsets[..., 1]  # of the table, for each pair
        self.register_buffer("relative_position_index", rows)
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
        return self.proj(out.transpose(1, 2).reshape(rows, t, width))


class SwinBlock(nn.Module):
    """Attention in windows, shifted by half a window in every other block, then an MLP."""

    attn_mask: Tensor | None

    def __init__(self, width: int, heads: int, *, side: int, shifted: bool) -> None:
        super().__init__()
        self.shift = WINDOW // 2 if shifted and side > WINDOW else 0
        self.norm1 = nn.LayerNorm(width)
        self.attn = WindowAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(fc1=nn.Linear(width, 4 * width), act=nn.GELU(), fc2=nn.Linear(4 * width, width))
        )
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
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    """Four neighbouring tokens into one of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, width) to (b, h / 2, w / 2, 2 width)."""
        corners = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        return self.reduction(self.norm(torch.cat(corners, dim=-1)))


class Stage(nn.Module):
    """Blocks at one resolution, then patch merging except in the last stage."""

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
    """Images (b, 3, 224, 224), normalised as for ImageNet, to features (b, 768): the mean over tokens.

    Swin-T with a convolutional stem. Liu et al., "Swin Transformer", ICCV 2021, arXiv:2103.14030; Wang et
    al., "Transformer-based unsupervised contrastive learning for histopathological image classification",
    Medical Image Analysis 81, 2022.
    """

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
        return self.norm(x).mean(dim=(1, 2))


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


def shift_mask(side: int, shift: int) -> Tensor:
    """The bias on the attention in shifted windows: (windows, t, t)."""
    area = torch.zeros(1, side, side, 1)
    cuts = (slice(0, -WINDOW), slice(-WINDOW, -shift), slice(-shift, None))
    for i, rows in enumerate(cuts):
        for j, columns in enumerate(cuts):
            area[:, rows, columns] = 3 * i + j
    marks = to_windows(area).squeeze(-1)  # (windows, t)
    return torch.where(marks[:, :, None] == marks[:, None], 0.0, MASKED)


def load_resnet(state: Mapping[str, Any], name: str = "resnet18", *, source: object = "The file") -> ResNet:
    """Load a torchvision state dict, in eval mode; drop the weights of layers that the network lacks.

    >>> load_resnet(ResNet("resnet18").state_dict()).dim
    512
    """
    net = ResNet(name)
    dropped = ("fc.", *(f"layer{i}." for i in range(net.stages + 1, 5)))
    weights = {key: value.float() for key, value in state.items() if not key.startswith(dropped)}
    _fill(net, weights, f"{source}: not the weights of a {name}")
    return net.eval()


def load_ctranspath(state: Mapping[str, Any], *, source: object = "The file") -> CTransPath:
    """Load the published state dict, without its head."""
    net = CTransPath()
    weights = {key: value for key, value in state.items() if not key.startswith("head.")}
    _fill(net, weights, f"{source}: not the weights of CTransPath")
    return net


def _fill(net: nn.Module, weights: Mapping[str, Any], fault: str) -> None:
    try:
        missing, unexpected = net.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{fault}: {str(error).splitlines()[-1].strip()}") from None
    computed = ("num_batches_tracked", "relative_position_index", "attn_mask")
    lost = [key for key in missing if not key.endswith(computed)]
    if lost or unexpected:
        raise CheckpointError(f"{fault}: missing {lost[:3]}, unexpected {unexpected[:3]}.")
