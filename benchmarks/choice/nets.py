"""The nets of the study, a list fixed before anything was measured, and their training into a cache.

`STANDARD` are models of the package. `NONLINEAR` have a nonlinear head behind the pooling, where a patch may
act by switching a unit off or by changing what the others do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xmil
from xmil.bench.digits import TASKS
from xmil.bench.instances import Instances, draw_bags, load_instances

STANDARD = ("attnmil", "clam_mb", "transmil", "mambamil", "addmil", "dsmil", "meanpool")
TASK_NAMES = ("four_bags", "pos_neg_count", "adjacent_pairs", "standard")
DATA = ("digits", "mnist")  # scikit-learn's pixels: for choosing; ResNet features of MNIST: for the report
SEEDS = (0, 1, 2)
N, TRAIN, VALIDATION, LIKE, TEST = 20, 600, 100, 32, 48  # instances of a bag, and bags of each kind
DIM, EPOCHS, BATCH = 32, 60, 50


class Bags(nn.Module):
    """Instances through a layer, a pooling, and an MLP."""

    def __init__(self, in_dim: int, n_classes: int, dim: int = DIM) -> None:
        super().__init__()
        self.project = nn.Linear(in_dim, dim)
        self.gate, self.hidden, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, n_classes)

    def pool(self, h: Tensor) -> Tensor:
        """Embedded instances (b, n, e) to one vector (b, e)."""
        return h.mean(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Bags (b, n, d) to logits (b, c)."""
        pooled = self.pool(F.relu(self.project(x)))
        out: Tensor = self.out(F.relu(self.hidden(pooled)))
        return out


class MeanMLP(Bags):
    """Mean pooling."""


class MaxMLP(Bags):
    """Max pooling."""

    def pool(self, h: Tensor) -> Tensor:
        """The largest of each feature."""
        return h.amax(dim=1)


class GateMLP(Bags):
    """A mean that a gate of the whole bag scales."""

    def pool(self, h: Tensor) -> Tensor:
        """The mean times a sigmoid of itself."""
        mean = h.mean(dim=1)
        return mean * torch.sigmoid(self.gate(mean))


class TopMLP(Bags):
    """The mean of the four largest of each feature."""

    def pool(self, h: Tensor) -> Tensor:
        """Fewer where the bag is smaller."""
        return h.topk(min(4, h.shape[1]), dim=1).values.mean(dim=1)


class Prototypes(Bags):
    """The best cosine similarity of an instance with each of a few prototypes."""

    def pool(self, h: Tensor) -> Tensor:
        """The gate's rows are the prototypes."""
        similarity = F.normalize(h, dim=-1) @ F.normalize(self.gate.weight, dim=-1).mT
        return similarity.amax(dim=1)


NONLINEAR: dict[str, type[Bags]] = {
    "mean_mlp": MeanMLP, "max_mlp": MaxMLP, "gate_mlp": GateMLP, "top_mlp": TopMLP, "prototypes": Prototypes
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A trained net with bags for choosing a method, and test bags with their evidence (b, c, n)."""

    name: str
    data: str
    task: str
    seed: int
    net: nn.Module
    like: Tensor
    test: Tensor
    evidence: np.ndarray
    accuracy: float


@lru_cache
def instances_of(data: str) -> Instances:
    """The digits as feature vectors, of unit variance."""
    if data == "digits":
        return load_instances("digits")
    folder = Path(os.environ.get("XMIL_DATA", "../shared/data"))
    return load_instances(folder / "mnist")


def build(name: str, in_dim: int, n_classes: int, seed: int) -> nn.Module:
    """A net with its first weights."""
    torch.manual_seed(seed)
    if name in NONLINEAR:
        return NONLINEAR[name](in_dim, n_classes)
    width = {"hidden": DIM} if name == "addmil" else {"dim": DIM}
    return xmil.create_model(name, in_dim=in_dim, n_classes=n_classes, seed=seed, **width)


def trained(name: str, data: str, task_name: str, seed: int, *, cache: Path) -> Trained:
    """A net from the cache, or trained into it."""
    task, instances = TASKS[task_name], instances_of(data)
    scale = float(instances.features.std())
    sizes = {"train": TRAIN, "validation": VALIDATION, "like": LIKE, "test": TEST}
    pools = {"like": "test"}
    drawn = {
        kind: draw_bags(task, instances, pools.get(kind, kind), n_bags=size, n=N, seed=(seed, i, 77))
        for i, (kind, size) in enumerate(sizes.items())
    }
    x = {k: torch.from_numpy(instances.features[v.rows]).float() / scale for k, v in drawn.items()}
    y = {k: torch.from_numpy(v.labels) for k, v in drawn.items()}
    net = build(name, x["train"].shape[-1], task.n_classes, seed)
    path = cache / f"{data}-{task_name}-{name}-{seed}.pt"
    if path.exists():
        net.load_state_dict(torch.load(path, weights_only=True))
    else:
        learn(net, x, y, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(net.state_dict(), path)
    net.eval()
    with torch.no_grad():
        accuracy = float((net(x["test"]).argmax(-1) == y["test"]).float().mean())
    evidence = task.evidence(drawn["test"].codes)
    return Trained(name, data, task_name, seed, net, x["like"], x["test"], evidence, accuracy)


def learn(net: nn.Module, x: dict[str, Tensor], y: dict[str, Tensor], seed: int) -> None:
    """Adam with early stopping on the validation bags."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, weight_decay=1e-4)
    best, state, waited = float("inf"), {}, 0
    for _ in range(EPOCHS):
        net.train()
        for rows in torch.randperm(len(y["train"])).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(net(x["train"][rows]), y["train"][rows]).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            loss = float(F.cross_entropy(net(x["validation"]), y["validation"]))
        waited += 1
        if loss < best:
            best, waited = loss, 0
            state = {k: v.clone() for k, v in net.state_dict().items()}
        if waited > 10:
            break
    net.load_state_dict(state)


def every_net(
    data: str, *, seeds: tuple[int, ...] = SEEDS, cache: Path, tasks: tuple[str, ...] = TASK_NAMES
) -> Iterator[Trained]:
    """All nets of one data set."""
    for seed in seeds:
        for task in tasks:
            for name in (*STANDARD, *NONLINEAR):
                yield trained(name, data, task, seed, cache=cache)
