"""Models trained on bags of digits, and their test bags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from xmil.models import MILModel
from xmil.toy.benchmark import Configuration, auroc_on, train
from xmil.toy.digit_bags import BagSet
from xmil.toy.digit_tasks import TASKS
from xmil.toy.instances import load_instances
from xmil.toy.protocol import QUICK, SETUPS


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
    fitted, features = train(configuration).models, configuration.table()
    for r in range(repetitions):
        test = configuration.splits(r).test
        x = features.bags(torch.from_numpy(test.rows))
        found = fitted.model(r).eval()
        assert isinstance(found, MILModel)  # narrows the type for mypy
        yield Trained(r, found, x, test, auroc_on(found, x, test.labels))
