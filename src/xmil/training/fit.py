"""Train one model on one fold: epochs, the best one, early stopping, resumption."""

from __future__ import annotations

import io
import logging
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmil.core.background import Background, background_of
from xmil.core.budget import check_budget
from xmil.core.durable import note_as_it_is, write_bytes
from xmil.core.errors import FileError, InputError
from xmil.core.ledger import writing_for
from xmil.core.pickles import check_torch_file
from xmil.core.registry import Registry
from xmil.core.task import TASKS, Floats
from xmil.evaluate import class_metrics, risk_metrics, value_metrics
from xmil.models import MILModel, create_model, save_model
from xmil.storage import WHOLE_RUN, write_table
from xmil.training.batches import (
    Batches,
    Item,
    Loader,
    SiteGroups,
    TrainingBags,
    equal_sizes,
    padded_coords,
)
from xmil.training.config import Config, Loss
from xmil.training.loop import Stopping, class_loss, make_optimizer, make_scheduler, padded
from xmil.training.training_set import Fold, Goal, Rows

logger = logging.getLogger(__name__)
BACKGROUND_BAGS, BACKGROUND_PATCHES = 200, 64  # most bags in its mean; patches saved with the model


class DivergedError(InputError):
    """The loss or the outputs of a training are no longer finite."""


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
    features: Mapping[str, Any] | None = None  # how they were made; see `ModelSpec`
    groups: SiteGroups | None = None  # for site-balanced sampling


