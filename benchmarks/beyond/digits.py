"""Models trained on bags of digits, and their test bags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from xmil.models import MILModel
from xmil.toy.benchmark import Configuration, auroc_on, train
from xmil.toy.digit_bags import BagSet
from xmil.toy.digit_tasks import TASKS
from xmil.toy.instances import load_instances
from xmil.toy.protocol import QUICK, SETUPS, Protocol
from xmil.toy.stacked import Stacked
from xmil.toy.store import Store


@dataclass(frozen=True)
class Trained:
    """One repetition: a model, its test bags (b, n, d) with their digits and labels, and its test AUROC."""

    repetition: int
    model: MILModel
    x: Tensor
    test: BagSet
    auroc: float


def trained(
    task: str,
    model: str,
    *,
    data: str,
    n: int,
    repetitions: int,
    epochs: int = 60,
    bags: int = 600,
    tests: int = 100,
) -> Iterator[Trained]:
    """Models of all repetitions, each with bags of its own: Adam, 3e-3, early stop on validation bags."""
    training = {**QUICK.training, "epochs": epochs}
    protocol = replace(
        QUICK, repetitions=repetitions, sizes=(bags, bags // 4, tests), bag_size=n, training=training
    )
    configuration = Configuration(TASKS[task], SETUPS[model], load_instances(data), protocol)
    yield from _repetitions(configuration, train(configuration).models, repetitions)


def stored(task: str, model: str, *, folder: Path, data: str, repetitions: int) -> Iterator[Trained]:
    """The first repetitions that `xmil toy --table1 --out FOLDER` trained."""
    configuration = Configuration(TASKS[task], SETUPS[model], load_instances(data), Protocol())
    fitted = Store(folder).models(configuration)
    if fitted is None:
        raise SystemExit(f"{folder}: has no models of {configuration.name} trained as in the paper")
    yield from _repetitions(configuration, fitted.models, repetitions)


def _repetitions(configuration: Configuration, fitted: Stacked, repetitions: int) -> Iterator[Trained]:
    features = configuration.table()
    for r in range(repetitions):
        test = configuration.splits(r).test
        x = features.bags(torch.from_numpy(test.rows))
        found = fitted.model(r).eval()
        assert isinstance(found, MILModel)  # narrows the type for mypy
        yield Trained(r, found, x, test, auroc_on(found, x, test.labels))
