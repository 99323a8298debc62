"""Trained models with some of their test bags in one small file: `python -m benchmarks.beyond.packed --help`.

    python -m benchmarks.beyond.packed --data MNIST --models DIR --colon FILE --colon-models DIR --out FILE

What is kept lies behind the first linear layer, where scores of the models are the same. `DIR` is a folder
of `xmil bench --suite paper`, or the "paper" folder of `benchmarks.better_rule.suite`, which trains those of
colon, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from benchmarks.better_rule.colon import model_of, parts
from benchmarks.beyond.digits import Trained, stored
from benchmarks.beyond.pairs import positives
from benchmarks.colon.bags import TASKS as COLON_TASKS
from benchmarks.colon.bags import read_bags
from benchmarks.colon.train import MODELS as COLON_MODELS
from xmil.bench import PAPER_TASKS, SETUPS, project
from xmil.core.background import Background, background_of
from xmil.methods import preset_composite
from xmil.models import MILModel, create_model
from xmil.network import Network

FIRST, REPETITIONS, BAGS, COLON_RUNS = 10, 10, 25, 5
COLUMNS = [
    *(f"{model} {task}" for model in ("transmil", "attnmil") for task in PAPER_TASKS),
    *(f"transmil {task}" for task in COLON_TASKS),
]
Entry = dict[str, Any]


@dataclass(frozen=True)
class Packed:
    """A model with bags (n, e) and, for each, the digits (n,) or the evidence (n,) for class 1."""

    about: Entry
    model: MILModel
    bags: list[Tensor]
    truth: list[Any]
    positive: list[tuple[Tensor, Any]]


def pack(one: Trained, model: str, task: str) -> Entry:
    """A repetition of Table 1."""
    about = {"model": model, "task": task, "repetition": one.repetition, "auroc": one.auroc}
    params = {"n_classes": one.model.n_classes, **SETUPS[model].params}
    bags, truth = [*one.x[:BAGS]], [*one.test.codes[:BAGS]]
    found = _entry(one.model, params, bags, truth)
    if (model, task) == ("transmil", "adjacent_pairs"):
        chosen = [*positives(one, REPETITIONS)]
        found["positive"] = [
            (_narrow(one.model, x.unsqueeze(0))[1][0].half(), torch.from_numpy(c)) for x, c in chosen
        ]
    return {**about, **found}


def _entry(model: MILModel, params: Entry, bags: list[Tensor], truth: list[Any]) -> Entry:
    narrow = _narrow(model, bags[0].unsqueeze(0))[0]
    known = narrow.background
    assert known is not None  # narrows the type for mypy
    return {
        "params": {"in_dim": len(known.mean), **params},
        "state": narrow.state_dict(),
        "background": (torch.from_numpy(known.mean), torch.from_numpy(known.patches).half(), known.n),
        "bags": [_narrow(model, x.unsqueeze(0))[1][0].half() for x in bags],
        "truth": [torch.as_tensor(np.asarray(t, dtype=np.int8)) for t in truth],
        "positive": [],
    }


def _narrow(model: MILModel, x: Tensor) -> tuple[MILModel, Tensor]:
    with torch.no_grad():
        found, bags = project(model, x, preset_composite(Network(model), "default"))
    if found is model:
        raise SystemExit(f"{type(model).__name__}: its rule needs the first layer; it cannot be packed")
    return found, bags


def pack_colon(features: Path, folder: Path, name: str, task: str) -> Iterator[Entry]:
    """Models of the colon benchmark, one for each fold, with the test images that hold evidence."""
    every = read_bags(features)
    for run in range(COLON_RUNS):
        training, test = parts(every, task, run)
        model = model_of(name, every[0].features.shape[1])
        state = torch.load(folder / f"{task}_{name}_{run}.pt", weights_only=True)
        model.load_state_dict({key: value.float() for key, value in state.items()})
        model.eval().background = background_of([bag.features.numpy() for bag in training])
        with torch.no_grad():
            chances = [float(model(b.features.unsqueeze(0)).softmax(1)[0, 1]) for b in test]
        auroc = float(roc_auc_score([bag.label(task) for bag in test], chances))
        told = [b for b in test if len(b.features) > 4 and len(set(b.evidence(task).tolist())) > 1]
        about = {"model": name, "task": task, "repetition": run, "auroc": auroc}
        bags = [bag.features for bag in told]
        params = {"n_classes": 2, **COLON_MODELS[name]}
        yield {**about, **_entry(model, params, bags, [bag.evidence(task) for bag in told])}


def read(path: Path) -> list[Entry]:
    """The entries of a file, as they were kept."""
    found: list[Entry] = torch.load(path, weights_only=True)
    return found


def opened(entry: Entry, device: str) -> Packed:
    """The model and its bags."""
    model = create_model(entry["model"], **entry["params"])
    model.load_state_dict(entry["state"])
    mean, patches, n = entry["background"]
    model.background = Background(mean.numpy(), patches.float().numpy(), n)
    return Packed(
        {key: entry[key] for key in ("model", "task", "repetition", "auroc")},
        model.eval().to(device),
        [x.float().to(device) for x in entry["bags"]],
        [t.numpy().astype(np.int64) for t in entry["truth"]],
        [(x.float().to(device), codes.numpy()) for x, codes in entry["positive"]],
    )


def main() -> None:
    asked = _arguments()
    found: list[Entry] = []
    for column in asked.columns.split(","):
        model, task = column.split()
        if task in COLON_TASKS:
            found += pack_colon(asked.colon, asked.colon_models, model, task)
            continue
        several = stored(
            task, model, folder=asked.models, data=str(asked.data),
            repetitions=asked.repetitions, first=asked.first,
        )  # fmt: skip
        found += [pack(one, model, task) for one in several]
    torch.save(found, asked.out)
    print(len(found), "models", asked.out.stat().st_size, "bytes")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("data", "models", "colon", "colon-models", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--columns", default=",".join(COLUMNS), help="a model and a task each, with commas")
    parser.add_argument("--first", type=int, default=FIRST, help="repetition of Table 1")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
