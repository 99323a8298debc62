"""Training any module on a problem's bags: the lowest validation loss wins."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from xmil.bench.problems import Block
from xmil.core.errors import InputError
from xmil.models import MILModel
from xmil.toy.race import Training

WEIGHT_DECAY = 1e-4
Bags = list[tuple[Tensor, int]]  # features (n, d) and label


def learn(
    model: nn.Module, train: list[Block], validation: list[Block], *, training: Training, seed: int
) -> nn.Module:
    """The model after the epoch with the lowest validation loss, in eval mode; the one given is changed.

    Bags are shuffled by the seed in every epoch.
    """
    optimiser = _optimiser(model, training)
    rng = np.random.default_rng(seed)
    bags, held = _bags(train), _bags(validation)
    best, lowest, since = copy.deepcopy(model.state_dict()), float("inf"), 0
    with torch.random.fork_rng(devices=_devices(bags)):
        torch.manual_seed(seed)  # dropout
        for epoch in range(training.epochs):
            _epoch(model, bags, optimiser, training.batch, rng)
            loss = mean_loss(model, held, training.batch)
            since += 1
            if loss < lowest and (epoch >= training.warmup or epoch == training.epochs - 1):
                best, lowest, since = copy.deepcopy(model.state_dict()), loss, 0
            elif since >= training.patience and epoch >= training.warmup + training.patience:
                break
    if not np.isfinite(lowest):
        raise InputError("Training diverged: no validation loss was finite; use a smaller lr.")
    model.load_state_dict(best)
    return model.eval()


def logits_of(model: nn.Module, bags: list[Tensor]) -> Tensor:
    """Outputs (b, c) of bags of any lengths.

    Our models take them padded, with a mask; others in a batch where the lengths agree, else one by one.
    """
    if len({len(bag) for bag in bags}) == 1:
        return _checked(model, model(torch.stack(bags)), len(bags))
    if isinstance(model, MILModel):
        lengths = torch.tensor([len(bag) for bag in bags], device=bags[0].device)
        x = pad_sequence(bags, batch_first=True)
        mask = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
        return model(x, mask)  # type: ignore[no-any-return]
    return torch.cat([_checked(model, model(bag.unsqueeze(0)), 1) for bag in bags])


@torch.no_grad()
def mean_loss(model: nn.Module, bags: Bags, batch: int) -> float:
    """Mean cross-entropy over the bags, in eval mode."""
    model.eval()
    losses = [_loss(model, part) * len(part) for part in _parts(bags, batch)]
    return float(torch.stack(losses).sum()) / len(bags)


def _epoch(
    model: nn.Module, bags: Bags, optimiser: torch.optim.Optimizer, batch: int, rng: np.random.Generator
) -> None:
    model.train()
    shuffled = [bags[int(i)] for i in rng.permutation(len(bags))]
    for part in _parts(shuffled, batch):
        optimiser.zero_grad()
        _loss(model, part).backward()
        optimiser.step()


def _loss(model: nn.Module, bags: Bags) -> Tensor:
    labels = torch.tensor([label for _, label in bags], device=bags[0][0].device)
    return F.cross_entropy(logits_of(model, [x for x, _ in bags]), labels)


def _parts(bags: Bags, batch: int) -> Iterator[Bags]:
    """Batches; a last one of a single bag joins the one before, for batch norm needs two."""
    starts = list(range(0, len(bags), batch))
    if len(starts) > 1 and len(bags) - starts[-1] == 1:
        starts.pop()
    return (
        bags[start : (starts[i + 1] if i + 1 < len(starts) else len(bags))] for i, start in enumerate(starts)
    )


def _bags(blocks: list[Block]) -> Bags:
    return [
        (x, int(label))
        for block in blocks
        for x, label in zip(block.x.unbind(), block.labels.tolist(), strict=True)
    ]


def _optimiser(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    if training.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=training.lr, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=training.lr, weight_decay=WEIGHT_DECAY)


def _devices(bags: Bags) -> list[torch.device]:
    return [bags[0][0].device] if bags[0][0].is_cuda else []


def _checked(model: nn.Module, out: object, n: int) -> Tensor:
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != n:
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise InputError(
            f"{type(model).__name__} must map bags (b, n, d) to logits (b, c). Got {shape} for {n} bags."
        )
    return out
