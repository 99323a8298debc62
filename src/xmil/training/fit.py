"""One model trained on one fold: epochs, the best of them, early stopping, resumption."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xmil.core.background import Background, background_of
from xmil.core.errors import InputError
from xmil.core.task import Floats
from xmil.models import MILModel, save_model
from xmil.models.registry import create_model
from xmil.training.batches import Batches, EqualSizes, Item, Loader, TrainingBags, padded, padded_coords
from xmil.training.config import Config
from xmil.training.folds import Fold
from xmil.training.losses import bag_weights, make_loss
from xmil.training.optimizers import make_optimizer, make_scheduler
from xmil.training.progress import Measures, measure
from xmil.training.site_balance import SiteGroups
from xmil.training.state import MODEL, BestEpoch, State, read_state, write_log, write_state
from xmil.training.targets import Goal, Rows

logger = logging.getLogger(__name__)
BACKGROUND_BAGS, BACKGROUND_PATCHES = 200, 64  # bags its mean is over at most, patches kept with the model


class DivergedError(InputError):
    """A training whose loss is no longer a number."""


@dataclass(frozen=True)
class Job:
    """One model to train: its folder's name, settings, fold and seed."""

    name: str
    config: Config
    fold: Fold
    goal: Goal
    seed: int
    point: int = 0
    repeat: int = 0
    encoder: str | None = None
    features: Mapping[str, Any] | None = None  # how they were made
    groups: SiteGroups | None = None  # where bags are drawn by site


@dataclass(frozen=True)
class Step:
    """Where a training stands: batches done in an epoch, and the best epoch's value so far.

    `loss` waits for the device, so ask for it no more often than it is shown.
    """

    epoch: int
    batch: int
    batches: int
    total: Tensor
    weight: float
    best: float

    @property
    def loss(self) -> float:
        """The mean loss of the epoch so far."""
        return float(self.total) / self.weight if self.weight else 0.0


OnStep = Callable[[Step], None]


