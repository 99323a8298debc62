"""The referee: train missing models, measure missing rows, save every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from xmil.bench.entries import Exam, MethodEntry, export_exam
from xmil.bench.folder import Folder, Unit
from xmil.bench.measures import bag_auroc, probabilities
from xmil.bench.models import ModelEntry, OurModel, TrainedModel
from xmil.bench.problems import Block, Problem, checksum
from xmil.bench.protocol import BACKGROUND_BAGS, SEEDS_APART, DigitProblem, train_stacked
from xmil.bench.suites import (
    Plan,
    Suite,
    check_tasks,
    entries_of,
    models_of,
    plan_of,
    settings_of,
    suites_of,
)
from xmil.bench.training import Fitted, learn
from xmil.core.background import background_of
from xmil.core.errors import InputError, name_parameters
from xmil.models import MILModel
from xmil.runs.requests import BenchRequest
from xmil.storage import RUN, RunFolder, check_folder, provenance, read_run, start_manifest

EXPORT = "bench --export"  # the kind of a folder of bags and models for other programs


def ignore(text: str, done: int = 0, total: int = 0) -> None:
    """Ignore a run's progress."""
    del text, done, total


T = TypeVar("T")
Say = Callable[[str, int, int], None]  # current work, steps done, total steps (0: unknown)


def measure(request: BenchRequest, out: Path, say: Say = ignore) -> tuple[bool, list[str]]:
    """Fill the folder; return whether it is complete, and why suites were left out."""
    check_tasks(request)
    with _folder(out, request).open({}):
        until = None if request.minutes is None else time.monotonic() + 60 * request.minutes
        models, plan = models_of(request), plan_of(request)
        suites, left_out = suites_of(request), []
        for suite in suites:
            referee = Referee(
                plan, entries_of(request, suite), models, Folder(out), request.device, say=say, until=until
            )
            problems = suite.problems(plan)
            if not problems:
                left_out.append(f"{suite.name}: {suite.absent}")
            elif not referee.run(suite, problems):
                return False, left_out
        if len(left_out) == len(suites):
            raise InputError(f"There is nothing to measure. {' '.join(left_out)}")
        return True, left_out


def export(request: BenchRequest, out: Path, folder: Path, say: Say = ignore) -> list[Path]:
    """Write the bags and models of the suites for other programs; train missing models."""
    models, plan, run = models_of(request), plan_of(request), _folder(out, request)
    try:
        check_folder(folder, EXPORT)
    except InputError as error:
        message = name_parameters(str(error), lambda _, value: f"`export={value}`")
        raise InputError(message, parameter="export") from None
    with RunFolder(folder, EXPORT, settings_of(request), mixed=True).open({}), run.claim():
        if not (out / RUN).is_file():
            start_manifest(out, run.kind)
            run.write({})
        return [
            path
            for suite in suites_of(request)
            for path in Referee(plan, (), models, Folder(out), request.device, say=say).export(suite, folder)
        ]


def _folder(out: Path, request: BenchRequest) -> RunFolder:
    """The folder of a benchmark: each unit has its own settings, run.json the last request."""
    return RunFolder(out, "bench", settings_of(request), mixed=True)


def read_settings(out: Path) -> dict[str, Any]:
    """Read the settings of a folder's last call; empty if there are none."""
    try:
        return dict((read_run(out) or {}).get("settings", {}))
    except InputError:
        return {}


