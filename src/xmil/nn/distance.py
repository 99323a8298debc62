"""Dot-product attention with distances taken off its weights, as STAMP's ALiBi does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from xmil.nn.attention import SelfAttention, attend, row_blocks


class DistanceAttention(SelfAttention):
    """(softmax(q k) - slope * distance) v, with a slope of its own for each head.

    The weights do not sum to one and can be negative. Both parts are linear in v: the first is an attention,
    the second runs in blocks of rows.
    """

    def __init__(self, dim: int, **shared: Any) -> None:
        super().__init__(dim, **shared)
        self.slopes = nn.Parameter(torch.rand(self.heads))

    def forward(self, x: Tensor, rows: int | None = None, *, places: Tensor) -> Tensor:
        """(b, n, d) at places (b, n, 2) to (b, n, d), or to its first rows."""
        v = self.project(x, 2)
        out = attend(self.project(x[:, :rows], 0), self.project(x, 1), v)
        near = places[:, :rows]
        far = [
            torch.cdist(near[:, block], places).unsqueeze(1) @ v  # (b, h, rows, e)
            for block in row_blocks(near.shape[1], width=places.shape[0] * places.shape[1])
        ]
        return self.finish(out - self.slopes[:, None, None] * torch.cat(far, dim=2), v)
