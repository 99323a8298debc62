"""`xmil toy`: Table 1 by the referee, on bags of digits whose evidence is known."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmil.cli import _command
from xmil.cli._screen import progress_bars
from xmil.core.errors import InputError

if TYPE_CHECKING:
    from xmil.bench import Configuration, DigitProblem, Plan, Referee, Suite, Unit

ALL = "all"


@_command.with_examples(
    "toy --quick", "toy --task four_bags --model attnmil --methods lrp,attention --out toy"
)
def toy(
    task: Annotated[str, typer.Option(help="Tasks, separated by commas, or 'all'.")] = "",
    model: Annotated[str, typer.Option(help="Models: attnmil, transmil, addmil, mambamil, or 'all'.")] = "",
    methods: Annotated[str, typer.Option(help="Methods as name[:preset][@output], or 'all'.")] = "",
    repetitions: Annotated[
        int | None, typer.Option(help="Models per configuration, trained together.")
    ] = None,
    data: Annotated[
        str, typer.Option(help="'digits', 'onehot', an .npz file, or a folder of .npz or IDX files.")
    ] = "digits",
    encoder: Annotated[str, typer.Option(help="Encoder that turns images into features.")] = "pixels",
    out: Annotated[
        Path, typer.Option(help="Folder for results; an interrupted run continues where it stopped.")
    ] = Path("toy-out"),
    device: _command.Device = "cpu",
    seed: Annotated[int, typer.Option(help="Base seed of bags and models.")] = 0,
    epochs: Annotated[
        int | None, typer.Option(help="Maximum number of epochs, instead of the paper's.")
    ] = None,
    bags: Annotated[str, typer.Option(help="Numbers of training, validation and test bags.")] = "",
    released: Annotated[
        bool,
        typer.Option("--released", help="Draw images and bags as the released code does, shared by all."),
    ] = False,
    table1: Annotated[bool, typer.Option("--table1", help="The paper's tasks, models and methods.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Every task in a minute: fewer bags, faster training.")
    ] = False,
    plots: Annotated[bool, typer.Option(help="Draw bar plots and example bags.")] = True,
    as_json: _command.Json = False,
) -> None:
    """Train models on bags of digits, explain them, and compare the explanations with the true evidence."""
    import torch

    from xmil.bench import (
        QUICK,
        SETUPS,
        SUITES,
        Folder,
        Plan,
        Protocol,
        Referee,
        method_entry,
        model_entry,
        rows_of,
        write_rows,
    )
    from xmil.network import find_device
    from xmil.storage import RunFolder

    names = _names(task, model, methods, table1=table1, quick=quick)
    protocol = QUICK if quick else Protocol()
    changes: dict[str, Any] = {"seed": seed, "pooled": released, "shared_bags": released}
    if repetitions is not None:
        changes["repetitions"] = repetitions
    if bags:
        changes["sizes"] = _sizes(bags)
    if epochs is not None:
        changes["training"] = {**protocol.training, "epochs": epochs}
    protocol = replace(protocol, **changes)
    device = find_device(device)
    if quick and "OMP_NUM_THREADS" not in os.environ:  # models are too small for several threads
        torch.set_num_threads(1)
    suite, plan = SUITES["evidence"], Plan(protocol=protocol, data=data, encoder=encoder)
    problems = _problems(names, plan)
    entries = [method_entry(name) for name in names["methods"]]
    models = [model_entry(name) for name in names["models"]]
    referee = Referee(plan, entries, models, Folder(out), device, replace=True)
    settings = {**names, "data": problems[0].instances.name, "encoder": encoder, "device": device}
    folder = RunFolder(out, "toy", {**settings, **protocol.as_dict()}, mixed=True)
    on_gpu = device.startswith("cuda")
    name = torch.cuda.get_device_name(device) if on_gpu else f"{device}, {torch.get_num_threads()} threads"
    with folder.open({"machine": {"device": name}}):
        _measure(referee, suite, problems)
        units = referee.units(suite, problems)
        configurations = [p.configuration(SETUPS[name], device) for p in problems for name in names["models"]]
        for unit, configuration in zip(units, configurations, strict=True):
            fitted = referee.folder.stack(configuration)
            if fitted is not None:
                path = out / "results" / f"{configuration.name}.parquet"
                write_rows(path, rows_of(unit, fitted), configuration.settings())
        _write_tables(units, configurations, names["methods"], referee, plots=plots, as_json=as_json)


def _names(task: str, model: str, methods: str, *, table1: bool, quick: bool) -> dict[str, list[str]]:
    """Check and return the tasks, models and methods, by default the paper's."""
    from xmil.bench import (
        PAPER_METHODS,
        PAPER_MODELS,
        PAPER_TASKS,
        SETUPS,
        TABLE1_METHODS,
        TASKS,
        MethodSpec,
    )

    if table1 and quick:
        raise InputError(
            "--table1 and --quick cannot be combined: --table1 has the paper's settings, --quick its own."
        )
    tasks = _split(task, list(TASKS), list(TASKS) if quick else list(PAPER_TASKS))
    models = _split(model, list(SETUPS), list(PAPER_MODELS) if table1 else ["attnmil"])
    chosen = _split(
        methods,
        [*PAPER_METHODS, "grad2", "one_removed", "combined"],
        list(TABLE1_METHODS if table1 else PAPER_METHODS),
    )
    for name in tasks:
        TASKS[name]
    for name in models:
        SETUPS[name]
    return {"tasks": tasks, "models": models, "methods": [str(MethodSpec.parse(text)) for text in chosen]}


