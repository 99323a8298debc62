"""Problems on bags of digits under a protocol, and models trained on them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from xmil.bench.digits import BAG_SIZE, DigitTask
from xmil.bench.instances import Instances, Splits, Table, draw_splits, stack_sets, with_variants
from xmil.bench.models import PAPER_MODELS, SETUPS, Setup
from xmil.bench.problems import Block, Problem
from xmil.bench.training import QUICK_TRAINING, Fitted, OnEpoch, Stacked, Training, fit
from xmil.core.background import Background, background_of
from xmil.core.errors import bad_parameter
from xmil.models import create_model

PAPER_TASKS = ("four_bags", "pos_neg_count", "adjacent_pairs")
PAPER_METHODS = ("random", "attention", "single", "logits", "gxi", "ig", "lrp")
TABLE1_METHODS = (*PAPER_METHODS, "attention:unfolded", "lrp:paper")  # with the variants of the paper's rows
BACKGROUND_BAGS = 200
SEEDS_APART = 1000  # distance between the seeds of runs with consecutive base seeds
MOST_REPETITIONS = SEEDS_APART


@dataclass(frozen=True)
class Protocol:
    """How bags are drawn and how often; two runs need the same protocol to be compared.

    `sizes` are the numbers of training, validation and test bags. `training` overrides settings of every
    model. Repetitions draw their own bags unless `shared_bags`; pools of images are disjoint unless `pooled`.
    """

    repetitions: int = 30
    seed: int = 0
    sizes: tuple[int, int, int] = (2000, 500, 1000)
    bag_size: int = BAG_SIZE
    pooled: bool = False
    shared_bags: bool = False
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.repetitions <= MOST_REPETITIONS:
            must = f"an int in the range [1, {MOST_REPETITIONS}]"
            raise bad_parameter("repetitions", "bench", must, self.repetitions)
        if self.seed < 0:
            raise bad_parameter("seed", "bench", "an int in the range [0, inf)", self.seed)
        if min(self.sizes) < 2 or self.bag_size < 1:
            raise bad_parameter("sizes", "bench", "at least two bags each, of one patch or more", self.sizes)

    def training_of(self, setup: Setup) -> Training:
        """The training of a model under this protocol."""
        return replace(setup.training, **self.training)

    def as_dict(self) -> dict[str, Any]:
        """The settings in the types of JSON."""
        return {**asdict(self), "sizes": list(self.sizes), "training": dict(self.training)}


QUICK = Protocol(repetitions=2, sizes=(600, 150, 150), training=QUICK_TRAINING)


@dataclass(frozen=True)
class Configuration:
    """A task, a model, and their data."""

    task: DigitTask
    setup: Setup
    instances: Instances
    protocol: Protocol
    device: str = "cpu"

    @property
    def name(self) -> str:
        """The name in its files."""
        return f"{self.task.name}-{self.setup.name}"

    @cached_property
    def prepared(self) -> Instances:
        """The instances with the task's variants and the protocol's pools."""
        instances = self.instances.with_one_pool() if self.protocol.pooled else self.instances
        return with_variants(instances, self.task.variants, self.protocol.seed)

    def table(self) -> Table:
        """The features on the device."""
        return Table(torch.from_numpy(self.prepared.features).to(self.device))

    def splits(self, repetition: int) -> Splits:
        """The bags of one repetition."""
        p, r = self.protocol, 0 if self.protocol.shared_bags else repetition
        return draw_splits(self.task, self.prepared, p.sizes, seed=p.seed, repetition=r, n=p.bag_size)

    def seeds(self) -> list[int]:
        """The seed of each repetition's initialisation."""
        return [self.protocol.seed * SEEDS_APART + r for r in range(self.protocol.repetitions)]

    def fresh_models(self) -> Stacked:
        """Untrained models, one for each repetition."""
        width = self.instances.features.shape[1]
        shape = {"in_dim": width, "n_classes": self.task.n_classes, **self.setup.params}
        return Stacked.of([create_model(self.setup.name, seed=s, **shape) for s in self.seeds()], self.device)

    def settings(self) -> dict[str, Any]:
        """All settings that decide the training; equal settings train the same models."""
        features = np.ascontiguousarray(self.instances.features)
        return {
            "task": self.task.name,
            "model": self.setup.name,
            "params": dict(self.setup.params),
            "protocol": self.protocol.as_dict(),
            "training": vars(self.protocol.training_of(self.setup)),
            "data": {
                "name": self.instances.name,
                "shape": list(features.shape),
                "crc32": zlib.crc32(features.tobytes()),
            },
        }


