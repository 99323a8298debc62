"""The paper's Table 1: its tasks, models and methods on bags of digits, as text, CSV, Markdown and LaTeX."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xmil.bench.digits import TASKS
from xmil.bench.entries import method_entry
from xmil.bench.instances import load_instances
from xmil.bench.measures import TRUTH
from xmil.bench.models import PAPER_MODELS, SETUPS, model_entry
from xmil.bench.plots import draw_all
from xmil.bench.problems import SPLITS
from xmil.bench.protocol import (
    PAPER_METHODS,
    PAPER_TASKS,
    QUICK,
    TABLE1_METHODS,
    Configuration,
    DigitProblem,
    Protocol,
)
from xmil.bench.referee import Contest, make_contests, measure_contests
from xmil.bench.scoring import MethodSpec
from xmil.bench.suites import ALL, SUITES, Plan
from xmil.bench.tables import FORMATS, as_records, as_text, notes, rows_of, summarise, write_rows
from xmil.bench.trained import Say, load_stack
from xmil.bench.units import Unit
from xmil.core.durable import write_text
from xmil.core.errors import InputError, bad_parameter
from xmil.execute import Tally
from xmil.models import create_model
from xmil.runs.requests import BenchRequest

KIND = "bench --suite paper"  # of its folder of results
MAIN = "auprc2"  # the measure of Table 1
SLOW_METHODS = ("grad2", "one_removed", "combined")  # beside the paper's, with `all`


@dataclass(frozen=True)
class Table1:
    """The main table: its text and notes for a screen, its report for a program."""

    text: str
    notes: Sequence[str]
    report: dict[str, Any]


def measure_table1(request: BenchRequest, say: Say) -> Table1:
    """Train the models, measure the methods, and write every table into the folder of the request."""
    tasks, models, methods = chosen_names(request)
    plan = plan_table1(request)
    problems = make_problems(plan, tasks, models, methods)
    if request.quick and "OMP_NUM_THREADS" not in os.environ:  # models are too small for several threads
        torch.set_num_threads(1)
    entries = [method_entry(name) for name in methods]
    contests = make_contests(
        SUITES["evidence"],
        problems,
        plan,
        entries,
        [model_entry(name) for name in models],
        out=request.out,
        device=request.device,
        say=say,
    )
    configurations = [p.configuration(SETUPS[name], request.device) for p in problems for name in models]
    settings = {
        "tasks": tasks,
        "models": models,
        "methods": methods,
        "data": problems[0].instances.name,
        "encoder": plan.encoder,
        "device": request.device,
    }
    measure_contests(
        contests,
        request.out,
        {**settings, **plan.protocol.as_dict()},
        kind=KIND,
        about={"machine": {"device": name_of_device(request.device)}},
        replace=True,
        finish=partial(write_results, request, configurations, contests, methods),
    )
    units = [Unit.read(contest.path) for contest in contests]
    table = summarise(units, methods, MAIN, repetitions=plan.protocol.repetitions)
    sentences = notes(units, repetitions=plan.protocol.repetitions)
    beside = "; [paper, difference]" if any(cell.paper is not None for cell in table.cells.values()) else ""
    caption = f"AUPRC-2, mean ± std; * best, + second{beside}. Written to {request.out}."
    report = {
        "measure": table.measure,
        "rows": as_records(table),
        "notes": sentences,
        "out": str(request.out),
    }
    return Table1(f"{as_text(table)}\n\n{caption}", sentences, report)


def write_results(
    request: BenchRequest,
    configurations: Sequence[Configuration],
    contests: Sequence[Contest],
    methods: Sequence[str],
    _: Tally,
) -> dict[str, Any]:
    """Write the rows of every unit, the table of every measure, and the plots."""
    out, units = request.out, [Unit.read(contest.path) for contest in contests]
    for unit, configuration in zip(units, configurations, strict=True):
        fitted = load_stack(out, configuration)
        if fitted is not None:
            path = out / "results" / f"{configuration.name}.parquet"
            write_rows(path, rows_of(unit, fitted), configuration.settings())
    table = write_tables(units, methods, contests[0].plan, out)
    if request.plots:
        draw_all(table, configurations, methods, out)
    return {}


def chosen_names(request: BenchRequest) -> tuple[list[str], list[str], list[str]]:
    """The tasks, models and methods that a request names, by default the paper's."""
    tasks = _chosen(request.task, TASKS, TASKS if request.quick else PAPER_TASKS)
    models = _chosen(request.model, SETUPS, ["attnmil"] if request.quick else PAPER_MODELS)
    methods = _chosen(
        request.methods,
        [*PAPER_METHODS, *SLOW_METHODS],
        PAPER_METHODS if request.quick else TABLE1_METHODS,
    )
    for name in tasks:
        TASKS[name]  # an unknown name is an error
    for name in models:
        SETUPS[name]
    return tasks, models, [str(MethodSpec.parse(text)) for text in methods]


def _chosen(names: Sequence[str], every: Iterable[str], default: Iterable[str]) -> list[str]:
    if ALL in names:
        return list(every)
    return list(dict.fromkeys(names)) or list(default)


def plan_table1(request: BenchRequest) -> Plan:
    """The protocol of the paper, with what a request changes."""
    if request.bags and len(request.bags) != 3:
        must = "three numbers of training, validation and test bags, such as 2000,500,1000"
        raise bad_parameter("bags", "bench", must, request.bags)
    protocol = QUICK if request.quick else Protocol()
    changes: dict[str, Any] = {
        "seed": request.seed,
        "pooled": request.released,
        "shared_bags": request.released,
    }
    if request.repetitions is not None:
        changes["repetitions"] = request.repetitions
    if request.bags:
        changes["sizes"] = request.bags
    if request.epochs is not None:
        changes["training"] = {**protocol.training, "epochs": request.epochs}
    return Plan(protocol=replace(protocol, **changes), data=request.data, encoder=request.digit_encoder)


def make_problems(
    plan: Plan, tasks: Sequence[str], models: Sequence[str], methods: Sequence[str]
) -> list[DigitProblem]:
    """Make problems from the tasks; refuse what would fail later, before training starts."""
    instances = load_instances(plan.data, encoder=plan.encoder, seed=plan.protocol.seed)
    for pool in SPLITS:
        instances.rows_of(pool)
    specs = [MethodSpec.parse(text) for text in methods]
    for setup in [SETUPS[name] for name in models]:
        plan.protocol.training_of(setup)
        model = create_model(setup.name, in_dim=2, n_classes=2, **setup.params)
        if not any(spec.supports(model) for spec in specs):
            raise InputError(f"None of the methods {', '.join(methods)} can explain {setup.name}.")
    return [DigitProblem.of(TASKS[name], instances, plan.protocol) for name in tasks]


def write_tables(units: Sequence[Unit], methods: Sequence[str], plan: Plan, out: Path) -> Any:
    """Write the table of every measure in every format; return the main one."""
    repetitions = plan.protocol.repetitions
    tables = {m.name: summarise(units, methods, m.name, repetitions=repetitions) for m in TRUTH}
    main = tables[MAIN]
    for measure, table in tables.items():
        for suffix, render in FORMATS.items():
            write_text(out / f"{'table1' if table is main else measure}.{suffix}", render(table))
    return main


def name_of_device(device: str) -> str:
    """Name a device for the record of a run."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{device}, {torch.get_num_threads()} threads"
