"""The runner: train what is not trained, measure what is not measured, keep every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmil.bench.contestants import ModelEntry
from xmil.bench.entries import Exam, MethodEntry
from xmil.bench.faithfulness_batch import probabilities
from xmil.bench.folder import Folder, Unit
from xmil.bench.foreign_scores import export_exam
from xmil.bench.problems import Problem, checksum
from xmil.bench.suites import Plan, Suite
from xmil.bench.trained import Trained
from xmil.core.provenance import provenance
from xmil.evaluate.evidence_batch import auroc

Say = Callable[[str], None]


@dataclass(frozen=True)
class Referee:
    """One run: the plan, the entries, the folder it fills, and when to stop for now."""

    plan: Plan
    methods: Sequence[MethodEntry]
    models: Sequence[ModelEntry]
    folder: Folder
    device: str = "cpu"
    say: Say = lambda _: None
    until: float | None = None  # by time.monotonic()

    def run(self, suite: Suite) -> bool:
        """Measure every problem and model of a suite; False where time ran out before the end."""
        for problem in suite.problems(self.plan):
            for entry in self.models:
                if not self._column(suite, problem, entry):
                    return False
        return True

    def _column(self, suite: Suite, problem: Problem, entry: ModelEntry) -> bool:
        """One problem and model: all repetitions, each kept as soon as it is done."""
        names = [measure.name for measure in suite.measures]
        unit = self.folder.unit(self._settings(suite, problem, entry), names)
        trained = self._trained(problem, entry)
        for r in range(self._repetitions(problem)):
            tried = unit.facts.get(r, {}).get("tried", {})
            missing = [m for m in self.methods if tried.get(m.name) != m.digest]
            if not missing:
                continue
            if self.until is not None and time.monotonic() > self.until:
                return False
            self.say(f"{suite.name}: {problem.title}, {entry.title}, repetition {r + 1}")
            self._measure(suite, trained, unit, r, missing)
            # some may not go with the model
            unit.facts[r]["tried"] = {**tried, **{m.name: m.digest for m in missing}}
            unit.save()
        return True

    def _measure(
        self, suite: Suite, trained: Trained, unit: Unit, repetition: int, methods: Sequence[MethodEntry]
    ) -> None:
        exam = self._exam(trained, repetition)
        facts = {"seed": exam.seed, "checksum": checksum(trained.problem, repetition), **_learned(exam)}
        exam = suite.bags(exam, self.plan)
        names = [name for block in exam.blocks for name in block.names]
        unit.check(repetition, {**facts, "bags": names, "forward": _forward_seconds(exam)})
        if not names:
            return
        for entry in methods:
            if entry.supports(exam.model):
                scores, seconds = _timed(exam, entry)
                about = {"digest": entry.digest, "seconds": seconds, "measured": _where(self.device)}
                unit.add(repetition, entry.name, suite.grade(exam, entry, scores), about)

    def export(self, suite: Suite, folder: Path) -> list[Path]:
        """Write the bags and the weights of every exam of a suite, for programs that are not Python's."""
        found = []
        for problem in suite.problems(self.plan):
            for entry in self.models:
                trained = self._trained(problem, entry)
                for r in range(self._repetitions(problem)):
                    exam = suite.bags(self._exam(trained, r), self.plan)
                    found.append(export_exam(exam, folder))
        return found

    def _exam(self, trained: Trained, repetition: int) -> Exam:
        problem, seed = trained.problem, trained.seed_of(repetition)
        blocks = tuple(problem.blocks("test", repetition, self.device))
        model = trained.model(repetition)
        return Exam(problem.name, trained.entry.name, repetition, seed, problem.n_classes, model, blocks)

    def _trained(self, problem: Problem, entry: ModelEntry) -> Trained:
        p = self.plan.protocol
        return Trained(problem, entry, self.folder, p.seed, self._changes(problem), self.device, self.say)

    def _changes(self, problem: Problem) -> dict[str, Any]:
        digits = problem.family == "digits"
        return dict(self.plan.protocol.training if digits else self.plan.training)

    def _repetitions(self, problem: Problem) -> int:
        if problem.family == "digits":
            return self.plan.protocol.repetitions
        splits = getattr(problem, "splits", None)  # a published division has no repetitions
        return self.plan.fold_runs if splits is None else min(self.plan.fold_runs, len(splits))

    def _settings(self, suite: Suite, problem: Problem, entry: ModelEntry) -> dict[str, Any]:
        """What two calls must share to fill one file."""
        return {
            "suite": suite.name,
            "problem": problem.settings(),
            "model": {"name": entry.name, "digest": entry.digest},
            "training": vars(entry.training(problem, self._changes(problem))),
            "bags": self.plan.curve_bags if suite.name == "faithfulness" else None,
        }


@cache
def _where(device: str) -> dict[str, Any]:
    """Versions, machine and commit of what is measured in this call."""
    on_gpu = torch.device(device).type == "cuda"
    return {**provenance(), "device": torch.cuda.get_device_name(device) if on_gpu else device}


def _learned(exam: Exam) -> dict[str, float]:
    """The area under the ROC curve on the test bags, one class against the rest, averaged over classes."""
    p = torch.from_numpy(np.concatenate([probabilities(exam.model, block.x) for block in exam.blocks]))
    labels = torch.from_numpy(np.concatenate([block.labels for block in exam.blocks]))
    classes = torch.arange(p.shape[1]).unsqueeze(1)
    return {"auroc": float(auroc(labels == classes, p.T).nanmean())}


def _timed(exam: Exam, entry: MethodEntry) -> tuple[list[Tensor], float]:
    """Scores of every block, and the seconds they took."""
    started = time.perf_counter()
    scores = [entry.scores(exam, block) for block in exam.blocks]
    _wait(exam)
    return scores, time.perf_counter() - started


def _forward_seconds(exam: Exam) -> float:
    """The time of a forward pass over the bags, the shorter of two."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        for block in exam.blocks:
            probabilities(exam.model, block.x)
        _wait(exam)
        times.append(time.perf_counter() - started)
    return min(times)


def _wait(exam: Exam) -> None:
    if exam.blocks and exam.blocks[0].x.is_cuda:
        torch.cuda.synchronize()
