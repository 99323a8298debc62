"""Models trained on bags of digits, and their test bags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xmil.bench import (
    QUICK,
    SETUPS,
    TASKS,
    BagSet,
    Configuration,
    Protocol,
    Stacked,
    background,
    bag_auroc,
    load_instances,
    load_stack,
    probabilities,
    train_stacked,
)
from xmil.models import MILModel


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
    yield from several(configuration, train_stacked(configuration).models, repetitions)


def stored(
    task: str,
    model: str,
    *,
    folder: Path,
    data: str,
    repetitions: int,
    first: int = 0,
    settings: dict[str, Any] | None = None,
) -> Iterator[Trained]:
    """Repetitions that `xmil bench --suite paper --out FOLDER` trained; `settings` of another protocol."""
    protocol = Protocol(**(settings or {}))
    configuration = Configuration(TASKS[task], SETUPS[model], load_instances(data), protocol)
    fitted = load_stack(folder, configuration)
    if fitted is None:
        raise SystemExit(f"{folder}: has no models of {configuration.name} of this protocol")
    yield from several(configuration, fitted.models, repetitions, first=first)


def several(
    configuration: Configuration, fitted: Stacked, repetitions: int, *, first: int = 0
) -> Iterator[Trained]:
    """Models with their test bags and the background of their training bags."""
    features = configuration.table()
    for r in range(first, first + repetitions):
        splits = configuration.splits(r)
        x = features.bags(torch.from_numpy(splits.test.rows))
        found = fitted.model(r).eval()
        assert isinstance(found, MILModel)  # narrows the type for mypy
        found.background = background(configuration, splits)
        yield Trained(r, found, x, splits.test, bag_auroc(probabilities(found, x), splits.test.labels))