@dataclass(frozen=True)
class Step:
    """Progress of a training: batches done in an epoch, and the best epoch's value so far.

    Reading `loss` waits for the device, so only read it to display it.
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
    """The training of one job in a folder; `run` resumes where the last process stopped."""

    def __init__(self, job: Job, bags: TrainingBags, fabric: Any, folder: Path) -> None:
        self.job, self.bags, self.fabric, self.folder = job, bags, fabric, folder
        config = job.config
        model = new_model(job, bags.bags.dim)
        rates = config.optim.model_dump(include={"name", "lr", "momentum", "weight_decay"})
        optimizer = make_optimizer(model, **rates)
        self.scheduler = make_scheduler(optimizer, config.optim, epochs=config.train.epochs)
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self.loss = make_loss(job.goal, config.loss)
        self.weights = bag_weights(job.goal, job.fold.train, config.loss)
        self.targets = torch.from_numpy(job.goal.values)
        self._loaders: dict[bytes, Loader] = {}
        self.batches = Batches(
            job.fold.train,
            config.train.batch,
            seed=job.seed,
            shuffle=config.train.shuffle,
            groups=job.groups,
            rank=fabric.global_rank,
            world=fabric.world_size,
        )
        drawn = bags.drawing(config.data.instances or None, seed=job.seed)
        pin = fabric.device.type == "cuda"
        self.loader = Loader(drawn, self.batches, workers=config.train.workers, pin=pin)

    def run(self, on_step: OnStep | None = None) -> State:
        """Train to the end and return the last state; the model's file has the best weights."""
        state, settings = read_state(self.folder) or State(), self.job.config.train
        if state.epoch:
            self._resume(state)
        writes = settings.tensorboard and self.fabric.is_global_zero
        with _tensorboard(self.folder, writes, start=state.epoch) as add:
            while state.epoch < settings.epochs and not state.stopped:
                state = self._one_epoch(state, on_step)
                add(state.log[-1])
        if not state.best.epoch:
            raise DivergedError(f"{self.job.name}: no epoch had a finite {self.job.config.monitor}.")
        return state

    @property
    def plain(self) -> MILModel:
        """The model without Fabric's wrappers."""
        model = self.model.module
        plain: MILModel = getattr(model, "module", model)
        return plain

    @torch.no_grad()
    def outputs(self, rows: Rows) -> Floats:
        """Outputs (len(rows), c) of whole bags in full precision; the processes share the work."""
        model, fabric = self.plain.eval(), self.fabric
        outputs = torch.zeros(len(self.targets), self.job.goal.outputs, dtype=torch.float64)
        key = rows.tobytes()
        if key not in self._loaders:
            batches = equal_sizes(rows, self.bags.bags)[fabric.global_rank :: fabric.world_size]
            self._loaders[key] = Loader(self.bags, batches, workers=self.job.config.train.workers)
        for items in self._loaders[key]:
            x, mask, companions = self._on_device(items)
            outputs[[row for _, row, _ in items]] = model(x, mask, **companions).double().cpu()
        if fabric.world_size > 1:
            outputs = fabric.all_reduce(outputs.to(fabric.device), reduce_op="sum").cpu()
        return outputs[rows].numpy()

    def measures(self, outputs: Floats, rows: Rows) -> Measures:
        """The loss and the measures of the task."""
        if not np.isfinite(outputs).all():
            raise DivergedError(f"{self.job.name}: the outputs are no longer finite; use a smaller optim.lr.")
        targets, weights = self.targets[rows], self.weights[rows].double()
        losses = self.loss(torch.from_numpy(outputs), targets)
        total = float(weights.sum())
        loss = float((losses * weights).sum()) / total if total else float("nan")
        return {"loss": loss, **measure(outputs, rows, self.job.goal)}

    def _resume(self, state: State) -> None:
        logger.info("%s resumes after epoch %d", self.job.name, state.epoch)
        try:
            self.plain.load_state_dict(state.model)
            self.optimizer.load_state_dict(state.optimizer)
            for parameter, moments in self.optimizer.state.items():
                if any(value.dim() and value.shape != parameter.shape for value in tensors_in(moments)):
                    raise ValueError("the optimiser's state does not fit the model")
            self.scheduler.load_state_dict(state.scheduler)
            self.fabric.strategy.precision.load_state_dict(state.precision)
            if self.fabric.is_global_zero:
                write_log(state, self.folder)
                if state.best.epoch:
                    self._write_model(state.best)
        except DAMAGED as error:
            raise _damaged(self.folder / LAST, error) from None

    def _one_epoch(self, state: State, on_step: OnStep | None) -> State:
        """Train and validate one epoch, and write and return the state after it."""
        started, rows = time.perf_counter(), self.job.fold.validation
        row = {"epoch": state.epoch + 1, "lr": self.optimizer.param_groups[0]["lr"]}
        row["train_loss"] = self._train_epoch(state, on_step)
        measures = self.measures(self.outputs(rows), rows)
        self.scheduler.step()
        row |= {f"val_{name}": value for name, value in measures.items()}
        row["seconds"] = time.perf_counter() - started
        settings, epoch, best = self.job.config.train, state.epoch + 1, state.best
        stopping = Stopping(settings.warmup, settings.patience)
        if stopping.counts(epoch) and self._is_better(measures, best):
            weights = {
                name: tensor.detach().cpu().clone() for name, tensor in self.plain.state_dict().items()
            }
            best = BestEpoch(epoch, measures[self.job.config.monitor], measures["loss"], weights)
        new_state = State(
            epoch,
            self.plain.state_dict(),
            self.optimizer.state_dict(),
            self.scheduler.state_dict(),
            self.fabric.strategy.precision.state_dict(),
            best,
            [*state.log, row],
            stopped=stopping.is_over(epoch, best.epoch),
        )
        if self.fabric.is_global_zero:
            write_state(new_state, self.folder)
            if best.epoch == epoch:
                self._write_model(best)
        if on_step is not None:  # report the finished epoch with its validation
            steps = len(self.batches.plan())
            on_step(Step(epoch, steps, steps, torch.tensor(row["train_loss"]), 1.0, best.value))
        return new_state

    def _train_epoch(self, state: State, on_step: OnStep | None) -> float:
        """Train on all bags once and return the mean loss."""
        torch.manual_seed(epoch_seed(self.job.seed, state.epoch, self.fabric.global_rank))
        self.model.train()
        self.batches.set_epoch(state.epoch)
        plan, done = self.batches.plan(), 0.0
        total = torch.zeros((), dtype=torch.float64, device=self.fabric.device)
        for i, (items, batch) in enumerate(zip(self.loader, plan, strict=True)):
            weight = float(self.weights[batch].sum())
            total += self._learn(items, batch).double() * weight
            done += weight
            if on_step is not None:
                on_step(Step(state.epoch + 1, i + 1, len(plan), total, done, state.best.value))
        if self.fabric.world_size > 1:
            total = self.fabric.all_reduce(total, reduce_op="mean")
        mean = float(total) / done if done else float("nan")
        if not np.isfinite(mean):
            raise DivergedError(
                f"{self.job.name}: the loss is not finite in epoch {state.epoch + 1}; use a smaller optim.lr."
            )
        return mean

    def _learn(self, items: list[Item], batch: list[int]) -> Tensor:
        """Train on this process's share of a batch; return the share's loss."""
        world = self.fabric.world_size
        rows = [row for _, row, _ in items]
        weights = self.weights[rows] * (len(batch) > self.fabric.global_rank)  # a stand-in has no weight
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
        detached: Tensor = loss.detach()
        return detached

    def _on_device(self, items: list[Item]) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Move bags, their mask, and coordinates if the model needs them, to the device."""
        x, mask = padded([features for features, _, _ in items])
        kind = next(self.plain.parameters()).dtype
        device = self.fabric.device
        needs_coords = self.plain.needs_coords
        companions = {"coords": padded_coords(self.bags.bags, items).to(device)} if needs_coords else {}
        return x.to(device, kind, non_blocking=True), None if mask is None else mask.to(device), companions

    def _is_better(self, measures: Measures, best: BestEpoch) -> bool:
        """Whether an epoch beats the best; ties, common with few bags, go to the lower loss."""
        value = measures[self.job.config.monitor]
        if not best.epoch or not np.isfinite(value):
            return bool(np.isfinite(value))
        if value == best.value:
            return measures["loss"] < best.loss
        return value < best.value if self.job.config.falling else value > best.value

    def _write_model(self, best: BestEpoch) -> None:
        model = new_model(self.job, self.plain.in_dim)
        if next(self.plain.parameters()).dtype == torch.float64:
            model.double()
        model.load_state_dict(best.weights)
        model.background = self.background
        save_model(model, self.folder / MODEL)

    @cached_property
    def background(self) -> Background:
        """The mean and a few of the training patches."""
        rows = self.job.fold.train
        sample = rows[:: max(1, -(-len(rows) // BACKGROUND_BAGS))]
        bags = (self.bags.bags[int(row)].bag for row in sample)
        return background_of(bags, keep=BACKGROUND_PATCHES, seed=self.job.seed)


@contextmanager
def _tensorboard(folder: Path, writes: bool, *, start: int) -> Iterator[Callable[[dict[str, float]], None]]:
    """Yield a function that logs an epoch to TensorBoard, replacing epochs of a killed process."""
    writer: Any = None
    if writes:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            logger.warning("TensorBoard is not installed; log.csv holds the same numbers.")
        else:
            writer = SummaryWriter(str(folder), purge_step=start + 1 if start else None)

    def add(row: dict[str, float]) -> None:
        with suppress(OSError):  # a full disk fails the training's own files anyway
            for name, value in row.items():
                if writer is not None and name != "epoch":
                    writer.add_scalar(name.replace("_", "/", 1), value, int(row["epoch"]))

    try:
        yield add
    finally:
        with suppress(OSError):
            if writer is not None:
                writer.close()
                with writing_for(WHOLE_RUN):
                    for path in folder.glob(f"{EVENTS}*"):
                        note_as_it_is(path)


def new_model(job: Job, width: int) -> MILModel:
    """Create the job's model with initial weights; a regression starts at its reference."""
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
    """A different seed for each epoch and process."""
    return int(np.random.SeedSequence((seed, epoch, rank)).generate_state(1)[0])


