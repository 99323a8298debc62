"""Optimisers and schedules of the learning rate, from their settings."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from xmil.training.config import Optim


def make_optimizer(model: nn.Module, settings: Optim) -> Optimizer:
    """A fresh optimiser for a model's parameters."""
    weights, lr, decay = model.parameters(), settings.lr, settings.weight_decay
    if settings.name == "sgd":
        return SGD(weights, lr=lr, momentum=settings.momentum, weight_decay=decay)
    kind = Adam if settings.name == "adam" else AdamW
    return kind(weights, lr=lr, weight_decay=decay)


def make_scheduler(optimizer: Optimizer, settings: Optim, *, epochs: int) -> LambdaLR:
    """The learning rate by epoch; step it once after each."""
    return LambdaLR(optimizer, lambda epoch: lr_factor(epoch, settings, epochs=epochs))


def lr_factor(epoch: int, settings: Optim, *, epochs: int) -> float:
    """What the learning rate is multiplied by in an epoch, counted from 0.

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
