"""The suites: which problems, which measures, which bags."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from xmil.bench.camelyon import LESIONS, camelyon_problem
from xmil.bench.colon import colon_problems
from xmil.bench.colour_statistics import STATISTICS
from xmil.bench.confounders import CONFOUNDERS
from xmil.bench.digits import DigitProblem
from xmil.bench.entries import CONTROLS, ORACLE, Exam
from xmil.bench.faithfulness_batch import FAITHFULNESS, classified_right, grade_faithfulness
from xmil.bench.measuring import TRUTH, Grade, Measure, grade_tissue, grade_truth
from xmil.bench.problems import Problem
from xmil.bench.tissue import read_tissue, tissue_problems
from xmil.core.errors import unknown_name
from xmil.toy.digit_tasks import TASKS, DigitTask
from xmil.toy.instances import Instances, load_instances
from xmil.toy.protocol import QUICK, Protocol

LEARNED = 0.7  # bag AUROC on the test bags from which on a model counts
METHODS = (  # all of the package's but `milli` and `shapley`, which go bag by bag; they can be named
    "random",
    "attention",
    "attention:unfolded",
    "single",
    "one_removed",
    "combined",
    "logits",
    "gxi",
    "grad2",
    "ig",
    "lrp",
    "lrp:exact",
    "lrp:paper",
)
FAITHFULNESS_TASKS = ("four_bags", "pos_neg_count", "adjacent_pairs")
DIGIT_TASKS = (
    "four_bags",
    "pos_neg",
    "pos_neg_count",
    "adjacent_pairs",
    "standard",
    "context_flip",
    "confounder",
)


@dataclass(frozen=True)
class Plan:
    """How much is measured: the protocol of the digits, repetitions elsewhere, and bags for curves."""

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
class TissueAsked:
    """Which tissue: a source with its patients and classes, or colon nuclei; and what encodes images."""

    source: str = ""
    patient: str = ""
    positive: str = ""
    against: str = ""
    encoder: str = STATISTICS
    features: str = ""


@dataclass(frozen=True)
class Suite:
    """A suite: its problems under a plan, its measures (the first leads), and the bags it looks at."""

    name: str
    title: str
    problems: Callable[[Plan], Sequence[Problem]]
    measures: tuple[Measure, ...]
    grade: Grade
    controls: tuple[str, ...] = (ORACLE, *CONTROLS)
    bags: Callable[[Exam, Plan], Exam] = lambda exam, _: exam
    absent: str = "none of the tasks asked for is part of it."


def instances_of(plan: Plan) -> Instances:
    """The digits of a plan."""
    return load_instances(plan.data, encoder=plan.encoder, seed=plan.protocol.seed)


def _digits(tasks: Sequence[DigitTask]) -> Callable[[Plan], Sequence[Problem]]:
    def problems(plan: Plan) -> Sequence[Problem]:
        chosen = [task for task in tasks if not plan.tasks or task.name in plan.tasks]
        instances = instances_of(plan)
        return [DigitProblem(task, instances, plan.protocol) for task in chosen]

    return problems


def tissue(plan: Plan) -> Sequence[Problem]:
    """Colon nuclei where the data is at hand, or the tissue that was asked for."""
    asked = TissueAsked(**plan.tissue)
    problems = _tissue_problems(asked, plan)
    return [problem for problem in problems if not plan.tasks or problem.name in plan.tasks]


def _tissue_problems(asked: TissueAsked, plan: Plan) -> Sequence[Problem]:
    if asked.source:
        source = Path(asked.source)
        if (source / "slides.csv").is_file():
            return [camelyon_problem(source)]
        images = read_tissue(source, patient=asked.patient, encoder=asked.encoder)
        return tissue_problems(
            images,
            positive=asked.positive,
            against=asked.against,
            sizes=plan.tissue_bags,
            seed=plan.protocol.seed,
        )
    folder = data_folder() / "colon"
    if not (folder / "nuclei.csv").is_file():
        return []
    features = Path(asked.features) if asked.features else None
    return colon_problems(folder, features=features, encoder=asked.encoder, runs=max(10, plan.fold_runs))


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "evidence",
            "Evidence: bags of digits whose evidence is known",
            _digits([TASKS[name] for name in DIGIT_TASKS]),
            TRUTH,
            grade_truth,
        ),
        Suite(
            "tissue",
            "Tissue: labelled nuclei, tissue classes, lesions",
            tissue,
            (*TRUTH, *LESIONS),
            grade_tissue,
            absent="no colon images in XMIL_DATA and no --tissue; see the documentation for downloads.",
        ),
        Suite(
            "confounder",
            "Confounders: what really decides is planted",
            _digits(CONFOUNDERS),
            TRUTH,
            grade_truth,
        ),
        Suite(
            "faithfulness",
            "Faithfulness: what the model does when instances leave",
            _digits([TASKS[name] for name in FAITHFULNESS_TASKS]),
            FAITHFULNESS,
            grade_faithfulness,
            controls=CONTROLS,
            bags=lambda exam, plan: classified_right(exam, plan.curve_bags),
        ),
    )
}


def suite_named(name: str) -> Suite:
    """A suite by its name."""
    if name not in SUITES:
        raise unknown_name("suite", name, SUITES)
    return SUITES[name]


def data_folder() -> Path:
    """Where data that the package does not carry is looked for: XMIL_DATA, else ../shared/data."""
    return Path(os.environ.get("XMIL_DATA", "../shared/data"))
