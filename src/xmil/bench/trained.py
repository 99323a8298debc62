"""Trained models of a problem: all repetitions of ours on digits at once, others one by one; kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from xmil.bench.contestants import ModelEntry, OurModel, TrainedModel
from xmil.bench.digits import DigitProblem
from xmil.bench.folder import Folder, plain
from xmil.bench.learning import learn
from xmil.bench.problems import Problem, checksum
from xmil.core.background import Background, background_of
from xmil.core.errors import FileError
from xmil.core.storage import write_atomically
from xmil.models import MILModel
from xmil.toy.benchmark import BACKGROUND_BAGS, SEEDS_APART
from xmil.toy.benchmark import train as train_stacked
from xmil.toy.stacked import Stacked
from xmil.toy.store import Store

KEY = "xmil-bench"


@dataclass(frozen=True)
class Trained:
    """The models of one problem and entry, trained when they are first asked for."""

    problem: Problem
    entry: ModelEntry
    folder: Folder
    seed: int
    changes: Mapping[str, Any]
    device: str
    say: Callable[[str], None]

    def seed_of(self, repetition: int) -> int:
        """The seed of a repetition's weights."""
        return self.seed * SEEDS_APART + repetition

    def model(self, repetition: int) -> nn.Module:
        """The model of a repetition, in eval mode on the device; ours know their training instances' mean."""
        if isinstance(self.problem, DigitProblem) and isinstance(self.entry, OurModel):
            model = self._stack.model(repetition)
        else:
            model = self._alone(repetition)
        if isinstance(model, MILModel) and not isinstance(self.entry, TrainedModel):
            model.background = self._background(repetition)
        return model

    def _background(self, repetition: int) -> Background:
        blocks = self.problem.blocks("train", repetition)
        bags = [x for block in blocks for x in block.x[:BACKGROUND_BAGS].numpy()]
        return background_of([np.concatenate(bags[:BACKGROUND_BAGS])])

    @cached_property
    def _stack(self) -> Stacked:
        """All repetitions of one of our models, from the folder or trained now."""
        assert isinstance(self.problem, DigitProblem) and isinstance(self.entry, OurModel)  # noqa: S101, PT018
        configuration = self.problem.configuration(self.entry.setup, self.device)
        store = Store(self.folder.path)
        fitted = store.models(configuration)
        if fitted is None:
            self.say(f"training {self.entry.title} on {self.problem.title}")
            fitted = train_stacked(configuration)
            store.save_models(configuration, fitted)
        return fitted.models

    def _alone(self, repetition: int) -> nn.Module:
        seed = self.seed_of(repetition)
        if isinstance(self.entry, TrainedModel):
            return self.entry.build(self.problem, seed).to(self.device).eval()
        model = self.entry.build(self.problem, seed).to(self.device)
        path = self.folder.model_file(self.problem.name, self.entry.name, str(repetition))
        header = plain(self._settings(repetition))
        if path.is_file() and _restored(model, path, header):
            return model.eval()
        self.say(f"training {self.entry.title} on {self.problem.title}, repetition {repetition + 1}")
        train, validation = (
            self.problem.blocks(split, repetition, self.device) for split in ("train", "validation")
        )
        training = self.entry.training(self.problem, self.changes)
        model = learn(model, train, validation, training=training, seed=seed)
        _keep(model, path, header)
        return model

    def _settings(self, repetition: int) -> dict[str, Any]:
        return {
            "problem": self.problem.settings(),
            "test": checksum(self.problem, repetition),
            "model": self.entry.digest,
            "training": vars(self.entry.training(self.problem, self.changes)),
            "seed": self.seed_of(repetition),
        }


def _keep(model: nn.Module, path: Path, header: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    state = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    text = {KEY: json.dumps(header)}
    write_atomically(path, lambda temporary: save_file(state, temporary, text))


def _restored(model: nn.Module, path: Path, header: dict[str, Any]) -> bool:
    """Load the weights of a file, where it was trained with the same settings."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            same: bool = json.loads((file.metadata() or {}).get(KEY, "null")) == header
            if same:
                model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise FileError(f"{path}: not a model of the benchmark ({error}); delete it.") from None
    return same