BagLoss = Callable[[Tensor, Tensor], Tensor]  # outputs (b, c), targets (b, k) -> (b,)
LOSSES: Registry[Callable[[Loss], BagLoss]] = Registry("task with a loss", group="xmil.task_losses")


def make_loss(goal: Goal, settings: Loss) -> BagLoss:
    """Make the loss of each bag (b,) from outputs (b, c) and targets (b, k)."""
    if settings.name != "auto" and TASKS[goal.task].truth != "values":
        raise InputError(f"loss.name {settings.name!r} is for regression; leave it out for {goal.task}.")
    return LOSSES[goal.task](settings)


def bag_weights(goal: Goal, train: Rows, settings: Loss) -> Tensor:
    """The weight of each bag of the cohort (n,): that of its class; for Cox, whether it has an event."""
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
            raise InputError(f"loss.class_weights must have {n} numbers. Got {len(per_class)} instead.")
        if not (per_class[classes[train]] > 0).any():
            raise InputError("loss.class_weights must be above zero for some training bags. Got only zeros.")
    return torch.from_numpy(per_class[classes]).float()


@LOSSES.register("classification")
def _class_loss(settings: Loss) -> BagLoss:
    smoothing = settings.label_smoothing
    return lambda outputs, targets: class_loss(outputs, targets[:, 0].long(), label_smoothing=smoothing)


