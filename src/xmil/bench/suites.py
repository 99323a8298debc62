"""The suites with their problems and measures, the size of a run, and what a request chooses of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from xmil.bench.digits import CONFOUNDERS, TASKS, DigitTask
from xmil.bench.entries import CONTROLS, ORACLE, Exam, MethodEntry, method_entry
from xmil.bench.histology import camelyon_problem, colon_problems
from xmil.bench.instances import load_instances
from xmil.bench.measures import (
    FAITHFULNESS,
    LESIONS,
    TRUTH,
    Grade,
    Measure,
    grade_faithfulness,
    grade_tissue,
    grade_truth,
    keep_correct,
)
from xmil.bench.models import PAPER_MODELS, ModelEntry, model_entry
from xmil.bench.problems import Problem
from xmil.bench.protocol import PAPER_TASKS, QUICK, DigitProblem, Protocol
from xmil.bench.tissue import STATISTICS, read_tissue, tissue_problems
from xmil.core.errors import check_names
from xmil.runs.requests import BenchRequest

LEARNED = 0.7  # least test AUROC of a model that counts
METHODS = (  # all but `milli` and `shapley`, which score bag by bag; a request can name them
    "random", "attention", "attention:unfolded", "single", "one_added", "one_removed", "combined", "logits",
    "gxi", "grad2", "ig", "lrp", "lrp:exact", "lrp:paper", "auto",
)  # fmt: skip
QUICK_MODELS = ("attnmil",)
ALL = "all"
DIGIT_TASKS = (
    "four_bags", "pos_neg", "pos_neg_count", "adjacent_pairs", "standard", "context_flip", "confounder",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The size of a run: protocol for digits, repetitions on tissue, bags for curves."""

    protocol: Protocol = field(default_factory=Protocol)
    data: str = "digits"
    encoder: str = "pixels"
    fold_runs: int = 10
    curve_bags: int = 200
    training: dict[str, Any] = field(default_factory=dict)  # changes on tissue
    tasks: tuple[str, ...] = ()
    tissue: dict[str, Any] = field(default_factory=dict)
    tissue_bags: tuple[int, int, int] = (400, 100, 200)

    def as_dict(self) -> dict[str, Any]:
        """The plan in plain types."""
        return {**vars(self), "protocol": self.protocol.as_dict(), "tasks": list(self.tasks)}


FULL = Plan()
QUICK_PLAN = Plan(
    protocol=replace(QUICK, sizes=(600, 150, 100)),
    fold_runs=2,
    curve_bags=24,
    training={"epochs": 20, "patience": 6},
    tissue_bags=(200, 60, 60),
)


@dataclass(frozen=True)
class Suite:
    """A suite: its problems under a plan, its measures (the first decides), and its bags."""

    name: str
    title: str
    make: Callable[[Plan], Sequence[Problem]]
    measures: tuple[Measure, ...]
    grade: Grade
    controls: tuple[str, ...] = (ORACLE, *CONTROLS)
    bags: Callable[[Exam, Plan], Exam] = lambda exam, _: exam
    absent: str = "it has none of the chosen tasks."

    def problems(self, plan: Plan) -> Sequence[Problem]:
        """Make the problems of the plan."""
        return [problem for problem in self.make(plan) if not plan.tasks or problem.name in plan.tasks]


def digit_problems(tasks: Sequence[DigitTask], plan: Plan) -> Sequence[Problem]:
    """Make problems of tasks on bags of digits."""
    instances = load_instances(plan.data, encoder=plan.encoder, seed=plan.protocol.seed)
    return [DigitProblem.of(task, instances, plan.protocol) for task in tasks]


