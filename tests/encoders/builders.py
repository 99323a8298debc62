"""Encoders of a user's own, as `module:function` names them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

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


class Mortal(Mean):
    """Kills its process once a slide of three is written to the folder that DIES_IN names, and not all are.

    Batches may come from several slides by turns. By the last batch at least one slide has all of its own, so
    that its file is waited for; before that, a moment must do.
    """

    batches, every = 0, 15

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        if "DIES_IN" in os.environ and self.batches > self.every // 3:
            out = Path(os.environ["DIES_IN"])
            tries = 0
            while not list(out.glob("*.h5")) and (tries < 10 or self.batches == self.every):
                time.sleep(0.02)
                tries += 1
            if list(out.glob("*.h5")):
                children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
                out.with_name("children").write_text(children)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def mortal() -> nn.Module:
    return Mortal()


def tokens() -> nn.Module:
    return nn.Flatten(2)


def broken() -> nn.Module:
    raise RuntimeError("no licence")


NOT_A_FUNCTION = 3
