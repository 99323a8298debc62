"""A small seeded training loop: Adam, eight bags a step, the lowest validation loss wins."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import xmil
from benchmarks.colon.bags import ColonBag
from xmil.models.base import MILModel

MODELS: dict[str, dict[str, object]] = {
    "attnmil": {"dim": 64, "attention_dim": 32, "dropout": 0.2},
    "transmil": {"dim": 32, "heads": 4, "landmarks": 16, "dropout": 0.2},
    "addmil": {"hidden": 64, "dropout": 0.2},
}
LEARNING_RATE = {"attnmil": 1e-3, "transmil": 1e-3, "addmil": 1e-3}
BATCH, EPOCHS, PATIENCE, WARM_UP = 8, 60, 12, 5


def fit(name: str, bags: list[ColonBag], task: str, *, seed: int, epochs: int = EPOCHS) -> MILModel:
    """The model with the lowest loss on a fifth of the bags, in eval mode."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(bags))
    held = {int(r) for r in rows[: max(1, len(bags) // 5)]}
    training = [bag for i, bag in enumerate(bags) if i not in held]
    validation = [bags[i] for i in sorted(held)]
    torch.manual_seed(seed)
    model = xmil.create_model(name, in_dim=bags[0].features.shape[1], n_classes=2, **MODELS[name])
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE[name], weight_decay=1e-4)
    best, lowest, waited = copy.deepcopy(model.state_dict()), float("inf"), 0
    for epoch in range(epochs):
        _epoch(model, training, task, optimiser, rng)
        loss = mean_loss(model, validation, task)
        waited += 1
        if loss < lowest:
            best, lowest, waited = copy.deepcopy(model.state_dict()), loss, 0
        elif waited >= PATIENCE and epoch >= WARM_UP:
            break
    model.load_state_dict(best)
    return model.eval()


def _epoch(
    model: MILModel,
    bags: list[ColonBag],
    task: str,
    optimiser: torch.optim.Optimizer,
    rng: np.random.Generator,
) -> None:
    model.train()
    order = rng.permutation(len(bags))
    for batch in np.array_split(order, max(1, len(bags) // BATCH)):
        optimiser.zero_grad()
        _loss(model, [bags[i] for i in batch], task).backward()  # type: ignore[no-untyped-call]
        optimiser.step()


@torch.no_grad()
def mean_loss(model: MILModel, bags: list[ColonBag], task: str) -> float:
    """Cross entropy over the bags, in eval mode."""
    model.eval()
    return float(np.mean([float(_loss(model, [bag], task)) for bag in bags]))


def _loss(model: MILModel, bags: list[ColonBag], task: str) -> Tensor:
    """Mean cross entropy of bags that are padded to one length."""
    x = pad_sequence([bag.features for bag in bags], batch_first=True)
    lengths = torch.tensor([len(bag.features) for bag in bags])
    mask = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
    return F.cross_entropy(model(x, mask), torch.tensor([bag.label(task) for bag in bags]))
