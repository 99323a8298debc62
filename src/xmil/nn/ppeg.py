"""PPEG: TransMIL's positional encoding by depth-wise convolutions on the square of instances."""

from __future__ import annotations

import math

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
        encoded: Tensor = grid + self.proj(grid) + self.proj1(grid) + self.proj2(grid)
        return encoded.flatten(2).transpose(1, 2)


def _depthwise(dim: int, kernel: int, bias: bool) -> nn.Conv2d:
    return nn.Conv2d(dim, dim, kernel, padding=kernel // 2, groups=dim, bias=bias)


def square_edge(n: int) -> int:
    """Edge of the smallest square that holds n instances.

    >>> [square_edge(n) for n in (1, 2, 4, 5)]
    [1, 2, 2, 3]
    """
    return math.isqrt(n - 1) + 1
