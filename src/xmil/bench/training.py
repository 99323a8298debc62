"""Train a problem's models: all repetitions of one architecture at once, or any single module.

Both keep the epoch with the lowest validation loss. A stack trains on rows of one table, each model with its
own bags in their order, early stopping and best checkpoint; a single module takes bags of any lengths,
shuffled by its seed in every epoch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from xmil.bench.instances import BagSet, Table
from xmil.bench.problems import Block
from xmil.core.errors import InputError, bad_parameter, check_names
from xmil.models import MILModel
from xmil.training.loop import Stopping, class_loss, make_optimizer, padded

logger = logging.getLogger(__name__)

VALIDATION_NUMBERS = {"cpu": 1 << 22, "cuda": 1 << 29}  # features per validation pass
GRAPH_WARMUP = 3  # runs that CUDA needs before recording
WEIGHT_DECAY = 1e-4  # for single modules
OnEpoch = Callable[[int, int], None]  # epochs done, models still training
LabelledBags = list[tuple[Tensor, int]]  # features (n, d) and label


@dataclass(frozen=True)
class Training:
    """The optimizer and the stopping rule.

    The first `warmup` epochs never count as best; training ends after `patience` epochs without a lower
    validation loss.
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

    @property
    def stopping(self) -> Stopping:
        """The stopping rule."""
        return Stopping(self.warmup, self.patience)

    def counts(self, epoch: int) -> bool:
        """Whether an epoch, from 1, may be the best: after the warm-up, or if it is the last."""
        return self.stopping.counts(epoch) or epoch == self.epochs


QUICK_TRAINING: dict[str, Any] = {"optimizer": "adam", "lr": 3e-3, "epochs": 60, "patience": 20}


class Stacked:
    """R models: one flat tensor (R, p), with `parameters` as views, and buffers (R, ...)."""

    def __init__(self, template: nn.Module, flat: Tensor, buffers: dict[str, Tensor]) -> None:
        self.template = template
        self.flat = flat
        self.buffers = buffers
        named = dict(template.named_parameters())
        parts = flat.split([parameter.numel() for parameter in named.values()], dim=1)
        self.parameters = {  # leaves (R, ...) that share the flat tensor's memory
            name: part.view(len(flat), *parameter.shape).detach().requires_grad_(True)
            for (name, parameter), part in zip(named.items(), parts, strict=True)
        }
        self._forward = vmap(
            lambda parameters, buffers, x: functional_call(template, (parameters, buffers), (x,)),
            in_dims=(0, 0, 0),
            randomness="error",
        )

    @classmethod
    def of(cls, models: Sequence[MILModel], device: torch.device | str = "cpu") -> Stacked:
        """Stack copies of the models on a device."""
        parameters, buffers = stack_module_state(list(models))
        flat = torch.cat([p.detach().flatten(1) for p in parameters.values()], dim=1)
        template = copy.deepcopy(models[0]).to(device)
        return cls(template, flat.to(device), {name: b.clone().to(device) for name, b in buffers.items()})

    def __len__(self) -> int:
        return len(self.flat)

    def __call__(self, x: Tensor, *, train: bool = False) -> Tensor:
        """Outputs (R, b, c) of bags (R, b, n, d), each model with its own bags."""
        self.template.train(train)
        out: Tensor = self._forward(self.parameters, self.buffers, x)
        return out

    def state(self) -> dict[str, Tensor]:
        """The flat parameters and the buffers by name; in-place changes affect the models."""
        return {"": self.flat, **self.buffers}

    def select(self, keep: Tensor) -> Stacked:
        """Select models."""
        return Stacked(self.template, self.flat[keep], {name: b[keep] for name, b in self.buffers.items()})

    def model(self, i: int) -> nn.Module:
        """A copy of the i-th model, in eval mode."""
        model = copy.deepcopy(self.template).eval()
        values = {**self.parameters, **self.buffers}
        model.load_state_dict({name: value[i].detach() for name, value in values.items()})
        return model


