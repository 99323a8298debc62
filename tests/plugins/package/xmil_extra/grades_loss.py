"""The loss of the task: minus the log probability of the true grade."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.training.config import Loss
from xmil.training.fit import LOSSES, BagLoss
from xmil.training.training_set import GOALS, Goal, Learnable


@GOALS.register("grades")
def goal(asked: Learnable) -> Goal:
    """One output less than there are grades."""
    return asked.goal(asked.check_classes() - 1)


@LOSSES.register("grades")
def loss(_: Loss) -> BagLoss:
    """Steps below the grade were taken, the one at the grade was not."""

    def of(outputs: Tensor, targets: Tensor) -> Tensor:
        step = torch.arange(outputs.shape[1])[None, :]
        grade = targets[:, :1].long()
        taken, stopped = F.logsigmoid(outputs), F.logsigmoid(-outputs)
        return -(taken * (step < grade) + stopped * (step == grade)).sum(dim=1)

    return of
