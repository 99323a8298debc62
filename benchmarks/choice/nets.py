"""The nets of the study, a list fixed before anything was measured, and their training into a folder.

`STANDARD` are models of the package. `NONLINEAR` have a nonlinear head behind the pooling, where a patch may
act by switching a unit off or by changing what the others do.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xmil
from xmil.bench.digits import TASKS, draw_kinds, draw_rows
from xmil.bench.histology import CELLS, cut, nuclei
from xmil.bench.instances import draw_bags, load_instances
from xmil.bench.tissue import statistics
from xmil.models import MILModel

STANDARD = ("attnmil", "clam_mb", "transmil", "mambamil", "addmil", "dsmil", "meanpool")
TASK_NAMES = ("four_bags", "pos_neg_count", "adjacent_pairs", "standard")
DATA = ("digits", "mnist", "tissue")  # scikit-learn's pixels are for choosing, the others for the report
SEEDS = (0, 1, 2)
N, TRAIN, VALIDATION, LIKE, TEST = 20, 600, 100, 32, 48  # instances of a bag, and bags of each kind
DIM, EPOCHS, BATCH = 32, 60, 50
# what the cells (epithelial, inflammatory, fibroblast, others) stand for in the tasks on digits: the two in
# question are 8 and 9, for and against, or a pair
AS_DIGITS = {
    "four_bags": (8, 9, 0, 1), "pos_neg_count": (4, 5, 0, 1), "adjacent_pairs": (0, 1, 6, 8),
    "standard": (8, 9, 0, 1),
}  # fmt: skip
PER_IMAGE = 60  # nuclei of an image, so that none outweighs the others
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int64]


class Bags(MILModel):
    """Instances through a layer, a pooling, and an MLP."""

    def __init__(self, in_dim: int, n_classes: int, dim: int = DIM) -> None:
        super().__init__(in_dim, n_classes)
        self.project = nn.Linear(in_dim, dim)
        self.gate, self.hidden, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Instances (b, n, d) to (b, n, e)."""
        return F.relu(self.project(x))

    def pool(self, h: Tensor) -> Tensor:
        """Embedded instances (b, n, e) to one vector (b, e)."""
        return h.mean(dim=1)

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:  # noqa: ARG002  # bags of one size
        """Embedded instances (b, n, e) to logits (b, c)."""
        out: Tensor = self.out(F.relu(self.hidden(self.pool(h))))
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
    net: MILModel
    like: Tensor
    test: Tensor
    evidence: npt.NDArray[np.int8]
    accuracy: float


def data_folder() -> Path:
    """Where the data lies."""
    return Path(os.environ.get("XMIL_DATA", "../shared/data"))


@lru_cache
def cells() -> tuple[Floats, Codes, dict[str, Codes]]:
    """Features of nuclei, their cells, and the rows of each pool; no image is in two pools."""
    folder, features, kinds, images = data_folder() / "colon", [], [], []
    rng = np.random.default_rng(0)
    for i, (name, (centres, own)) in enumerate(sorted(nuclei(folder).items())):
        rows = rng.permutation(len(own))[:PER_IMAGE]
        features.append(statistics(cut(folder / f"{name}.jpg", centres[rows])))
        kinds.append(own[rows])
        images += [i] * len(rows)
    x, pool = np.concatenate(features), np.array(rng.permutation(images[-1] + 1) / (images[-1] + 1))[images]
    edges = {"train": (0.0, 0.6), "validation": (0.6, 0.7), "test": (0.7, 1.0)}
    pools = {name: np.flatnonzero((pool >= low) & (pool < high)) for name, (low, high) in edges.items()}
    mean, deviation = x[pools["train"]].mean(axis=0), x[pools["train"]].std(axis=0)
    return ((x - mean) / np.maximum(deviation, 1e-6)).astype(np.float32), np.concatenate(kinds), pools


@lru_cache(maxsize=8)
def draw(data: str, task: str, pool: str, n_bags: int, seed: tuple[int, ...]) -> tuple[Tensor, Codes]:
    """Bags (b, N, d) from a pool of instances, and what digit each instance is or stands for (b, N)."""
    if data == "tissue":
        features, kinds, pools = cells()
        rng, own = np.random.default_rng(seed), pools[pool]
        drawn = draw_kinds(rng, n_bags, N, len(CELLS))
        rows = draw_rows(rng, drawn, [own[kinds[own] == kind] for kind in range(len(CELLS))])
        return torch.from_numpy(features[rows]), np.array(AS_DIGITS[task])[drawn]
    instances = _instances(data)
    bags = draw_bags(TASKS[task], instances, pool, n_bags=n_bags, n=N, seed=seed)
    scale = float(instances.features.std())
    return torch.from_numpy(instances.features[bags.rows]).float() / scale, bags.codes


_instances = lru_cache(lambda data: load_instances("digits" if data == "digits" else data_folder() / data))


def build(name: str, in_dim: int, n_classes: int, seed: int) -> MILModel:
    """A net with its first weights."""
    torch.manual_seed(seed)
    if name in NONLINEAR:
        return NONLINEAR[name](in_dim, n_classes)
    width: dict[str, Any] = {"hidden": DIM} if name == "addmil" else {"dim": DIM}
    return xmil.create_model(name, in_dim=in_dim, n_classes=n_classes, seed=seed, **width)


def trained(name: str, data: str, task_name: str, seed: int, *, cache: Path) -> Trained:
    """A net from the cache, or trained into it, with the background of its training bags."""
    task, x, codes = TASKS[task_name], {}, {}
    sizes = {"train": TRAIN, "validation": VALIDATION, "like": LIKE, "test": TEST}
    for i, (kind, size) in enumerate(sizes.items()):
        pool = "test" if kind == "like" else kind
        x[kind], codes[kind] = draw(data, task_name, pool, size, (seed, i, 77))
    y = {kind: torch.from_numpy(task.label(own).astype(np.int64)) for kind, own in codes.items()}
    net = build(name, x["train"].shape[-1], task.n_classes, seed)
    path = cache / f"{data}-{task_name}-{name}-{seed}.pt"
    if path.exists():
        net.load_state_dict(torch.load(path, weights_only=True))
    else:
        learn(net, x, y, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(net.state_dict(), path)
    net.eval()
    net.background = xmil.background(list(x["train"].numpy()[:64]))
    with torch.no_grad():
        accuracy = float((net(x["test"]).argmax(-1) == y["test"]).float().mean())
    evidence = task.evidence(codes["test"])
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