class SGD:
    """SGD with momentum for a stack, like torch.optim.SGD without dampening.

    Its state has one row per model, so that models can be removed and a CUDA graph can replay a step.
    """

    def __init__(self, flat: Tensor, *, lr: float, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum
        self.state = {"velocity": torch.zeros_like(flat)}

    def step(self, flat: Tensor, gradient: Tensor) -> None:
        """Update the parameters in place."""
        flat.sub_(self.state["velocity"].mul_(self.momentum).add_(gradient), alpha=self.lr)


class Adam:
    """Adam for a stack, with torch.optim.Adam's defaults; its state has one row per model."""

    def __init__(
        self, flat: Tensor, *, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        self.lr, self.betas, self.eps = lr, betas, eps
        zeros = torch.zeros_like
        ones = torch.ones(len(flat), 1, dtype=torch.float64, device=flat.device)
        self.state = {"mean": zeros(flat), "square": zeros(flat), "decay1": ones, "decay2": ones.clone()}

    def step(self, flat: Tensor, gradient: Tensor) -> None:
        """Update the parameters in place."""
        s, (beta1, beta2) = self.state, self.betas
        s["mean"].lerp_(gradient, 1 - beta1)
        s["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1 = (1 - s["decay1"].mul_(beta1)).to(flat.dtype)
        correction2 = (1 - s["decay2"].mul_(beta2)).sqrt().to(flat.dtype)
        denominator = (s["square"].sqrt() / correction2).add_(self.eps)
        flat.addcdiv_(s["mean"] / correction1, denominator, value=-self.lr)


OPTIMIZERS: dict[str, Callable[..., SGD | Adam]] = {"sgd": SGD, "adam": Adam}


@dataclass(frozen=True)
class Fitted:
    """The best checkpoint of every model and its epoch; `best_epoch` counts from 0."""

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
    """Train stacked models in place, each on its own bags (R, b, n).

    Stopped models are removed from the stack once they are half of it.
    """
    if len(models) != len(train.rows) or len(models) != len(validation.rows):
        raise InputError(
            f"{len(models)} models need as many sets of bags. "
            f"Got {len(train.rows)} and {len(validation.rows)} instead."
        )
    n, device = len(models), models.flat.device
    best = models.select(torch.arange(n, device=device))
    best_loss = torch.full((n,), float("inf"), dtype=torch.float64)
    best_epoch, epochs, stopped = torch.zeros(n).int(), torch.zeros(n).int(), torch.zeros(n).bool()
    lap, ids = Lap(models, train, validation, table, training), torch.arange(n)  # the models in the stack
    for epoch in range(1, training.epochs + 1):
        lap.train_epoch()
        losses, running = lap.validation_losses(), ~stopped[ids]
        better = running & (losses < best_loss[ids]) & training.counts(epoch)
        best_loss[ids[better]] = losses[better]
        best_epoch[ids[better]] = epoch
        epochs[ids[running]] = epoch
        for stored, current in zip(best.state().values(), lap.models.state().values(), strict=True):
            stored[ids[better].to(device)] = current[better.to(device)]
        stopped |= torch.tensor([training.stopping.is_over(epoch, e) for e in best_epoch.tolist()])
        n_running = int((~stopped).sum())
        if on_epoch is not None:
            on_epoch(epoch, n_running)
        if not n_running:
            break
        if n_running <= len(lap.models) // 2:
            keep = (~stopped[ids]).nonzero().squeeze(1)
            lap, ids = lap.select(keep), ids[keep]
    if not torch.isfinite(best_loss).all():
        raise InputError("Training diverged: a validation loss was never finite; use a smaller lr.")
    logger.info("trained %d models in %s epochs", n, epochs.tolist())
    return Fitted(best, (best_epoch - 1).tolist(), best_loss.tolist(), epochs.tolist())


class Lap:
    """The models still in training, with their bags, optimizer and, on a GPU, recorded step."""

    def __init__(
        self, models: Stacked, train: BagSet, validation: BagSet, table: Table, training: Training
    ) -> None:
        self.models, self.table, self.training = models, table, training
        self._sets = (train, validation)
        self._rows, self._labels = table.to_rows(train.rows), table.to_rows(train.labels)
        self._val_rows, self._val_labels = table.to_rows(validation.rows), table.to_rows(validation.labels)
        check_names("optimizer", [training.optimizer], OPTIMIZERS)
        self.optimizer = OPTIMIZERS[training.optimizer](models.flat, lr=training.lr)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=models.flat.device)
        self._offsets = torch.arange(training.batch, device=models.flat.device)
        self._step = _Repeated(
            self._full_step, [*models.state().values(), *self.optimizer.state.values(), self._cursor]
        )

    def select(self, keep: Tensor) -> Lap:
        """Select models."""
        index = keep.cpu().numpy()
        train, validation = (BagSet(s.rows[index], s.codes[index], s.labels[index]) for s in self._sets)
        lap = Lap(self.models.select(keep), train, validation, self.table, self.training)
        for name, value in self.optimizer.state.items():
            lap.optimizer.state[name].copy_(value[keep])
        return lap

    def train_epoch(self) -> None:
        """Train one epoch, with the bags in order."""
        n_full, remainder = divmod(self._labels.shape[1], self.training.batch)
        self._cursor.zero_()
        for _ in range(n_full):
            self._step()
        if remainder:
            self._learn(self._rows[:, -remainder:], self._labels[:, -remainder:])

    def _full_step(self) -> None:
        index = self._cursor + self._offsets
        self._learn(self._rows.index_select(1, index), self._labels.index_select(1, index))
        self._cursor.add_(self.training.batch)

    def _learn(self, rows: Tensor, labels: Tensor) -> None:
        logits = self.models(self.table.bags(rows), train=True)
        loss = class_loss(logits, labels).mean(dim=1).sum()  # a model's gradient only depends on its own loss
        gradients = torch.autograd.grad(loss, list(self.models.parameters.values()))
        with torch.no_grad():
            self.optimizer.step(self.models.flat, torch.cat([g.flatten(1) for g in gradients], dim=1))

    @torch.no_grad()
    def validation_losses(self) -> Tensor:
        """Mean loss of each model over its validation bags, (R,) on the CPU."""
        r, _, n = self._val_rows.shape
        numbers = r * n * self.table.features.shape[1]
        step = max(1, VALIDATION_NUMBERS[self.models.flat.device.type] // numbers)
        parts = zip(self._val_rows.split(step, 1), self._val_labels.split(step, 1), strict=True)
        losses = [class_loss(self.models(self.table.bags(rows)), labels) for rows, labels in parts]
        return torch.cat(losses, dim=1).double().mean(dim=1).cpu()


class _Repeated:
    """Repeats a function that changes `state` in place, as a CUDA graph if possible.

    Launching kernels dominates the steps of small models; a graph launches them all at once.
    """

    def __init__(self, function: Callable[[], None], state: Sequence[Tensor]) -> None:
        self._function = function
        self._state = state
        self._recordable = state[0].is_cuda
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is None and self._recordable:
            self._graph = self._record()
        if self._graph is None:
            self._function()
        else:
            self._graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph | None:
        """Record one run and restore the state; None if the step cannot be recorded."""
        before = [tensor.detach().clone() for tensor in self._state]
        stream = torch.cuda.Stream()
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(GRAPH_WARMUP):
                    self._function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._function()
            return graph
        except RuntimeError as error:
            logger.warning("The training step runs without a CUDA graph: %s", str(error).splitlines()[0])
            self._recordable = False
            return None
        finally:
            with torch.no_grad():
                for tensor, value in zip(self._state, before, strict=True):
                    tensor.copy_(value)


def learn(
    model: nn.Module, train: list[Block], validation: list[Block], *, training: Training, seed: int
) -> nn.Module:
    """Train one module and return it in eval mode, with the weights of its best epoch."""
    sgd = training.optimizer == "sgd"
    optimizer = make_optimizer(
        model, name="sgd" if sgd else "adam", lr=training.lr, weight_decay=0.0 if sgd else WEIGHT_DECAY
    )
    rng = np.random.default_rng(seed)
    bags, validation_bags = (
        [pair for block in blocks for pair in zip(block.x.unbind(), block.labels.tolist(), strict=True)]
        for blocks in (train, validation)
    )
    best, lowest, best_epoch = copy.deepcopy(model.state_dict()), float("inf"), 0
    with torch.random.fork_rng(devices=[bags[0][0].device] if bags[0][0].is_cuda else []):
        torch.manual_seed(seed)  # for dropout
        for epoch in range(1, training.epochs + 1):
            model.train()
            shuffled = [bags[int(i)] for i in rng.permutation(len(bags))]
            for part in _batches(shuffled, training.batch):
                optimizer.zero_grad()
                _mean_loss(model, part).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                parts = list(_batches(validation_bags, training.batch))
                losses = [_mean_loss(model, part) * len(part) for part in parts]
                loss = float(torch.stack(losses).sum()) / len(validation_bags)
            if loss < lowest and training.counts(epoch):
                best, lowest, best_epoch = copy.deepcopy(model.state_dict()), loss, epoch
            elif training.stopping.is_over(epoch, best_epoch):
                break
    if not np.isfinite(lowest):
        raise InputError("Training diverged: no validation loss was finite; use a smaller lr.")
    model.load_state_dict(best)
    return model.eval()


def logits_of(model: nn.Module, bags: list[Tensor]) -> Tensor:
    """Outputs (b, c) of bags of any lengths.

    Our models get padded bags with a mask; others get a batch if the lengths agree, else one bag at a time.
    """
    if len({len(bag) for bag in bags}) == 1:
        return _check_logits(model, model(torch.stack(bags)), len(bags))
    if isinstance(model, MILModel):
        return model(*padded(bags))  # type: ignore[no-any-return]
    return torch.cat([_check_logits(model, model(bag.unsqueeze(0)), 1) for bag in bags])


def _check_logits(model: nn.Module, out: object, n: int) -> Tensor:
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != n:
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise InputError(
            f"{type(model).__name__} must map bags (b, n, d) to logits (b, c). Got {shape} for {n} bags."
        )
    return out


def _mean_loss(model: nn.Module, bags: LabelledBags) -> Tensor:
    labels = torch.tensor([label for _, label in bags], device=bags[0][0].device)
    return class_loss(logits_of(model, [x for x, _ in bags]), labels, reduction="mean")


def _batches(bags: LabelledBags, batch: int) -> Iterator[LabelledBags]:
    """Yield batches; a single last bag joins the previous batch, since batch norm needs two."""
    starts = list(range(0, len(bags), batch))
    if len(starts) > 1 and len(bags) - starts[-1] == 1:
        starts.pop()
    return (bags[start:end] for start, end in zip(starts, [*starts[1:], len(bags)], strict=True))
