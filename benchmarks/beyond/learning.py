"""Models trained on bags that are drawn anew for each step, all repetitions at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xmil.bench import (
    SETUPS,
    TASKS,
    Adam,
    BagSet,
    Codes,
    Configuration,
    Instances,
    Protocol,
    Stacked,
    Table,
    draw_bags,
    load_instances,
)
from xmil.training.loop import class_loss

BATCH = 64
NOISE = 0.1  # of one-hot digits: at the package's 0.3 a sixteenth of them cannot be told apart


@dataclass(frozen=True)
class Course:
    """A task in bags of n, learnt in `steps` of 64 bags; `smaller` ones take turns with whole ones."""

    task: str
    model: str = "transmil"
    n: int = 12
    steps: int = 2000
    smaller: bool = False
    lr: float = 2e-3
    data: str = ""  # features of digits; one-hot vectors where it is empty
    seed: int = 0

    def configuration(self, repetitions: int, device: str = "cpu") -> Configuration:
        """The models and test bags, as the toy benchmark has them."""
        protocol = Protocol(repetitions, self.seed, sizes=(200, 16, 300), bag_size=self.n)
        instances = load_instances(self.data) if self.data else one_hot()
        return Configuration(TASKS[self.task], SETUPS[self.model], instances, protocol, device)


def one_hot() -> Instances:
    """One-hot digits with little noise."""
    known = load_instances("onehot")
    exact = np.eye(10, dtype=np.float32)[known.digits]
    noise = np.random.default_rng(0).normal(scale=NOISE, size=exact.shape).astype(np.float32)
    return replace(known, features=exact + noise)


def learn(course: Course, *, repetitions: int, device: str = "cpu") -> Stacked:
    """Adam with a rate that falls to nothing along a cosine."""
    configuration = course.configuration(repetitions, device)
    models, table = configuration.fresh_models(), configuration.table()
    optimizer, rng = Adam(models.flat, lr=course.lr), np.random.default_rng(1)
    for step in range(course.steps):
        n = int(rng.integers(1, course.n)) if course.smaller and step % 2 else course.n
        drawn = draw_bags(
            configuration.task, configuration.prepared, "train",
            n_bags=BATCH * repetitions, n=n, seed=(1 + course.seed, step),
        )  # fmt: skip
        optimizer.lr = course.lr * 0.5 * (1 + float(np.cos(np.pi * step / course.steps)))
        _step(models, table, drawn, optimizer, repetitions)
    return models


def save(models: Stacked, path: Path) -> None:
    """Keep the weights."""
    torch.save((models.flat.cpu(), {name: value.cpu() for name, value in models.buffers.items()}), path)


def load(course: Course, path: Path, repetitions: int) -> Stacked:
    """The models that `save` kept."""
    flat, buffers = torch.load(path, weights_only=True)
    return Stacked(course.configuration(repetitions).fresh_models().template, flat, buffers)


def _step(models: Stacked, table: Table, drawn: BagSet, optimizer: Adam, repetitions: int) -> None:
    def own(values: Codes) -> Tensor:
        return table.to_rows(values.reshape(repetitions, BATCH, *values.shape[1:]))

    logits = models(table.bags(own(drawn.rows)), train=True)
    loss = class_loss(logits, own(drawn.labels)).mean(dim=1).sum()
    gradients = torch.autograd.grad(loss, list(models.parameters.values()))
    with torch.no_grad():
        optimizer.step(models.flat, torch.cat([g.flatten(1) for g in gradients], dim=1))
