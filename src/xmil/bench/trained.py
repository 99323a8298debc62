"""The trained models of a run: trained on first use, and read from `models/*.safetensors` after that.

All repetitions of one of our models on digits are in one file, a stack; other models have a file each.
Suites share the files, which therefore belong to the whole run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xmil.bench.models import ModelEntry, OurModel, TrainedModel
from xmil.bench.problems import Problem, checksum
from xmil.bench.protocol import BACKGROUND_BAGS, SEEDS_APART, Configuration, DigitProblem, train_stacked
from xmil.bench.training import Fitted, Stacked, learn
from xmil.bench.units import file_name, plain
from xmil.core.background import background_of
from xmil.core.durable import write_bytes
from xmil.core.errors import FileError, refuse_damage
from xmil.core.ledger import writing_for
from xmil.core.text import parse_json
from xmil.models import MILModel
from xmil.storage import WHOLE_RUN, make_folder

STACK_KEY, WEIGHTS_KEY = "xmil-toy", "xmil-bench"  # for the settings in a file's metadata
FLAT, BUFFER = "parameters", "buffer|"
Say = Callable[[str, int, int], None]  # current work, steps done, total steps (0: unknown)


def ignore(text: str, done: int = 0, total: int = 0) -> None:
    """Ignore a run's progress."""
    del text, done, total


@dataclass(frozen=True)
class Trained:
    """The models of one problem and entry, trained on first use and saved in the run's folder `out`.

    All repetitions of our models on digits train at once, others one by one.
    """

    problem: Problem
    entry: ModelEntry
    out: Path
    seed: int
    changes: Mapping[str, Any]
    device: str = "cpu"
    say: Say = ignore

    def seed_of(self, repetition: int) -> int:
        """The seed of a repetition's weights."""
        return self.seed * SEEDS_APART + repetition

    def model(self, repetition: int) -> nn.Module:
        """The model of a repetition, in eval mode on the device; ours with a background of instances."""
        if isinstance(self.problem, DigitProblem) and isinstance(self.entry, OurModel):
            model = self.stack.models.model(repetition)
        else:
            model = self._train_one(repetition)
        if isinstance(model, MILModel) and not isinstance(self.entry, TrainedModel):
            bags = [
                x for block in self.problem.blocks("train", repetition) for x in block.x[:BACKGROUND_BAGS]
            ]
            model.background = background_of([torch.cat(bags[:BACKGROUND_BAGS]).numpy()])
        return model

    @cached_property
    def stack(self) -> Fitted:
        """All repetitions of one of our models, loaded or trained."""
        assert isinstance(self.problem, DigitProblem) and isinstance(self.entry, OurModel)  # noqa: S101, PT018
        configuration = self.problem.configuration(self.entry.setup, self.device)
        fitted = load_stack(self.out, configuration)
        if fitted is None:
            text = f"training {self.entry.title} on {self.problem.title}"
            epochs = configuration.protocol.training_of(configuration.setup).epochs
            self.say(text, 0, epochs)
            fitted = train_stacked(configuration, on_epoch=lambda epoch, _: self.say(text, epoch, epochs))
            save_stack(self.out, configuration, fitted)
        return fitted

    def _train_one(self, repetition: int) -> nn.Module:
        problem, entry, seed = self.problem, self.entry, self.seed_of(repetition)
        model = entry.build(problem, seed).to(self.device)
        if isinstance(entry, TrainedModel):
            return model.eval()
        training = entry.training(problem, self.changes)
        names = (problem.name, entry.name, str(repetition))
        settings = {
            "problem": problem.settings(),
            "test": checksum(problem, repetition),
            "model": entry.digest,
            "training": vars(training),
            "seed": seed,
        }
        if load_weights(self.out, model, names, settings):
            return model.eval()
        self.say(f"training {entry.title} on {problem.title}, repetition {repetition + 1}", 0, 0)
        train, validation = (
            problem.blocks(split, repetition, self.device) for split in ("train", "validation")
        )
        model = learn(model, train, validation, training=training, seed=seed)
        save_weights(self.out, model, names, settings)
        return model


def load_stack(out: Path, configuration: Configuration) -> Fitted | None:
    """Load the trained models of a configuration; None if there are none with the same settings."""
    path = _model_file(out, configuration.name)
    if not path.is_file():
        return None
    header, tensors = read_stack(path, configuration.device)
    if header["settings"] != plain(configuration.settings()):
        return None
    fresh = configuration.fresh_models()
    buffers = {name: tensors[BUFFER + name] for name in fresh.buffers}
    return Fitted(Stacked(fresh.template, tensors[FLAT], buffers), **header["fitted"])


def save_stack(out: Path, configuration: Configuration, fitted: Fitted) -> None:
    """Write the best checkpoints of a configuration atomically."""
    tensors = {BUFFER + name: value for name, value in fitted.models.buffers.items()}
    summary = {key: getattr(fitted, key) for key in ("best_epoch", "best_loss", "epochs")}
    header = json.dumps({"settings": configuration.settings(), "fitted": summary})
    _save_model(out, configuration.name, {**tensors, FLAT: fitted.models.flat}, {STACK_KEY: header})


def load_weights(out: Path, model: nn.Module, names: Sequence[str], settings: dict[str, Any]) -> bool:
    """Load the weights under these names into a model; False if there are none with these settings."""
    path = _model_file(out, file_name(*names))
    if not path.is_file():
        return False
    stored, tensors = read_stack(path, key=WEIGHTS_KEY)
    if stored != plain(settings):
        return False
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise FileError(f"{path}: not this model's weights ({error}); delete it.") from None
    return True


def save_weights(out: Path, model: nn.Module, names: Sequence[str], settings: dict[str, Any]) -> None:
    """Write a model's weights under these names atomically."""
    about = {WEIGHTS_KEY: json.dumps(plain(settings))}
    _save_model(out, file_name(*names), model.state_dict(), about)


def _model_file(out: Path, name: str) -> Path:
    return out / "models" / f"{name}.safetensors"


def _save_model(out: Path, name: str, tensors: Mapping[str, Tensor], about: dict[str, str]) -> None:
    path = _model_file(out, name)
    make_folder(path.parent)
    with writing_for(WHOLE_RUN):
        save_tensors(path, tensors, about)


def read_stack(
    path: Path, device: str = "cpu", *, key: str = STACK_KEY
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file of models: its settings (for a stack, also the course of training) and tensors."""
    from safetensors import SafetensorError, safe_open

    damage = refuse_damage(
        f"{path}: not a file of models", way="delete it to train again", kinds=(SafetensorError,)
    )
    with damage, safe_open(path, framework="pt", device=device) as file:
        header: dict[str, Any] = parse_json(file.metadata()[key])
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors atomically."""
    from safetensors.torch import save

    copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    write_bytes(path, save(copies, about))  # bytes first: a full disk then raises a plain OSError