class Fit:
    """The training of one job in a folder; `run` goes on where the last process stopped."""

    def __init__(self, job: Job, bags: TrainingBags, fabric: Any, folder: Path) -> None:
        self.job, self.fabric, self.folder = job, fabric, folder
        self.whole = bags
        config = job.config
        model = new_model(job, bags.bags.dim)
        optimizer = make_optimizer(model, config.optim)
        self.scheduler = make_scheduler(optimizer, config.optim, epochs=config.train.epochs)
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self.loss = make_loss(job.goal, config.loss)
        self.weights = bag_weights(job.goal, job.fold.train, config.loss)
        self.targets = torch.from_numpy(job.goal.values)
        self._loaders: dict[bytes, Loader] = {}
        self._make_loader(bags)

    def run(self, on_step: OnStep | None = None) -> State:
        """Train to the end and give the last state; the best weights are in the model's file."""
        state = self._resumed()
        settings = self.job.config.train
        with _Board(self.folder, settings.tensorboard and self._writes, start=state.epoch) as board:
            while state.epoch < settings.epochs and not state.stopped:
                state = self._one_epoch(state, on_step)
                board.add(state.log[-1])
        if not state.best.epoch:
            raise DivergedError(f"{self.job.name}: no epoch had a usable {self.job.config.monitor}.")
        return state

    @property
    def plain(self) -> MILModel:
        """The model itself, without what Fabric puts around it."""
        model = self.model.module
        found: MILModel = getattr(model, "module", model)
        return found

    def load_best(self, state: State) -> None:
        """Put the weights of the best epoch into the model."""
        self.plain.load_state_dict(state.best.weights)

    @torch.no_grad()
    def outputs(self, rows: Rows) -> Floats:
        """Outputs (len(rows), c) of whole bags in full precision, shared among the processes."""
        model, fabric = self.plain.eval(), self.fabric
        found = torch.zeros(len(self.targets), self.job.goal.outputs, dtype=torch.float64)
        for items in self._whole_bags(rows):
            x, mask, companions = self._on_device(items)
            found[[row for _, row, _ in items]] = model(x, mask, **companions).double().cpu()
        if fabric.world_size > 1:
            found = fabric.all_reduce(found.to(fabric.device), reduce_op="sum").cpu()
        return found[rows].numpy()

    def measures(self, outputs: Floats, rows: Rows) -> Measures:
        """The loss and the measures of the task."""
        if not np.isfinite(outputs).all():
            raise DivergedError(f"{self.job.name}: the outputs are no longer finite; use a smaller optim.lr.")
        targets, weights = self.targets[rows], self.weights[rows].double()
        losses = self.loss(torch.from_numpy(outputs), targets)
        total = float(weights.sum())
        loss = float((losses * weights).sum()) / total if total else float("nan")
        return {"loss": loss, **measure(outputs, rows, self.job.goal)}

    @property
    def _writes(self) -> bool:
        return bool(self.fabric.is_global_zero)

    def _make_loader(self, bags: TrainingBags) -> None:
        job, settings = self.job, self.job.config.train
        drawn = bags.drawing(job.config.data.instances or None, seed=job.seed)
        self.batches = Batches(
            job.fold.train,
            settings.batch,
            seed=job.seed,
            shuffle=settings.shuffle,
            groups=job.groups,
            rank=self.fabric.global_rank,
            world=self.fabric.world_size,
        )
        pin = self.fabric.device.type == "cuda"
        self.loader = Loader(drawn, self.batches, workers=settings.workers, pin=pin)

    def _whole_bags(self, rows: Rows) -> Loader:
        """A loader of whole bags, kept with its worker processes from epoch to epoch."""
        key = rows.tobytes()
        if key not in self._loaders:
            rank, world = self.fabric.global_rank, self.fabric.world_size
            batches = EqualSizes(rows, self.whole.bags, rank=rank, world=world)
            self._loaders[key] = Loader(self.whole, batches, workers=self.job.config.train.workers)
        return self._loaders[key]

    def _resumed(self) -> State:
        state = read_state(self.folder)
        if state is None:
            return State()
        logger.info("%s goes on after epoch %d", self.job.name, state.epoch)
        self.plain.load_state_dict(state.model)
        self.optimizer.load_state_dict(state.optimizer)
        self.scheduler.load_state_dict(state.scheduler)
        self.fabric.strategy.precision.load_state_dict(state.precision)
        if self._writes:
            write_log(state, self.folder)
        if self._writes and state.best.epoch:
            self._write_model(state)
        return state

    def _one_epoch(self, state: State, on_step: OnStep | None) -> State:
        """Train, validate, and write what the next epoch needs."""
        started = time.perf_counter()
        lr = self.optimizer.param_groups[0]["lr"]
        loss = self._train_epoch(state, on_step)
        rows = self.job.fold.validation
        found = self.measures(self.outputs(rows), rows)
        self.scheduler.step()
        row = {"epoch": state.epoch + 1, "lr": lr, "train_loss": loss}
        row |= {f"val_{name}": value for name, value in found.items()}
        row["seconds"] = time.perf_counter() - started
        return self._record(state, row, found)

    def _train_epoch(self, state: State, on_step: OnStep | None) -> float:
        """One pass over the training bags; the mean loss."""
        torch.manual_seed(epoch_seed(self.job.seed, state.epoch, self.fabric.global_rank))
        self.model.train()
        self.batches.set_epoch(state.epoch)
        plan, seen = self.batches.whole(), 0.0
        total = torch.zeros((), dtype=torch.float64, device=self.fabric.device)
        for i, (items, batch) in enumerate(zip(self.loader, plan, strict=True)):
            weight = float(self.weights[batch].sum())
            total += self._learn(items, batch).double() * weight
            seen += weight
            if on_step is not None:
                on_step(Step(state.epoch + 1, i + 1, len(plan), total, seen, state.best.value))
        if self.fabric.world_size > 1:
            total = self.fabric.all_reduce(total, reduce_op="mean")
        mean = float(total) / seen if seen else float("nan")
        if not np.isfinite(mean):
            raise DivergedError(
                f"{self.job.name}: the loss is not finite in epoch {state.epoch + 1}; use a smaller optim.lr."
            )
        return mean

    def _learn(self, items: list[Item], batch: list[int]) -> Tensor:
        """One step on this process's share of a batch; the loss of the batch, as far as it is known here."""
        world = self.fabric.world_size
        rows = [row for _, row, _ in items]
        weights = self.weights[rows] * (len(batch) > self.fabric.global_rank)  # a stand-in weighs nothing
        total = float(self.weights[batch].sum())
        if not total:  # Cox: no event in this batch
            return torch.zeros((), device=self.fabric.device)
        x, mask, companions = self._on_device(items)
        outputs = self.model(x, mask, **companions) if mask is not None else self.model(x, **companions)
        losses = self.loss(outputs, self.targets[rows].to(outputs.device))
        loss = (losses * weights.to(losses)).sum() * (world / total)  # gradients are averaged over processes
        self.optimizer.zero_grad()
        self.fabric.backward(loss)
        if self.job.config.optim.clip is not None:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.job.config.optim.clip)
        self.optimizer.step()
        done: Tensor = loss.detach()
        return done

    def _on_device(self, items: list[Item]) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Bags, their mask, and coordinates for models that need them."""
        x, mask = padded([features for features, _, _ in items])
        kind = next(self.plain.parameters()).dtype
        device = self.fabric.device
        needed = self.plain.needs_coords
        companions = {"coords": padded_coords(self.whole.bags, items).to(device)} if needed else {}
        return x.to(device, kind, non_blocking=True), None if mask is None else mask.to(device), companions

    def _record(self, state: State, row: dict[str, float], found: Measures) -> State:
        """The state after an epoch, on disk."""
        settings, epoch, best = self.job.config.train, state.epoch + 1, state.best
        if epoch > settings.warmup and self._is_better(found, best):
            weights = {
                name: tensor.detach().cpu().clone() for name, tensor in self.plain.state_dict().items()
            }
            best = BestEpoch(epoch, found[self.job.config.monitor], found["loss"], weights)
        waited = epoch - max(best.epoch, settings.warmup)
        now = State(
            epoch,
            self.plain.state_dict(),
            self.optimizer.state_dict(),
            self.scheduler.state_dict(),
            self.fabric.strategy.precision.state_dict(),
            best,
            [*state.log, row],
            stopped=settings.patience is not None and waited >= settings.patience,
        )
        if self._writes:
            write_state(now, self.folder)
            if best.epoch == epoch:
                self._write_model(now)
        return now

    def _is_better(self, found: Measures, best: BestEpoch) -> bool:
        """Whether an epoch beats the best; of equal AUCs, common with few bags, the lower loss wins."""
        value = found[self.job.config.monitor]
        if not best.epoch or not np.isfinite(value):
            return bool(np.isfinite(value))
        if value == best.value:
            return found["loss"] < best.loss
        return value < best.value if self.job.config.falling else value > best.value

    def _write_model(self, state: State) -> None:
        model = new_model(self.job, self.plain.in_dim)
        if next(self.plain.parameters()).dtype == torch.float64:
            model.double()
        model.load_state_dict(state.best.weights)
        model.background = self.background
        save_model(model, self.folder / MODEL)

    @cached_property
    def background(self) -> Background:
        """The mean and a few of the patches it is trained on."""
        rows = self.job.fold.train
        some = rows[:: max(1, -(-len(rows) // BACKGROUND_BAGS))]
        bags = (self.whole.bags[int(row)].bag for row in some)
        return background_of(bags, keep=BACKGROUND_PATCHES, seed=self.job.seed)


class _Board:
    """TensorBoard's event file; rows written after a kill replace what the killed process had logged."""

    def __init__(self, folder: Path, on: bool, *, start: int) -> None:
        self._writer: Any = None
        if on:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                logger.warning("TensorBoard is not installed; log.csv holds the same numbers.")
            else:
                self._writer = SummaryWriter(str(folder), purge_step=start + 1 if start else None)

    def __enter__(self) -> _Board:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            with suppress(OSError):  # a full disk: the training's own files say so
                self._writer.close()

    def add(self, row: dict[str, float]) -> None:
        """One epoch's numbers."""
        if self._writer is not None:
            with suppress(OSError):
                for name, value in row.items():
                    if name != "epoch":
                        self._writer.add_scalar(name.replace("_", "/", 1), value, int(row["epoch"]))


def new_model(job: Job, width: int) -> MILModel:
    """The job's model with its first weights; a regression starts out at its reference."""
    section = job.config.model
    spec = {**job.goal.spec, "encoder": job.encoder, "features": job.features}
    model = create_model(
        section.name, in_dim=width, n_classes=job.goal.outputs, seed=job.seed, **spec, **section.params
    )
    last = getattr(model, "classifier", None)
    if job.goal.reference is not None and isinstance(last, nn.Linear) and last.bias is not None:
        nn.init.constant_(last.bias, job.goal.reference)
    return model


def epoch_seed(seed: int, epoch: int, rank: int) -> int:
    """A seed of its own for each epoch and process."""
    return int(np.random.SeedSequence((seed, epoch, rank)).generate_state(1)[0])
