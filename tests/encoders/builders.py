"""Encoders of a user's own, as `module:function` names them."""

from __future__ import annotations

import time

import torch
from torch import nn

from xmil.encoders import Transform


class Mean(nn.Module):
    """The mean colour, eight times over."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=(2, 3)).repeat(1, 8)


def network() -> nn.Module:
    return Mean()


def with_transform() -> tuple[nn.Module, Transform]:
    return Mean(), Transform(size=16, mean=(0, 0, 0), std=(1, 1, 1))


def own_transform() -> tuple[nn.Module, object]:
    return Mean(), lambda patch: torch.from_numpy(patch.copy()).permute(2, 0, 1).float()


class Slow(Mean):
    """A batch takes its time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)
        return super().forward(x)


def slow() -> nn.Module:
    return Slow()


def tokens() -> nn.Module:
    return nn.Flatten(2)


def broken() -> nn.Module:
    raise RuntimeError("no licence")


NOT_A_FUNCTION = 3
