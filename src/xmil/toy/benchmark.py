"""One configuration of the evidence benchmark: draw, train all repetitions at once, explain, score."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmil.core.background import Background, background_of
from xmil.core.task import TASKS
from xmil.evaluate.evidence_batch import auroc, score_evidence
from xmil.models import MILModel, create_model
from xmil.toy.digit_bags import Splits, Table, draw_splits, stack_sets
from xmil.toy.digit_tasks import DigitTask
from xmil.toy.instances import Instances
from xmil.toy.protocol import Protocol, Setup
from xmil.toy.race import Fitted, OnEpoch, fit
from xmil.toy.scoring import MethodSpec, score_bags
from xmil.toy.stacked import Stacked
from xmil.toy.variants import with_variants

Row = dict[str, Any]
BACKGROUND_BAGS = 200
SEEDS_APART = 1000  # between the seeds of two runs with neighbouring base seeds


@dataclass(frozen=True)
class Configuration:
    """A task, a model and the data they meet on."""

    task: DigitTask
    setup: Setup
    instances: Instances
    protocol: Protocol
    device: str = "cpu"

    @property
    def name(self) -> str:
        """The name its files carry."""
        return f"{self.task.name}-{self.setup.name}"

    @property
    def prepared(self) -> Instances:
        """The instances as this task and protocol use them."""
        instances = self.instances.pooled() if self.protocol.pooled else self.instances
        return with_variants(instances, self.task.variants, self.protocol.seed)

    @property
    def comparable(self) -> bool:
        """Whether the paper's figures may stand beside: its numbers of bags and training, real MNIST."""
        p = self.protocol
        return not self.instances.embedded and not p.training and p.sizes == Protocol().sizes

    def table(self) -> Table:
        """The features on the device."""
        return Table(torch.from_numpy(self.prepared.features).to(self.device))

    def splits(self, repetition: int) -> Splits:
        """The bags of one repetition."""
        drawn = 0 if self.protocol.shared_bags else repetition
        p = self.protocol
        return draw_splits(self.task, self.prepared, p.sizes, seed=p.seed, repetition=drawn, n=p.bag_size)

    def seeds(self) -> list[int]:
        """The seed of each repetition's initialisation."""
        return [self.protocol.seed * SEEDS_APART + r for r in range(self.protocol.repetitions)]

    def fresh_models(self) -> Stacked:
        """Untrained models, one for each repetition."""
        width = self.instances.features.shape[1]
        shape = {"in_dim": width, "n_classes": self.task.n_classes, **self.setup.params}
        return Stacked.of([create_model(self.setup.name, seed=s, **shape) for s in self.seeds()], self.device)

    def settings(self) -> dict[str, Any]:
        """All that decides what is trained; two runs with equal settings train the same models."""
        training = self.protocol.training_of(self.setup)
        features = np.ascontiguousarray(self.instances.features)
        return {
            "task": self.task.name,
            "model": self.setup.name,
            "params": dict(self.setup.params),
            "protocol": self.protocol.as_dict(),
            "training": vars(training),
            "data": {
                "name": self.instances.name,
                "shape": list(features.shape),
                "crc32": zlib.crc32(features.tobytes()),
            },
        }


def train(configuration: Configuration, *, on_epoch: OnEpoch | None = None) -> Fitted:
    """All repetitions of a configuration, trained at once."""
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


def score(
    configuration: Configuration,
    models: Stacked,
    methods: Sequence[MethodSpec],
    *,
    on_repetition: Callable[[int], None] | None = None,
) -> Iterator[Row]:
    """A row for each repetition and method: the measures against the true evidence, and the test AUROC."""
    table, seeds = configuration.table(), configuration.seeds()
    for r, seed in enumerate(seeds):
        model = models.model(r)
        assert isinstance(model, MILModel)  # noqa: S101  # narrows the type for mypy
        splits = configuration.splits(r)
        model.background, test = background(configuration, splits), splits.test
        x, truth = table.bags(table.to_rows(test.rows)), configuration.task.evidence(test.codes)
        about = {"repetition": r, "seed": seed, "auroc": auroc_on(model, x, test.labels)}
        for spec in methods:
            if spec.supports(model):
                yield {**about, **_measures(model, x, truth, spec, seed)}
        if on_repetition is not None:
            on_repetition(r + 1)


def background(configuration: Configuration, splits: Splits) -> Background:
    """The mean patch of the first training bags, as `xmil train` keeps it."""
    return background_of([configuration.prepared.features[splits.train.rows[:BACKGROUND_BAGS].reshape(-1)]])


def _measures(model: MILModel, x: Tensor, truth: Any, spec: MethodSpec, seed: int) -> Row:
    """The mean of each measure over bags and classes that have evidence."""
    started = time.perf_counter()
    scores = score_bags(model, x, spec, seed=seed)
    evidence = torch.from_numpy(truth).to(x.device)
    found = {name: float(values.nanmean()) for name, values in score_evidence(evidence, scores).items()}
    return {"method": str(spec), **found, "seconds": time.perf_counter() - started}


@torch.no_grad()
def bag_logits(model: MILModel, x: Tensor) -> Tensor:
    """Outputs (b, c) of many bags."""
    step = max(1, (1 << 24) // (x.shape[1] * x.shape[2]))
    return torch.cat([model(bags) for bags in x.split(step)])


def auroc_on(model: MILModel, x: Tensor, labels: Any) -> float:
    """Area under the ROC curve on the test bags, one class against the rest, averaged over the classes."""
    chances = TASKS[model.task].numbers(bag_logits(model, x).double().cpu())
    p = torch.from_numpy(chances).to(x.device)  # (b, c)
    classes = torch.arange(p.shape[1], device=p.device).unsqueeze(1)
    return float(auroc(torch.from_numpy(labels).to(p.device) == classes, p.T).nanmean())
