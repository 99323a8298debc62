"""ResNet18 and ResNet50 in plain torch, with the names of torchvision's state dicts.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from xmil.core.errors import CheckpointError, unknown_name


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and the identity."""

    expansion = 1

    def __init__(self, in_dim: int, dim: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(in_dim, dim, 3, stride)
        self.bn1 = nn.BatchNorm2d(dim)
        self.conv2 = _convolution(dim, dim, 3)
        self.bn2 = nn.BatchNorm2d(dim)
        self.downsample = _projection(in_dim, dim, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(b, in_dim, h, w) to (b, dim, h / stride, w / stride)."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """A 1 x 1, a 3 x 3 that takes the stride (torchvision's variant), a 1 x 1, and the identity."""

    expansion = 4

    def __init__(self, in_dim: int, dim: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(in_dim, dim, 1)
        self.bn1 = nn.BatchNorm2d(dim)
        self.conv2 = _convolution(dim, dim, 3, stride)
        self.bn2 = nn.BatchNorm2d(dim)
        self.conv3 = _convolution(dim, dim * 4, 1)
        self.bn3 = nn.BatchNorm2d(dim * 4)
        self.downsample = _projection(in_dim, dim * 4, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(b, in_dim, h, w) to (b, 4 dim, h / stride, w / stride)."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(out)))))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


DEPTHS: dict[str, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet50_trunc": (Bottleneck, (3, 4, 6)),  # CLAM's: without the last stage
}


class ResNet(nn.Module):
    """Images (b, 3, h, w), normalised as for ImageNet, to features (b, dim): the mean over the last map."""

    def __init__(self, name: str = "resnet18") -> None:
        super().__init__()
        if name not in DEPTHS:
            raise unknown_name("ResNet", name, DEPTHS)
        block, depths = DEPTHS[name]
        self.conv1 = _convolution(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        width = 64
        for i, depth in enumerate(depths):
            strides = [1 if i == 0 else 2] + [1] * (depth - 1)
            blocks = []
            for stride in strides:
                blocks.append(block(width, 64 << i, stride))
                width = (64 << i) * block.expansion
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


def load_resnet(state: Mapping[str, Any], name: str = "resnet18") -> ResNet:
    """The network in eval mode with the weights of a torchvision state dict; what it lacks of it is dropped.

    >>> load_resnet(ResNet("resnet18").state_dict()).dim
    512
    """
    net = ResNet(name)
    dropped = ("fc.", *(f"layer{i}." for i in range(net.stages + 1, 5)))
    weights = {key: value.float() for key, value in state.items() if not key.startswith(dropped)}
    try:
        missing, unexpected = net.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(f"These are not the weights of a {name}: {reason}") from None
    lost = [key for key in missing if not key.endswith("num_batches_tracked")]
    if lost or unexpected:
        raise CheckpointError(
            f"These are not the weights of a {name}: missing {lost[:3]}, unexpected {unexpected[:3]}."
        )
    return net.eval()


def _convolution(in_dim: int, dim: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_dim, dim, kernel, stride=stride, padding=kernel // 2, bias=False)


def _projection(in_dim: int, dim: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and in_dim == dim:
        return None
    return nn.Sequential(_convolution(in_dim, dim, 1, stride), nn.BatchNorm2d(dim))