def choose_tissue(
    plan: Plan,
    *,
    source: str = "",
    patient: str = "",
    positive: str = "",
    against: str = "",
    encoder: str = STATISTICS,
    features: str = "",
) -> Sequence[Problem]:
    """Make the tissue problems: from a source, else from colon nuclei if there are any in XMIL_DATA."""
    if source and (Path(source) / "slides.csv").is_file():
        return [camelyon_problem(Path(source))]
    if source:
        tissue, sizes = read_tissue(Path(source), patient=patient, encoder=encoder), plan.tissue_bags
        return tissue_problems(
            tissue, positive=positive, against=against, sizes=sizes, seed=plan.protocol.seed
        )
    colon = Path(os.environ.get("XMIL_DATA", "../shared/data")) / "colon"
    if not (colon / "nuclei.csv").is_file():
        return []
    cached, runs = Path(features) if features else None, max(10, plan.fold_runs)
    return colon_problems(colon, features=cached, encoder=encoder, runs=runs)


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "evidence",
            "Evidence: bags of digits whose evidence is known",
            partial(digit_problems, [TASKS[name] for name in DIGIT_TASKS]),
            TRUTH,
            grade_truth,
        ),
        Suite(
            "tissue",
            "Tissue: labelled nuclei, tissue classes, lesions",
            lambda plan: choose_tissue(plan, **plan.tissue),
            (*TRUTH, *LESIONS),
            grade_tissue,
            absent="no colon images in XMIL_DATA and no `tissue=`; see the documentation for downloads.",
        ),
        Suite(
            "confounder",
            "Confounders: what really decides is planted",
            partial(digit_problems, CONFOUNDERS),
            TRUTH,
            grade_truth,
        ),
        Suite(
            "faithfulness",
            "Faithfulness: what the model does when patches leave",
            partial(digit_problems, [TASKS[name] for name in PAPER_TASKS]),
            FAITHFULNESS,
            grade_faithfulness,
            controls=CONTROLS,
            bags=lambda exam, plan: keep_correct(exam, plan.curve_bags),
        ),
    )
}


def plan_of(request: BenchRequest) -> Plan:
    """The plan of a request's suites."""
    base = QUICK_PLAN if request.quick else FULL
    repetitions = base.protocol.repetitions if request.repetitions is None else request.repetitions
    return replace(
        base,
        protocol=replace(base.protocol, seed=request.seed, repetitions=repetitions),
        data=request.data,
        encoder=request.digit_encoder,
        tasks=request.task,
        fold_runs=request.repetitions or base.fold_runs,
        tissue=tissue_of(request),
    )


def tissue_of(request: BenchRequest) -> dict[str, Any]:
    """Where a request's tissue comes from, as `choose_tissue` takes it."""
    positive, against, *_ = (*request.classes, "", "")
    has_features = request.encoder.endswith(".npz")
    return {
        "source": request.tissue,
        "patient": request.patient,
        "positive": positive,
        "against": against,
        "encoder": STATISTICS if has_features else request.encoder,
        "features": request.encoder if has_features else "",
    }


def suites_of(request: BenchRequest) -> list[Suite]:
    """The suites that a request names; `all`, or none, means every suite."""
    names = list(dict.fromkeys(request.suite))
    if ALL in names or not names:
        names = list(SUITES)
    check_names("suite", names, SUITES)
    return [SUITES[name] for name in names]


def entries_of(request: BenchRequest, suite: Suite) -> list[MethodEntry]:
    """The rows of a suite: its controls, the package's methods, and those of the request."""
    ours = ("random",) if request.only else METHODS
    names = dict.fromkeys([*suite.controls, *ours, *request.methods])
    return [method_entry(name) for name in names]


def models_of(request: BenchRequest) -> list[ModelEntry]:
    """The models of a request, else the protocol's."""
    names = dict.fromkeys(request.model or (QUICK_MODELS if request.quick else PAPER_MODELS))
    return [model_entry(name) for name in names]


def settings_of(request: BenchRequest) -> dict[str, Any]:
    """The settings of a run for run.json and the page of results."""
    return {
        "suites": request.suite,
        "methods": request.methods,
        "models": request.model,
        "only": request.only,
        "quick": request.quick,
        "tasks": request.task,
        "repetitions": request.repetitions,
        "seed": request.seed,
        "data": request.data,
        "encoder": request.digit_encoder,
        "device": request.device,
        "minutes": request.minutes,
        "tissue": tuple(tissue_of(request).items()),
        "protocol_name": "quick" if request.quick else "Table 1",
        "plan": plan_of(request).as_dict(),
    }


def check_tasks(request: BenchRequest) -> None:
    """Refuse a task that none of the suites has."""
    if request.task:
        plan = replace(plan_of(request), tasks=())
        names = {problem.name for suite in suites_of(request) for problem in suite.problems(plan)}
        check_names("task of the suites", request.task, sorted(names))
