"""All repetitions of a configuration trained at once, each with its own early stop and best checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.core.errors import InputError, bad_parameter
from xmil.toy.digit_bags import BagSet, Table
from xmil.toy.stacked import Repeated, Stacked, make_optimizer

logger = logging.getLogger(__name__)

VALIDATION_NUMBERS = {"cpu": 1 << 22, "cuda": 1 << 29}  # features of one validation pass
OnEpoch = Callable[[int, int], None]  # epochs done, models still training


@dataclass(frozen=True)
class Training:
    """How to train: the optimizer, and when to stop.

    The first `warmup` epochs never count as best; training ends after `patience` epochs without a lower
    validation loss. Bags keep their order.
    """

    optimizer: str = "sgd"
    lr: float = 1e-4
    batch: int = 16
    epochs: int = 1000
    patience: int = 100
    warmup: int = 10

    def __post_init__(self) -> None:
        for name in ("batch", "epochs", "patience"):
            if getattr(self, name) < 1:
                raise bad_parameter(name, "Training", "an int in the range [1, inf)", getattr(self, name))


@dataclass(frozen=True)
class Fitted:
    """The best checkpoint of every model, and when it was reached."""

    models: Stacked
    best_epoch: list[int]
    best_loss: list[float]
    epochs: list[int]


def fit(
    models: Stacked,
    train: BagSet,
    validation: BagSet,
    table: Table,
    *,
    training: Training,
    on_epoch: OnEpoch | None = None,
) -> Fitted:
    """Train stacked models, each on its own bags (R, b, n); the models given are changed.

    Models that have stopped leave the stack once half of it is done.
    """
    if len(models) != len(train.rows) or len(models) != len(validation.rows):
        raise InputError(
            f"{len(models)} models need as many sets of bags. "
            f"Got {len(train.rows)} and {len(validation.rows)}."
        )
    race = _Race(models, training)
    lap = _Lap(models, train, validation, table, training)
    for epoch in range(training.epochs):
        lap.train_epoch()
        race.record(lap.models, lap.validation_losses(), epoch)
        if on_epoch is not None:
            on_epoch(epoch + 1, len(race.running))
        if not len(race.running):
            break
        if len(race.running) <= len(lap.models) // 2:
            lap = lap.select(race.leave())
    return race.result()


class _Lap:
    """The models still in training with their bags, optimizer and, on a GPU, recorded step."""

    def __init__(
        self, models: Stacked, train: BagSet, validation: BagSet, table: Table, training: Training
    ) -> None:
        self.models, self.table, self.training = models, table, training
        self._sets = (train, validation)
        self._rows, self._labels = table.to_rows(train.rows), table.to_rows(train.labels)
        self._val_rows, self._val_labels = table.to_rows(validation.rows), table.to_rows(validation.labels)
        self.optimizer = make_optimizer(training.optimizer, models.flat, lr=training.lr)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=models.flat.device)
        self._offsets = torch.arange(training.batch, device=models.flat.device)
        self._step = Repeated(
            self._full_step, [*models.state().values(), *self.optimizer.state.values(), self._cursor]
        )

    def select(self, keep: Tensor) -> _Lap:
        """The same with some of the models."""
        at = keep.cpu().numpy()
        train, validation = (BagSet(s.rows[at], s.codes[at], s.labels[at]) for s in self._sets)
        lap = _Lap(self.models.select(keep), train, validation, self.table, self.training)
        for name, value in self.optimizer.state.items():
            lap.optimizer.state[name].copy_(value[keep])
        return lap

    def train_epoch(self) -> None:
        """One pass over the training bags, in their order."""
        n_bags, batch = self._labels.shape[1], self.training.batch
        self._cursor.zero_()
        for _ in range(n_bags // batch):
            self._step()
        if n_bags % batch:
            self._learn(self._rows[:, -(n_bags % batch) :], self._labels[:, -(n_bags % batch) :])

    def _full_step(self) -> None:
        at = self._cursor + self._offsets
        self._learn(self._rows.index_select(1, at), self._labels.index_select(1, at))
        self._cursor.add_(self.training.batch)

    def _learn(self, rows: Tensor, labels: Tensor) -> None:
        logits = self.models(self.table.bags(rows), train=True)
        loss = bag_losses(logits, labels).mean(dim=1).sum()  # a model's gradient knows its own loss alone
        gradients = torch.autograd.grad(loss, list(self.models.parameters.values()))
        with torch.no_grad():
            self.optimizer.step(self.models.flat, torch.cat([g.flatten(1) for g in gradients], dim=1))

    @torch.no_grad()
    def validation_losses(self) -> Tensor:
        """Mean loss of each model over its validation bags, (R,) on the CPU."""
        r, _, n = self._val_rows.shape
        width = self.table.features.shape[1]
        step = max(1, VALIDATION_NUMBERS[self.models.flat.device.type] // (r * n * width))
        losses = [
            bag_losses(self.models(self.table.bags(rows)), labels)
            for rows, labels in zip(
                self._val_rows.split(step, 1), self._val_labels.split(step, 1), strict=True
            )
        ]
        return torch.cat(losses, dim=1).double().mean(dim=1).cpu()


class _Race:
    """The best checkpoint of each model so far, and which models still run."""

    def __init__(self, models: Stacked, training: Training) -> None:
        self._best = models.select(torch.arange(len(models), device=models.flat.device))
        self._training = training
        self._in_lap = torch.arange(len(models))  # the model at each place of the lap
        self._loss = torch.full((len(models),), float("inf"), dtype=torch.float64)
        self._epoch = torch.full((len(models),), -1)
        self._epochs = torch.zeros(len(models), dtype=torch.int64)
        self._done = torch.zeros(len(models), dtype=torch.bool)

    @property
    def running(self) -> Tensor:
        """Models that have not stopped."""
        return (~self._done).nonzero().squeeze(1)

    def record(self, models: Stacked, losses: Tensor, epoch: int) -> None:
        """Keep what became better; stop what has not for too long."""
        ids = self._in_lap
        open_ = ~self._done[ids]
        self._epochs[ids[open_]] = epoch + 1
        counts = epoch >= self._training.warmup or epoch == self._training.epochs - 1
        better = open_ & (losses < self._loss[ids]) & counts
        self._loss[ids[better]], self._epoch[ids[better]] = losses[better], epoch
        device = models.flat.device
        for best, now in zip(self._best.state().values(), models.state().values(), strict=True):
            best[ids[better].to(device)] = now[better.to(device)]
        waited = epoch - torch.where(self._epoch < 0, self._training.warmup, self._epoch)
        self._done |= waited >= self._training.patience

    def leave(self) -> Tensor:
        """Places in the lap of the models that go on; the others leave it."""
        keep = (~self._done[self._in_lap]).nonzero().squeeze(1)
        self._in_lap = self._in_lap[keep]
        return keep

    def result(self) -> Fitted:
        """What the training came to."""
        if not torch.isfinite(self._loss).all():
            raise InputError("Training diverged: a validation loss was never finite; use a smaller lr.")
        logger.info("trained %d models in %s epochs", len(self._loss), self._epochs.tolist())
        return Fitted(self._best, self._epoch.tolist(), self._loss.tolist(), self._epochs.tolist())


def bag_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy (R, b) of logits (R, b, c)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
