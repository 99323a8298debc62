"""Models of the benchmark: ours in the sizes of each suite, a user's builder, a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xmil.bench.problems import Problem
from xmil.bench.training import QUICK_TRAINING, Training
from xmil.core.durable import file_digest
from xmil.core.errors import FileError, InputError, absent, check_names
from xmil.core.registry import Registry, load_function, load_module, source_file
from xmil.models import create_model, load_model

PAPER_MODELS = ("attnmil", "transmil", "addmil")
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".safetensors")
SETTINGS = "TRAINING"  # optional settings in a builder's file


@dataclass(frozen=True)
class Setup:
    """A model for bags of digits: its parameters and training."""

    name: str
    title: str
    params: Mapping[str, Any]
    training: Training


_SLOW = Training(optimizer="sgd", epochs=1000, patience=100)
SETUPS: Registry[Setup] = Registry("model of the benchmark", group="xmil.toy_models")
for _setup in (
    Setup("attnmil", "AttnMIL", {"dim": 20, "attention_dim": 20, "n_out_layers": 1}, _SLOW),
    Setup("transmil", "TransMIL", {"dim": 20}, Training(optimizer="sgd", epochs=200, patience=40)),
    Setup("addmil", "AddMIL", {"hidden": 20}, Training(optimizer="adam", epochs=1000, patience=100)),
    Setup(
        "mambamil",
        "MambaMIL",
        {"dim": 20, "attention_dim": 20},
        Training(optimizer="adam", lr=3e-3, epochs=200, patience=40),
    ),
):
    SETUPS.add(_setup.name, _setup)
MORE_SETUPS = (  # as wide as the paper's models
    Setup("meanpool", "Mean pooling", {"dim": 20}, _SLOW),
    Setup("maxpool", "Max pooling", {"dim": 20}, _SLOW),
    Setup("clam_sb", "CLAM-SB", {"dim": 20, "attention_dim": 20}, _SLOW),
    Setup("clam_mb", "CLAM-MB", {"dim": 20, "attention_dim": 20}, _SLOW),
    Setup("dsmil", "DSMIL", {"query_dim": 20}, _SLOW),
)
TISSUE_TRAINING = Training(optimizer="adam", lr=1e-3, batch=8, epochs=60, patience=12, warmup=5)
TISSUE_PARAMS: dict[str, dict[str, Any]] = {
    "attnmil": {"dim": 64, "attention_dim": 32, "dropout": 0.2},
    "transmil": {"dim": 32, "heads": 4, "landmarks": 16, "dropout": 0.2},
    "addmil": {"hidden": 64, "dropout": 0.2},
    "meanpool": {"dim": 64, "dropout": 0.2},
    "maxpool": {"dim": 64, "dropout": 0.2},
    "clam_sb": {"dim": 64, "attention_dim": 32, "dropout": 0.2},
    "clam_mb": {"dim": 64, "attention_dim": 32, "dropout": 0.2},
    "dsmil": {"query_dim": 32, "dropout": 0.2},
}


def all_setups() -> dict[str, Setup]:
    """All models of the suites, with their sizes for bags of digits."""
    return {name: SETUPS[name] for name in SETUPS} | {setup.name: setup for setup in MORE_SETUPS}


@dataclass(frozen=True)
class ModelEntry:
    """A model of the benchmark; `digest` changes with the model."""

    name: str
    title: str
    digest: str

    def build(self, problem: Problem, seed: int) -> nn.Module:
        """Build the model for the problem, in eval mode."""
        raise NotImplementedError

    def training(self, problem: Problem, changes: Mapping[str, Any]) -> Training:
        """Its training, with the protocol's changes; the defaults for a model without training."""
        del problem, changes
        return Training()


@dataclass(frozen=True)
class OurModel(ModelEntry):
    """A model of the package in the size of the problem's family."""

    setup: Setup

    def build(self, problem: Problem, seed: int) -> nn.Module:
        """Build a model for the problem, with fresh weights."""
        params = dict(self.setup.params) if problem.family == "digits" else TISSUE_PARAMS.get(self.name, {})
        return create_model(
            self.name, in_dim=problem.in_dim, n_classes=problem.n_classes, seed=seed, **params
        )

    def training(self, problem: Problem, changes: Mapping[str, Any]) -> Training:
        """The paper's training on digits, a common one on tissue, with the protocol's changes."""
        base = self.setup.training if problem.family == "digits" else TISSUE_TRAINING
        return replace(base, **changes)


@dataclass(frozen=True)
class OwnModel(ModelEntry):
    """A user's builder `(in_dim, n_classes) -> nn.Module`; its file may have a dict `TRAINING`."""

    builder: Callable[[int, int], nn.Module]
    settings: Mapping[str, Any]

    @classmethod
    def load(cls, source: str) -> OwnModel:
        """Load the builder `file.py:function`, with the training settings in its file."""
        builder = load_function(source, kind="model")
        module, _, function = source.rpartition(":")
        settings = getattr(load_module(module, kind="model"), SETTINGS, {})
        check_names(f"setting in {SETTINGS} of {source}", settings, [f.name for f in fields(Training)])
        name = f"{Path(module).stem}:{function}"
        return cls(name, name, source_digest(source), builder, dict(settings))

    def build(self, problem: Problem, seed: int) -> nn.Module:
        """Build a model for the problem, with weights from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = self.builder(problem.in_dim, problem.n_classes)
        if not isinstance(model, nn.Module):
            raise InputError(
                f"The builder {self.name} must return a torch.nn.Module. Got {type(model).__name__} instead."
            )
        return model.eval()

    def training(self, problem: Problem, changes: Mapping[str, Any]) -> Training:
        """Quick training with the file's settings; the protocol only changes epochs and patience."""
        base = Training(**QUICK_TRAINING) if problem.family == "digits" else TISSUE_TRAINING
        shorter = {key: value for key, value in changes.items() if key in ("epochs", "patience")}
        return replace(base, **{**shorter, **self.settings})


@dataclass(frozen=True)
class TrainedModel(ModelEntry):
    """A trained checkpoint, for problems with the features it was trained on."""

    path: Path

    def build(self, problem: Problem, seed: int) -> nn.Module:
        """Load the model in the file."""
        del seed
        model = load_model(self.path)
        if (model.in_dim, model.n_classes) != (problem.in_dim, problem.n_classes):
            raise InputError(
                f"{self.path}: maps features of width {model.in_dim} to {model.n_classes} outputs, but "
                f"{problem.title} has {problem.in_dim} and {problem.n_classes}; choose its task too."
            )
        return model


def model_entry(text: str) -> ModelEntry:
    """Find the entry that a text names: one of ours, a checkpoint, or `file.py:builder`."""
    path = Path(text)
    if path.suffix in CHECKPOINTS:
        if not path.is_file():
            raise FileError(absent(text))
        return TrainedModel(path.stem, path.stem, file_digest(path), path)
    if ":" in text:
        return OwnModel.load(text)
    setups = all_setups()
    check_names("model of the benchmark", [text], [*setups, "file.py:builder", "a checkpoint"])
    return OurModel(text, setups[text].title, text, setups[text])


def source_digest(source: str) -> str:
    """SHA-256 of the file of `file.py:function`; empty if it cannot be located."""
    path = source_file(source)
    return "" if path is None else file_digest(path)