@LOSSES.register("multilabel")
def _label_loss(_: Loss) -> BagLoss:
    return lambda outputs, targets: F.binary_cross_entropy_with_logits(
        outputs, targets.to(outputs), reduction="none"
    ).mean(dim=1)


@LOSSES.register("regression")
def _value_loss(settings: Loss) -> BagLoss:
    kinds: dict[str, Callable[..., Tensor]] = {"mae": F.l1_loss, "huber": F.huber_loss}
    kind = kinds.get(settings.name, F.mse_loss)
    return lambda outputs, targets: kind(outputs, targets.to(outputs), reduction="none").mean(dim=1)


def hazard_nll(outputs: Tensor, targets: Tensor, *, alpha: float = 0.0) -> Tensor:
    """Negative log-likelihood of discrete hazards (Zadeh and Schmid 2020, arXiv:2006.12442).

    h_t = sigmoid(output_t), S(t) = prod_{s <= t} (1 - h_s); targets are (bin, event). A bag with an event in
    bin y survived all earlier bins; a censored one also survived y. `alpha` reduces the weight of censored
    bags.
    """
    time, event = targets[:, :1], targets[:, 1].to(outputs)
    bins = torch.arange(outputs.shape[1], device=outputs.device)[None, :]
    survive, die = F.logsigmoid(-outputs), F.logsigmoid(outputs)  # log(1 - h), log h
    through = (survive * (bins <= time)).sum(dim=1)  # log S(y)
    died = (survive * (bins < time) + die * (bins == time)).sum(dim=1)
    return -(event * died + (1 - alpha) * (1 - event) * through)


