"""Losses by task, one number for each bag; Cox alone compares the bags of a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.core.errors import InputError
from xmil.core.registry import Registry
from xmil.core.task import TASKS
from xmil.training.config import Loss
from xmil.training.targets import Goal, Rows

BagLoss = Callable[[Tensor, Tensor], Tensor]  # outputs (b, c), targets (b, k) -> (b,)
LOSSES: Registry[Callable[[Loss], BagLoss]] = Registry("task with a loss", group="xmil.task_losses")


def make_loss(goal: Goal, settings: Loss) -> BagLoss:
    """The loss of each bag (b,) from outputs (b, c) and targets (b, k)."""
    if settings.name != "auto" and TASKS[goal.task].truth != "values":
        raise InputError(f"loss.name {settings.name!r} is for regression; leave it out for {goal.task}.")
    return LOSSES[goal.task](settings)


def bag_weights(goal: Goal, train: Rows, settings: Loss) -> Tensor:
    """A weight for each bag of the cohort (n,): that of its class; for Cox, whether it has an event."""
    weights = torch.ones(len(goal.values), dtype=torch.float32)
    if TASKS[goal.task].compares:
        weights = torch.from_numpy(goal.values[:, 1]).float()
    if settings.class_weights == "none":
        return weights
    if TASKS[goal.task].truth != "class":
        raise InputError(f"loss.class_weights is for classification; leave it out for {goal.task}.")
    classes, n = goal.values[:, 0].astype(int), len(goal.class_names or ())
    if settings.class_weights == "balanced":
        counts = np.bincount(classes[train], minlength=n)
        per_class = len(train) / (n * counts)
    else:
        per_class = np.array(settings.class_weights, dtype=float)
        if len(per_class) != n:
            raise InputError(f"loss.class_weights has {len(per_class)} numbers for {n} classes.")
        if not (per_class[classes[train]] > 0).any():
            raise InputError("loss.class_weights are zero for every training bag; nothing would be learnt.")
    return torch.from_numpy(per_class[classes]).float()


@LOSSES.register("classification")
def _class_loss(settings: Loss) -> BagLoss:
    smoothing = settings.label_smoothing
    return lambda outputs, targets: F.cross_entropy(
        outputs, targets[:, 0].long(), reduction="none", label_smoothing=smoothing
    )


@LOSSES.register("multilabel")
def _label_loss(_: Loss) -> BagLoss:
    return lambda outputs, targets: F.binary_cross_entropy_with_logits(
        outputs, targets.to(outputs), reduction="none"
    ).mean(dim=1)


@LOSSES.register("regression")
def _value_loss(settings: Loss) -> BagLoss:
    kinds: dict[str, Callable[..., Tensor]] = {
        "auto": F.mse_loss,
        "mse": F.mse_loss,
        "mae": F.l1_loss,
        "huber": F.huber_loss,
    }
    kind = kinds[settings.name]
    return lambda outputs, targets: kind(outputs, targets.to(outputs), reduction="none").mean(dim=1)


@LOSSES.register("survival")
def _hazard_loss(settings: Loss) -> BagLoss:
    return partial(hazard_nll, alpha=settings.alpha)


@LOSSES.register("cox")
def _cox(_: Loss) -> BagLoss:
    return cox_loss


def hazard_nll(outputs: Tensor, targets: Tensor, *, alpha: float = 0.0) -> Tensor:
    """Negative log-likelihood of discrete hazards (Zadeh and Schmid 2020, arXiv:2006.12442).

    h_t = sigmoid(output_t), S(t) = prod_{s <= t} (1 - h_s); targets are (bin, event). A bag with an event in
    bin y has survived all bins before and met h_y; a censored one has survived through y. `alpha` takes
    weight from censored bags.
    """
    time, event = targets[:, :1], targets[:, 1].to(outputs)
    bins = torch.arange(outputs.shape[1], device=outputs.device)[None, :]
    survive, die = F.logsigmoid(-outputs), F.logsigmoid(outputs)  # log(1 - h), log h
    through = (survive * (bins <= time)).sum(dim=1)  # log S(y)
    seen = (survive * (bins < time) + die * (bins == time)).sum(dim=1)
    return -(event * seen + (1 - alpha) * (1 - event) * through)


def cox_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Negative log partial likelihood of each bag against those still at risk in the batch (Breslow's ties).

    Bags without an event give 0 and weigh nothing, so that the mean over a batch is one over its events.
    """
    risk, time, event = outputs[:, 0], targets[:, 0], targets[:, 1].to(outputs)
    at_risk = time[None, :] >= time[:, None]  # (b, b): who is still there when bag i has its event
    log_sum = torch.where(at_risk, risk[None, :], float("-inf")).logsumexp(dim=1)
    return event * (log_sum - risk)
