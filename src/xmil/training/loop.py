"""Parts that all training loops share: padding, optimiser, learning rate, classification loss, stopping rule.

Only needs torch, so that the benchmark can train on machines without the other dependencies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from xmil.training.config import Optim


@dataclass(frozen=True)
class Stopping:
    """The stopping rule; epochs count from 1.

    The first `warmup` epochs never count as best; training stops `patience` epochs after the best one.
    """

    warmup: int
    patience: int | None

    def counts(self, epoch: int) -> bool:
        """Whether the epoch may be the best."""
        return epoch > self.warmup

    def is_over(self, epoch: int, best: int) -> bool:
        """Whether to stop after an epoch; `best` is 0 before the first best one.

        >>> [Stopping(warmup=2, patience=3).is_over(epoch, best=4) for epoch in (6, 7)]
        [False, True]
        """
        return self.patience is not None and epoch - max(best, self.warmup) >= self.patience


def padded(bags: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Pad bags (n, d) to one tensor (b, n, d), with a mask (b, n) if their sizes differ."""
    lengths = torch.tensor([len(bag) for bag in bags], device=bags[0].device)
    if len(lengths.unique()) == 1:
        return torch.stack(list(bags)), None
    x = nn.utils.rnn.pad_sequence(list(bags), batch_first=True)
    return x, torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)


def class_loss(
    outputs: Tensor, labels: Tensor, *, reduction: str = "none", label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy (...) of outputs (..., c) and labels (...), or its mean."""
    losses = F.cross_entropy(
        outputs.flatten(0, -2), labels.flatten(), reduction=reduction, label_smoothing=label_smoothing
    )
    return losses.view(labels.shape) if reduction == "none" else losses


def make_optimizer(
    model: nn.Module, *, name: str, lr: float, momentum: float = 0.9, weight_decay: float = 0.0
) -> Optimizer:
    """Make an optimiser for a model's parameters: sgd, adam or adamw."""
    if name == "sgd":
        return SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    kind = Adam if name == "adam" else AdamW
    return kind(model.parameters(), lr=lr, weight_decay=weight_decay)


def make_scheduler(optimizer: Optimizer, settings: Optim, *, epochs: int) -> LambdaLR:
    """Make the learning rate schedule; step it once after each epoch."""
    return LambdaLR(optimizer, lambda epoch: lr_factor(epoch, settings, epochs=epochs))


def lr_factor(epoch: int, settings: Optim, *, epochs: int) -> float:
    """The factor of the learning rate in an epoch, counted from 0.

    >>> from xmil.training.config import Optim
    >>> [round(lr_factor(e, Optim(schedule="cosine", warmup_epochs=2), epochs=6), 3) for e in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    warm = settings.warmup_epochs
    if epoch < warm:
        return (epoch + 1) / warm
    if settings.schedule == "constant":
        return 1.0
    floor = settings.min_lr / settings.lr
    if settings.schedule == "step":
        return max(floor, settings.gamma ** ((epoch - warm) // settings.step_epochs))
    done = min(1.0, (epoch - warm) / max(1, epochs - warm))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
