"""The referee: train missing models, measure missing rows, save every step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product, takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from xmil.bench.entries import Exam, MethodEntry, export_exam
from xmil.bench.measures import bag_auroc, probabilities
from xmil.bench.models import ModelEntry
from xmil.bench.problems import Block, Problem, checksum
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
from xmil.bench.trained import Say, Trained, ignore
from xmil.bench.units import UNITS, Unit, file_name, open_unit
from xmil.core.errors import InputError, name_parameters
from xmil.execute import Step, Tally, execute, work_in_turn
from xmil.runs.requests import BenchRequest
from xmil.storage import Item, Record, check_folder, open_folder, provenance, read_run

KIND, EXPORT = "bench", "bench --export"  # of a folder of measurements; of bags and models for other programs
T = TypeVar("T")


def measure(request: BenchRequest, out: Path, say: Say = ignore) -> tuple[bool, list[str]]:
    """Fill the folder; return whether it is complete, and why suites were left out."""
    check_tasks(request)
    until = math.inf if request.minutes is None else time.monotonic() + 60 * request.minutes
    models, plan = models_of(request), plan_of(request)
    suites, left_out = suites_of(request), []
    for suite in suites:
        methods, problems = entries_of(request, suite), suite.problems(plan)
        contests = make_contests(
            suite, problems, plan, methods, models, out=out, device=request.device, say=say
        )
        if not contests:
            left_out.append(f"{suite.name}: {suite.absent}")
        elif not measure_contests(contests, out, settings_of(request), until=until):
            return False, left_out
    if len(left_out) == len(suites):
        raise InputError(f"There is nothing to measure. {' '.join(left_out)}")
    return True, left_out


def measure_contests(
    contests: Sequence[Contest],
    out: Path,
    settings: Mapping[str, Any],
    *,
    kind: str = KIND,
    about: Mapping[str, Any] | None = None,
    until: float = math.inf,
    replace: bool = False,
    finish: Callable[[Tally], Mapping[str, Any]] = lambda _: {},
) -> bool:
    """Measure what the folder lacks; False if time, by time.monotonic(), ran out before the end.

    Columns with other settings are an error, or measured again with `replace`.
    """
    work = partial(measure_contest, until=until, replace=replace)
    step = Step(
        kind,
        [contest.item() for contest in contests],
        settings,
        about=about or {},
        compared=False,  # each contest has its own settings, run.json those of the last request
        of_slides=False,
        schedule=lambda items: work_in_turn(takewhile(lambda _: time.monotonic() <= until, items), work),
        finish=finish,
    )
    records = execute(step, out).records
    return all(item.key in records and item.is_done(records[item.key]) for item in step.items)


def measure_contest(item: Item[Contest], *, until: float, replace: bool) -> Record:
    """Measure the methods that the unit lacks, and save it after each repetition."""
    contest, measures = item.what, [m.name for m in item.what.suite.measures]
    unit = open_unit(contest.path, dict(item.decides), measures, replace=replace)
    for r in range(contest.repetitions):
        tried = unit.tried(r)
        missing = [m for m in contest.methods if tried.get(m.name) != m.digest]
        if missing:
            contest.measure(unit, r, missing)
            unit.facts[r]["tried"] = {**tried, **{m.name: m.digest for m in missing}}
            unit.save()
            if time.monotonic() > until:
                break
    unit.save()  # also if nothing was missing, as in xmil 0.2, so that the ledger knows whose file it is
    return Record(parts=[_part(r, *pair) for r in unit.facts for pair in unit.tried(r).items()])


def _part(repetition: int, method: str, digest: str) -> str:
    return f"{repetition}: {method} {digest}"


def export(request: BenchRequest, out: Path, folder: Path, say: Say = ignore) -> list[Path]:
    """Write the bags and models of the suites for other programs; train missing models."""
    plan, models, settings = plan_of(request), models_of(request), settings_of(request)
    try:
        check_folder(folder, EXPORT)
    except InputError as error:
        message = name_parameters(str(error), lambda _, value: f"`export={value}`")
        raise InputError(message, parameter="export") from None
    with (
        open_folder(folder, EXPORT, settings, compared=False),
        open_folder(out, KIND, read_settings(out) or settings, compared=False),
    ):
        return [
            export_exam(suite.bags(contest.exam(r), plan), folder)
            for suite in suites_of(request)
            for contest in make_contests(
                suite, suite.problems(plan), plan, (), models, out=out, device=request.device, say=say
            )
            for r in range(contest.repetitions)
        ]


def read_settings(out: Path) -> dict[str, Any]:
    """Read the settings of a folder's last call; empty if there are none."""
    try:
        return dict((read_run(out) or {}).get("settings", {}))
    except InputError:
        return {}