@dataclass(frozen=True)
class Referee:
    """One run: the plan, the entries, the folder, and a time limit.

    Columns with other settings are an error, or measured again with `replace`.
    """

    plan: Plan
    methods: Sequence[MethodEntry]
    models: Sequence[ModelEntry]
    folder: Folder
    device: str = "cpu"
    say: Say = ignore
    until: float | None = None  # by time.monotonic()
    replace: bool = False

    def run(self, suite: Suite, problems: Sequence[Problem] | None = None) -> bool:
        """Measure every problem and model of a suite; False if time ran out before the end."""
        return all(self._measure_column(suite, trained) for trained in self._columns(suite, problems))

    def units(self, suite: Suite, problems: Sequence[Problem] | None = None) -> list[Unit]:
        """Read the units of a suite, one per problem and model."""
        return [self._unit(suite, trained) for trained in self._columns(suite, problems)]

    def export(self, suite: Suite, folder: Path) -> list[Path]:
        """Write the bags and the weights of every exam of a suite, for other programs."""
        return [
            export_exam(suite.bags(self._exam(trained, r), self.plan), folder)
            for trained in self._columns(suite)
            for r in range(self._repetitions(trained.problem))
        ]

    def _columns(self, suite: Suite, problems: Sequence[Problem] | None = None) -> Iterator[Trained]:
        """Yield every problem with every model."""
        seed = self.plan.protocol.seed
        for problem in suite.problems(self.plan) if problems is None else problems:
            changes = self.plan.protocol.training if problem.family == "digits" else self.plan.training
            for entry in self.models:
                yield Trained(problem, entry, self.folder, seed, changes, self.device, self.say)

    def _unit(self, suite: Suite, trained: Trained) -> Unit:
        """Open the unit of a column; its settings must match those of earlier calls."""
        problem, entry = trained.problem, trained.entry
        settings = {
            "suite": suite.name,
            "problem": problem.settings(),
            "model": {"name": entry.name, "digest": entry.digest},
            "training": vars(entry.training(problem, trained.changes)),
            "bags": self.plan.curve_bags if suite.name == "faithfulness" else None,
        }
        return self.folder.unit(settings, [m.name for m in suite.measures], replace=self.replace)

    def _measure_column(self, suite: Suite, trained: Trained) -> bool:
        """Measure all repetitions of one problem and model, and save each at once."""
        unit, repetitions = self._unit(suite, trained), self._repetitions(trained.problem)
        title = f"{suite.name}: {trained.problem.title}, {trained.entry.title}"
        for r in range(repetitions):
            tried = unit.facts.get(r, {}).get("tried", {})  # includes methods that do not support the model
            missing = [m for m in self.methods if tried.get(m.name) != m.digest]
            if not missing:
                continue
            if self.until is not None and time.monotonic() > self.until:
                return False
            self.say(f"{title}, repetition {r + 1}", r, repetitions)
            self._measure(suite, trained, unit, r, missing)
            unit.facts[r]["tried"] = {**tried, **{m.name: m.digest for m in missing}}
            unit.save()
        return True

    def _measure(
        self, suite: Suite, trained: Trained, unit: Unit, repetition: int, methods: Sequence[MethodEntry]
    ) -> None:
        exam = self._exam(trained, repetition)
        chances = np.concatenate([probabilities(exam.model, block.x) for block in exam.blocks])
        labels = np.concatenate([block.labels for block in exam.blocks])
        exam = suite.bags(exam, self.plan)
        facts = {
            "seed": exam.seed,
            "checksum": checksum(trained.problem, repetition),
            "auroc": bag_auroc(chances, labels),
            "bags": [name for block in exam.blocks for name in block.names],
            "cases": [case for block in exam.blocks for case in block.cases or ()] or None,
            "forward": min(_time(exam, lambda b: probabilities(exam.model, b.x))[1] for _ in range(2)),
        }
        unit.check(repetition, facts)
        for entry in methods:
            if facts["bags"] and entry.supports(exam.model):
                scores, seconds = _time(exam, partial(entry.scores, exam))
                about = {"digest": entry.digest, "seconds": seconds, "measured": _machine(self.device)}
                unit.add(repetition, entry.name, suite.grade(exam, entry, scores), about)

    def _exam(self, trained: Trained, repetition: int) -> Exam:
        problem, seed = trained.problem, trained.seed_of(repetition)
        blocks = tuple(problem.blocks("test", repetition, self.device))
        model = trained.model(repetition)
        return Exam(problem.name, trained.entry.name, repetition, seed, problem.n_classes, model, blocks)

    def _repetitions(self, problem: Problem) -> int:
        if problem.family == "digits":
            return self.plan.protocol.repetitions
        return min(self.plan.fold_runs, problem.repetitions or self.plan.fold_runs)


@dataclass(frozen=True)
class Trained:
    """The models of one problem and entry, trained on first use and saved in the folder.

    All repetitions of our models on digits train at once, others one by one.
    """

    problem: Problem
    entry: ModelEntry
    folder: Folder
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
        fitted = self.folder.stack(configuration)
        if fitted is None:
            text = f"training {self.entry.title} on {self.problem.title}"
            epochs = configuration.protocol.training_of(configuration.setup).epochs
            self.say(text, 0, epochs)
            fitted = train_stacked(configuration, on_epoch=lambda epoch, _: self.say(text, epoch, epochs))
            self.folder.save_stack(configuration, fitted)
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
        if self.folder.load_weights(model, names, settings):
            return model.eval()
        self.say(f"training {entry.title} on {problem.title}, repetition {repetition + 1}", 0, 0)
        train, validation = (
            problem.blocks(split, repetition, self.device) for split in ("train", "validation")
        )
        model = learn(model, train, validation, training=training, seed=seed)
        self.folder.save_weights(model, names, settings)
        return model


@cache
def _machine(device: str) -> dict[str, Any]:
    """Versions, machine and commit of this call."""
    on_gpu = torch.device(device).type == "cuda"
    return {**provenance(), "device": torch.cuda.get_device_name(device) if on_gpu else device}


def _time(exam: Exam, work: Callable[[Block], T]) -> tuple[list[T], float]:
    """Apply `work` to every block; return the results and the seconds."""
    started = time.perf_counter()
    results = [work(block) for block in exam.blocks]
    if exam.blocks and exam.blocks[0].x.is_cuda:
        torch.cuda.synchronize()
    return results, time.perf_counter() - started