def _split(text: str, every: list[str], default: list[str]) -> list[str]:
    if text == ALL:
        return every
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip())) or default


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) != 3:
        raise InputError(f"The numbers of bags must look like 2000,500,1000. Got {text!r} instead.")
    return sizes


def _problems(names: dict[str, list[str]], plan: Plan) -> list[DigitProblem]:
    """Make problems from the tasks; refuse what would fail later, before training starts."""
    from xmil.bench import SETUPS, SPLITS, TASKS, DigitProblem, MethodSpec, load_instances
    from xmil.models import create_model

    instances = load_instances(plan.data, encoder=plan.encoder, seed=plan.protocol.seed)
    for pool in SPLITS:
        instances.rows_of(pool)
    specs = [MethodSpec.parse(text) for text in names["methods"]]
    for setup in [SETUPS[name] for name in names["models"]]:
        plan.protocol.training_of(setup)
        model = create_model(setup.name, in_dim=2, n_classes=2, **setup.params)
        if not any(spec.supports(model) for spec in specs):
            raise InputError(f"None of the methods {', '.join(names['methods'])} can explain {setup.name}.")
    return [DigitProblem.of(TASKS[name], instances, plan.protocol) for name in names["tasks"]]


def _measure(referee: Referee, suite: Suite, problems: list[DigitProblem]) -> None:
    """Train and measure all problems and models, with a bar for each step."""
    with progress_bars() as progress:
        every = progress.add_task("all tasks", total=len(problems))
        bar = progress.add_task("", total=None)

        def say(text: str, done: int, total: int) -> None:
            progress.update(bar, description=text, completed=done, total=total or None)

        for problem in problems:
            replace(referee, say=say).run(suite, [problem])
            progress.advance(every)


def _write_tables(
    units: list[Unit],
    configurations: list[Configuration],
    methods: list[str],
    referee: Referee,
    *,
    plots: bool,
    as_json: bool,
) -> None:
    """Write the tables of every measure and the plots; print the main table."""
    from xmil.bench import FORMATS, TRUTH, as_records, as_text, draw_all, notes, summarise
    from xmil.core.durable import write_text

    out, repetitions = referee.folder.path, referee.plan.protocol.repetitions
    tables = {m.name: summarise(units, methods, m.name, repetitions=repetitions) for m in TRUTH}
    main = tables["auprc2"]
    for measure, table in tables.items():
        for suffix, render in FORMATS.items():
            write_text(out / f"{'table1' if table is main else measure}.{suffix}", render(table))
    if plots:
        draw_all(main, configurations, methods, referee.folder)
    sentences = notes(units, repetitions=repetitions)
    if as_json:
        about = {"measure": main.measure, "rows": as_records(main), "notes": sentences, "out": str(out)}
        print(json.dumps(about, indent=2))
        return
    print(as_text(main))
    beside = "; [paper, difference]" if any(cell.paper is not None for cell in main.cells.values()) else ""
    print(f"\nAUPRC-2, mean ± std; * best, + second{beside}. Written to {out}.")
    for sentence in sentences:
        print(sentence)