def make_contests(
    suite: Suite,
    problems: Sequence[Problem],
    plan: Plan,
    methods: Sequence[MethodEntry],
    models: Sequence[ModelEntry],
    *,
    out: Path,
    device: str = "cpu",
    say: Say = ignore,
) -> list[Contest]:
    """Make the contests of every problem with every model."""
    contests = []
    for problem in problems:
        changes = plan.protocol.training if problem.family == "digits" else plan.training
        for entry in models:
            trained = Trained(problem, entry, out, plan.protocol.seed, changes, device, say)
            contests.append(Contest(suite, plan, trained, methods))
    return contests


@dataclass(frozen=True)
class Contest:
    """A problem of a suite and a model, which the methods explain in every repetition."""

    suite: Suite
    plan: Plan
    trained: Trained
    methods: Sequence[MethodEntry]

    @property
    def path(self) -> Path:
        """The file of its measurements."""
        names = self.suite.name, self.trained.problem.name, self.trained.entry.name
        return self.trained.out / UNITS / f"{file_name(*names)}.npz"

    @property
    def repetitions(self) -> int:
        """The number of repetitions."""
        problem = self.trained.problem
        if problem.family == "digits":
            return self.plan.protocol.repetitions
        return min(self.plan.fold_runs, problem.repetitions or self.plan.fold_runs)

    def item(self) -> Item[Contest]:
        """The contest as an item of a run: its file is done if it has every method in every repetition."""
        rows = product(range(self.repetitions), self.methods)
        parts = tuple(_part(r, m.name, m.digest) for r, m in rows)
        return Item(self.path.stem, self, decides=self.settings(), parts=parts)

    def settings(self) -> dict[str, Any]:
        """All settings that decide the measurements, besides the methods."""
        problem, entry = self.trained.problem, self.trained.entry
        return {
            "suite": self.suite.name,
            "problem": problem.settings(),
            "model": {"name": entry.name, "digest": entry.digest},
            "training": vars(entry.training(problem, self.trained.changes)),
            "bags": self.plan.curve_bags if self.suite.name == "faithfulness" else None,
        }

    def exam(self, repetition: int) -> Exam:
        """The model of a repetition with its test bags."""
        trained = self.trained
        problem, seed = trained.problem, trained.seed_of(repetition)
        blocks = tuple(problem.blocks("test", repetition, trained.device))
        model = trained.model(repetition)
        return Exam(problem.name, trained.entry.name, repetition, seed, problem.n_classes, model, blocks)

    def measure(self, unit: Unit, repetition: int, methods: Sequence[MethodEntry]) -> None:
        """Add rows of methods that support the model to a unit."""
        problem, title = self.trained.problem, f"{self.trained.problem.title}, {self.trained.entry.title}"
        text = f"{self.suite.name}: {title}, repetition {repetition + 1}"
        self.trained.say(text, repetition, self.repetitions)
        exam = self.exam(repetition)
        chances = np.concatenate([probabilities(exam.model, block.x) for block in exam.blocks])
        labels = np.concatenate([block.labels for block in exam.blocks])
        exam = self.suite.bags(exam, self.plan)
        facts = {
            "seed": exam.seed,
            "checksum": checksum(problem, repetition),
            "auroc": bag_auroc(chances, labels),
            "bags": [name for block in exam.blocks for name in block.names],
            "cases": [case for block in exam.blocks for case in block.cases or ()] or None,
            "forward": min(_time(exam, lambda b: probabilities(exam.model, b.x))[1] for _ in range(2)),
        }
        unit.check(repetition, facts)
        for entry in methods:
            if facts["bags"] and entry.supports(exam.model):
                scores, seconds = _time(exam, partial(entry.scores, exam))
                about = {
                    "digest": entry.digest,
                    "seconds": seconds,
                    "measured": _machine(self.trained.device),
                }
                unit.add(repetition, entry.name, self.suite.grade(exam, entry, scores), about)


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
