"""Problems on bags of digits: the tasks of `xmil toy`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from xmil.bench.problems import Block
from xmil.toy.benchmark import Configuration
from xmil.toy.digit_bags import Table
from xmil.toy.digit_tasks import DigitTask
from xmil.toy.instances import Instances
from xmil.toy.protocol import SETUPS, Protocol, Setup


@dataclass(frozen=True, eq=False)
class DigitProblem:
    """A task on bags of digits, drawn as `xmil toy` draws them."""

    task: DigitTask
    instances: Instances
    protocol: Protocol

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task.name

    @property
    def family(self) -> str:
        """The narrow models of the paper."""
        return "digits"

    @property
    def title(self) -> str:
        """The task's title."""
        return self.task.title

    @property
    def why(self) -> str:
        """What the task probes."""
        return self.task.why

    @property
    def n_classes(self) -> int:
        """How many classes the task has."""
        return self.task.n_classes

    @property
    def in_dim(self) -> int:
        """The width of the features."""
        return int(self.instances.features.shape[1])

    def configuration(self, setup: Setup, device: str = "cpu") -> Configuration:
        """What trains a built-in model, all repetitions at once."""
        return Configuration(self.task, setup, self.instances, self.protocol, device)

    def blocks(self, split: str, repetition: int, device: str = "cpu") -> list[Block]:
        """One block: bags of digits have one length."""
        drawn = getattr(self._splits(repetition), split)
        table = self._table.features.to(device)
        x = Table(table).bags(torch.from_numpy(drawn.rows).to(device))
        names = tuple(f"{self.name}-{repetition}-{i}" for i in range(len(drawn)))
        return [Block(x, drawn.labels, self.task.evidence(drawn.codes), names)]

    def settings(self) -> dict[str, Any]:
        """The data and the protocol; more repetitions leave the first ones as they are."""
        whole = self._prepared.settings()
        protocol = {key: value for key, value in whole["protocol"].items() if key != "repetitions"}
        data = {**whole["data"], "embedded": self.instances.embedded}
        return {"name": self.name, "protocol": protocol, "data": data}

    @cached_property
    def _prepared(self) -> Configuration:
        """Bags do not depend on the model: any will do."""
        return self.configuration(SETUPS["attnmil"])

    @cached_property
    def _table(self) -> Table:
        return self._prepared.table()

    def _splits(self, repetition: int) -> Any:
        return self._prepared.splits(repetition)