def cox_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Negative log partial likelihood of each bag against those still at risk in the batch (Breslow's ties).

    Bags without an event have loss 0 and weight 0, so that the mean over a batch is that over its events.
    """
    risk, time, event = outputs[:, 0], targets[:, 0], targets[:, 1].to(outputs)
    at_risk = time[None, :] >= time[:, None]  # (b, b): bags still at risk at the event of bag i
    log_sum = torch.where(at_risk, risk[None, :], float("-inf")).logsumexp(dim=1)
    return event * (log_sum - risk)


LOSSES.add("survival", lambda settings: partial(hazard_nll, alpha=settings.alpha))
LOSSES.add("cox", lambda _: cox_loss)

Measures = dict[str, float]


def measure(outputs: Floats, rows: npt.NDArray[np.int64], goal: Goal) -> Measures:
    """The measures of a task from outputs (b, c) of the bags at some rows; NaN if undefined."""
    task, truth, outputs = TASKS[goal.task], goal.truth[rows], outputs.astype(np.float64)
    numbers, options = task.numbers(outputs), dict[str, Any](units=range(len(rows)), draws=0)
    if task.truth == "time":
        measures = risk_metrics(truth[:, 0], truth[:, 1], numbers[:, 0], **options)
        names = ["c_index"]
    elif task.truth == "values":
        measures = value_metrics(truth[:, 0], numbers[:, 0], **options)
        names = ["mae", "rmse", "r2", "spearman"]
    else:  # log odds rank like probabilities, without their rounding
        labels = truth[:, 0].astype(np.int64) if task.truth == "class" else truth > 0.5
        options |= {"scores": task.log_odds(outputs), "names": goal.class_names}
        measures = class_metrics(labels, numbers, **options)
        names = ["auroc", "accuracy"]
        each = [f"auroc:{name}" for name in goal.class_names or ()]
        names += ["balanced_accuracy"] if task.truth == "class" else each
    return {name.replace("auroc", "auc", 1): measures[name].estimate for name in names}


LAYOUT = 1
EVENTS = "events.out.tfevents."  # start of the names of TensorBoard's files
LAST, LOG, MODEL, METRICS, PREDICTIONS = (
    "last.ckpt",
    "log.csv",
    "model.safetensors",
    "metrics.json",
    "predictions.csv",
)
FILES = (LAST, LOG, MODEL, METRICS, PREDICTIONS)


@dataclass
class BestEpoch:
    """The best epoch so far: its number (from 1), the monitored value, the validation loss, the weights."""

    epoch: int = 0
    value: float = float("nan")
    loss: float = float("nan")
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class State:
    """Everything that the next epoch depends on, and the log so far.

    It needs no state of random generators: each epoch seeds them by (seed, epoch, process).
    """

    epoch: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    best: BestEpoch = field(default_factory=BestEpoch)
    log: list[dict[str, float]] = field(default_factory=list)
    stopped: bool = False


def write_state(state: State, folder: Path) -> None:
    """Write a state and its log."""
    buffer = io.BytesIO()  # in memory first: a full disk then raises a plain OSError
    torch.save({**vars(state), "best": vars(state.best), "layout": LAYOUT}, buffer)
    with writing_for(WHOLE_RUN):  # a finished model does without it
        write_bytes(folder / LAST, buffer.getbuffer())
    write_log(state, folder)


def write_log(state: State, folder: Path) -> None:
    """Write the log of a state; after a kill it may be older than the state."""
    rows = [
        {name: str(value) if isinstance(value, int) else f"{value:.8g}" for name, value in row.items()}
        for row in state.log
    ]
    write_rows(folder / LOG, rows)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV, with the columns of all rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    write_table(path, names, ([row.get(name, "") for name in names] for row in rows))


def read_state(folder: Path) -> State | None:
    """Read the state of an interrupted training; None if there is none."""
    path = folder / LAST
    if not path.is_file():
        return None
    try:
        check_torch_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content.pop("layout") != LAYOUT:
            raise FileError(f"{path}: written by another version; pass `restart=True` to train again.")
        check_budget(sum(8 * value.numel() for value in tensors_in(content)), "the state", path)
        return State(**{**content, "best": BestEpoch(**content["best"])})
    except (pickle.UnpicklingError, OSError, EOFError, *DAMAGED) as error:
        raise _damaged(path, error) from None


DAMAGED = (RuntimeError, LookupError, TypeError, ValueError, AttributeError)  # raised by a damaged state


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dictionaries and lists, also views of the same memory."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(inner)


def _damaged(path: Path, error: Exception) -> FileError:
    if isinstance(error, FileError):
        return error
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return FileError(f"{path}: damaged ({reason[:120]}); delete it, or pass `restart=True` to train again.")