def train_stacked(configuration: Configuration, *, on_epoch: OnEpoch | None = None) -> Fitted:
    """Train all repetitions of a configuration at once."""
    c = configuration
    splits = [c.splits(r) for r in range(c.protocol.repetitions)]
    return fit(
        c.fresh_models(),
        stack_sets([s.train for s in splits]),
        stack_sets([s.validation for s in splits]),
        c.table(),
        training=c.protocol.training_of(c.setup),
        on_epoch=on_epoch,
    )


def background(configuration: Configuration, splits: Splits) -> Background:
    """The mean patch of the first training bags, as `xmil train` stores it."""
    return background_of([configuration.prepared.features[splits.train.rows[:BACKGROUND_BAGS].reshape(-1)]])


@dataclass(frozen=True, eq=False, kw_only=True)
class DigitProblem(Problem):
    """A task on bags of digits as a problem of the benchmark."""

    task: DigitTask
    instances: Instances
    protocol: Protocol

    @classmethod
    def of(cls, task: DigitTask, instances: Instances, protocol: Protocol) -> DigitProblem:
        """Make the problem of a task on some instances."""
        return cls(
            name=task.name,
            title=task.title,
            why=task.why,
            n_classes=task.n_classes,
            in_dim=int(instances.features.shape[1]),
            family="digits",
            task=task,
            instances=instances,
            protocol=protocol,
        )

    def configuration(self, setup: Setup, device: str = "cpu") -> Configuration:
        """The configuration that trains a built-in model, all repetitions at once."""
        return Configuration(self.task, setup, self.instances, self.protocol, device)

    def blocks(self, split: str, repetition: int, device: str = "cpu") -> list[Block]:
        """One block: bags of digits have one length."""
        bags = getattr(self._any_model.splits(repetition), split)
        table = Table(torch.from_numpy(self._any_model.prepared.features).to(device))
        names = tuple(f"{self.name}-{repetition}-{i}" for i in range(len(bags)))
        return [
            Block(table.bags(table.to_rows(bags.rows)), bags.labels, self.task.evidence(bags.codes), names)
        ]

    def settings(self) -> dict[str, Any]:
        """The data and the protocol; without the number of repetitions, which can grow."""
        settings = self._any_model.settings()
        protocol = {key: value for key, value in settings["protocol"].items() if key != "repetitions"}
        data = {**settings["data"], "embedded": self.instances.embedded}
        return {"name": self.name, "protocol": protocol, "data": data}

    @cached_property
    def _any_model(self) -> Configuration:
        """A configuration of any model, since bags do not depend on it."""
        return self.configuration(SETUPS["attnmil"])


_COLUMNS = [(task, model) for task in ("four_bags", "pos_neg", "adjacent_pairs") for model in PAPER_MODELS]
_ROWS: dict[str, list[float | None]] = {
    "auroc": [1.00, 1.00, 0.98, 0.97, 0.98, 0.89, 0.88, 0.92, 0.77],
    "random": [0.31, 0.31, None, 0.42, 0.42, None, 0.54, 0.54, None],
    "attention": [0.53, 0.52, 0.54, 0.45, 0.46, 0.48, 0.61, 0.60, 0.63],
    "single": [0.87, 0.85, None, 0.89, 0.91, None, 0.73, 0.77, None],
    "logits": [None, None, 0.79, None, None, 0.68, None, None, 0.71],
    "gxi": [0.72, 0.40, None, 0.72, 0.44, None, 0.63, 0.57, None],
    "ig": [0.88, 0.80, None, 0.93, 0.82, None, 0.75, 0.72, None],
    "lrp": [0.91, 0.90, None, 0.91, 0.92, None, 0.77, 0.81, None],
}


def paper_figure(task: str, model: str, method: str) -> float | None:
    """Look up the published mean, if there is one; both versions of Pos-Neg have the same.

    >>> paper_figure("pos_neg_count", "transmil", "lrp")
    0.92
    """
    column = ("pos_neg" if task == "pos_neg_count" else task, model)
    if column not in _COLUMNS or method not in _ROWS:
        return None
    return _ROWS[method][_COLUMNS.index(column)]
