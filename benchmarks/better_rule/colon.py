"""The colon models of the suite: the benchmark's own, and the small nets on the same folds."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.better_rule.nets import NETS
from benchmarks.colon import train as colon
from benchmarks.colon.bags import TASKS, ColonBag, folds
from xmil.models import MILModel, create_model

SMALL = {
    "clam_sb": ("clam_sb", {"dim": 32, "attention_dim": 16, "dropout": 0.2}),
    "dsmil": ("dsmil", {"query_dim": 32, "dropout": 0.2}),
    **{name: (name, {"dim": 32}) for name in NETS},
}
OWN = ("attnmil", "transmil", "addmil")
RUNS, SMALL_RUNS = 10, 5


def model_of(name: str, width: int) -> MILModel:
    """An untrained model of the colon suite."""
    kind, params = (name, colon.MODELS[name]) if name in OWN else SMALL[name]
    return create_model(kind, in_dim=width, n_classes=2, **params)


def parts(bags: list[ColonBag], task: str, run: int) -> tuple[list[ColonBag], list[ColonBag]]:
    """Training (with validation) and test bags of a run, as the colon benchmark has them."""
    test = set(folds(bags, task, seed=run // 5)[run % 5].tolist())
    return [b for i, b in enumerate(bags) if i not in test], [bags[i] for i in sorted(test)]


def held_out(bags: list[ColonBag], run: int) -> list[ColonBag]:
    """The fifth of the training bags that early stopping sees: what a choice may be made on."""
    rows = np.random.default_rng(run).permutation(len(bags))
    return [bags[i] for i in sorted(int(r) for r in rows[: max(1, len(bags) // 5)])]


def fit(name: str, bags: list[ColonBag], task: str, *, run: int, epochs: int = colon.EPOCHS) -> MILModel:
    """The model of a run, in eval mode."""
    if name in OWN:
        return colon.fit(name, bags, task, seed=run, epochs=epochs)
    held = {bag.name for bag in held_out(bags, run)}
    training, validation = ([b for b in bags if (b.name in held) == v] for v in (False, True))
    torch.manual_seed(run)
    rng = np.random.default_rng((run, 1))
    model = model_of(name, bags[0].features.shape[1])
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    best, lowest, waited = copy.deepcopy(model.state_dict()), float("inf"), 0
    for epoch in range(epochs):
        model.train()
        for batch in np.array_split(rng.permutation(len(training)), max(1, len(training) // colon.BATCH)):
            optimiser.zero_grad()
            _loss(model, [training[i] for i in batch], task).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        model.eval()
        with torch.no_grad():
            loss = float(_loss(model, validation, task))
        waited += 1
        if loss < lowest:
            best, lowest, waited = copy.deepcopy(model.state_dict()), loss, 0
        elif waited >= colon.PATIENCE and epoch >= colon.WARM_UP:
            break
    model.load_state_dict(best)
    return model.eval()


def _loss(model: MILModel, bags: list[ColonBag], task: str) -> torch.Tensor:
    logits = torch.cat([model(F.dropout(b.features, 0.2, model.training).unsqueeze(0)) for b in bags])
    return F.cross_entropy(logits, torch.tensor([b.label(task) for b in bags]))


def train_run(name: str, task: str, run: int, bags: list[ColonBag], out: Path) -> None:
    """Train and keep a run's model, unless it is there."""
    path = out / f"{task}_{name}_{run}.pt"
    if not path.is_file():
        model = fit(name, parts(bags, task, run)[0], task, run=run)  # kept, and explained, in half precision
        out.mkdir(parents=True, exist_ok=True)
        torch.save({key: value.half() for key, value in model.state_dict().items()}, path)


def load_run(name: str, task: str, run: int, out: Path, width: int = 512) -> MILModel | None:
    """The model of a run, or None."""
    path = out / f"{task}_{name}_{run}.pt"
    if not path.is_file():
        return None
    model = model_of(name, width)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def runs() -> list[tuple[str, str, int]]:
    """Every (architecture, task, run), the required ones first."""
    first = [(name, task, run) for run in range(RUNS) for name in OWN[:2] for task in TASKS]
    first += [("addmil", task, run) for run in range(RUNS) for task in TASKS]
    return first + [(name, task, run) for run in range(SMALL_RUNS) for name in SMALL for task in TASKS]
