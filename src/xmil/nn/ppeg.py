"""PPEG: TransMIL's positional encoding by depth-wise convolutions on the square of instances."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn


class PPEG(nn.Module):
    """Identity plus depth-wise convolutions of three sizes; Shao et al. 2021, arXiv:2106.00908."""

    def __init__(self, dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.proj = _depthwise(dim, 7, bias)
        self.proj1 = _depthwise(dim, 5, bias)
        self.proj2 = _depthwise(dim, 3, bias)

    def forward(self, tokens: Tensor, edge: int) -> Tensor:
        """Instance tokens (b, edge * edge, d), without the class token, to the same shape."""
        b, _, d = tokens.shape
        grid = tokens.transpose(1, 2).contiguous().view(b, d, edge, edge)  # far faster than channels-last
        encoded = (
            grid + _convolved(self.proj, grid) + _convolved(self.proj1, grid) + _convolved(self.proj2, grid)
        )
        return encoded.flatten(2).transpose(1, 2)


def _convolved(conv: nn.Conv2d, grid: Tensor) -> Tensor:
    """The convolution, without the outer weights that meet nothing but padding on a small grid."""
    middle = int(conv.kernel_size[0]) // 2
    reach = min(middle, grid.shape[-1] - 1)
    near = slice(middle - reach, middle + reach + 1)
    return F.conv2d(grid, conv.weight[:, :, near, near], conv.bias, padding=reach, groups=conv.groups)


def _depthwise(dim: int, kernel: int, bias: bool) -> nn.Conv2d:
    return nn.Conv2d(dim, dim, kernel, padding=kernel // 2, groups=dim, bias=bias)


def square_edge(n: int) -> int:
    """Edge of the smallest square that holds n instances.

    >>> [square_edge(n) for n in (1, 2, 4, 5)]
    [1, 2, 2, 3]
    """
    return math.isqrt(n - 1) + 1
