"""`xmil toy`: explanations against known evidence, on bags of digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmil.cli import _options
from xmil.core.absence import not_made
from xmil.core.errors import InputError, bad_parameter

if TYPE_CHECKING:
    from xmil.toy.benchmark import Configuration, Row
    from xmil.toy.protocol import Protocol

ALL = "all"


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
    device: _options.Device = "cpu",
    seed: Annotated[int, typer.Option(help="Base seed of bags and models.")] = 0,
    epochs: Annotated[
        int | None, typer.Option(help="Maximum number of epochs, instead of the paper's.")
    ] = None,
    bags: Annotated[str, typer.Option(help="Numbers of training, validation and test bags.")] = "",
    pooled: Annotated[
        bool, typer.Option("--pooled", help="One pool of images for all splits, as in the released code.")
    ] = False,
    shared_bags: Annotated[
        bool,
        typer.Option("--shared-bags", help="The same bags for all repetitions, as in the released code."),
    ] = False,
    table1: Annotated[bool, typer.Option("--table1", help="The paper's tasks, models and methods.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Every task in a minute: fewer bags, faster training.")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads; one with --quick.")] = None,
    plots: Annotated[bool, typer.Option(help="Draw bar plots and example bags.")] = True,
    as_json: _options.Json = False,
) -> None:
    """Train models on bags of digits, explain them, and score the explanations against the true evidence."""
    from xmil.core.runfiles import locked
    from xmil.toy.instances import load_instances
    from xmil.toy.store import write_run

    names = _names(task, model, methods, table1=table1, quick=quick)
    changes = {"repetitions": repetitions, "seed": seed, "pooled": pooled, "shared_bags": shared_bags}
    protocol = _protocol(quick, bags, epochs, changes)
    _check_device(device)
    _set_threads(threads if threads is not None else 1 if quick else None)
    instances = load_instances(data, encoder=encoder, seed=seed)
    configurations = _configurations(names, instances, protocol, device)
    _check(configurations, names)
    _make(out)
    settings = {**names, "data": instances.name, "encoder": encoder, "device": device, **protocol.as_dict()}
    with locked(out):
        write_run(out, settings)
        rows = _run(configurations, names["methods"], out)
        _write(rows, configurations, names["methods"], out, plots=plots, as_json=as_json)


def _names(task: str, model: str, methods: str, *, table1: bool, quick: bool) -> dict[str, list[str]]:
    """Tasks, models and methods asked for, each checked; what is not said is the paper's."""
    from xmil.toy.digit_tasks import TASKS
    from xmil.toy.protocol import PAPER_METHODS, PAPER_MODELS, PAPER_TASKS, SETUPS, TABLE1_METHODS
    from xmil.toy.scoring import MethodSpec

    if table1 and quick:
        raise InputError(
            "--table1 and --quick cannot be combined: "
            "the first takes the paper's settings, the second its own."
        )
    tasks = _listed(task, list(TASKS), list(TASKS) if quick else list(PAPER_TASKS))
    models = _listed(model, list(SETUPS), list(PAPER_MODELS) if table1 else ["attnmil"])
    chosen = _listed(
        methods,
        [*PAPER_METHODS, "grad2", "one_removed", "combined"],
        list(TABLE1_METHODS if table1 else PAPER_METHODS),
    )
    for name in tasks:
        TASKS[name]
    for name in models:
        SETUPS[name]
    return {"tasks": tasks, "models": models, "methods": [str(MethodSpec.parse(text)) for text in chosen]}


def _listed(text: str, every: list[str], default: list[str]) -> list[str]:
    if text == ALL:
        return every
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip())) or default


def _protocol(quick: bool, bags: str, epochs: int | None, changes: dict[str, Any]) -> Protocol:
    from dataclasses import replace

    from xmil.toy.protocol import QUICK, Protocol

    protocol = QUICK if quick else Protocol()
    if bags:
        changes["sizes"] = _sizes(bags)
    if epochs is not None:
        changes["training"] = {**protocol.training, "epochs": epochs}
    return replace(protocol, **{name: value for name, value in changes.items() if value is not None})


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) != 3:
        raise InputError(f"The numbers of bags must look like 2000,500,1000. Got {text!r} instead.")
    return sizes


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InputError(f"Unknown device {device!r}; use cpu, cuda or cuda:N.") from None
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"The device {device!r} is not there; use cpu.")


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        if threads < 1:
            raise bad_parameter("threads", "toy", "an int in the range [1, inf)", threads)
        torch.set_num_threads(threads)


def _configurations(
    names: dict[str, list[str]], instances: Any, protocol: Protocol, device: str
) -> list[Configuration]:
    from xmil.toy.benchmark import Configuration
    from xmil.toy.digit_tasks import TASKS
    from xmil.toy.protocol import SETUPS

    pairs = [(task, model) for task in names["tasks"] for model in names["models"]]
    return [Configuration(TASKS[t], SETUPS[m], instances, protocol, device) for t, m in pairs]


def _check(configurations: list[Configuration], names: dict[str, list[str]]) -> None:
    """Refuse what would fail later, before anything is trained."""
    from xmil.toy.scoring import MethodSpec
    from xmil.toy.store import applies

    specs = [MethodSpec.parse(text) for text in names["methods"]]
    for c in configurations:
        c.protocol.training_of(c.setup)
        for pool in c.instances.pools:
            c.instances.rows_of(pool)
        if not any(applies(spec, c) for spec in specs):
            raise InputError(f"None of the methods {', '.join(names['methods'])} can explain {c.setup.name}.")


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(not_made(out, error)) from None


def _run(configurations: list[Configuration], methods: list[str], out: Path) -> list[Row]:
    """Every configuration in turn, with a bar for each."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from xmil.toy.scoring import MethodSpec
    from xmil.toy.store import Store, run_configuration

    specs = [MethodSpec.parse(text) for text in methods]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    rows: list[Row] = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        whole = progress.add_task("all configurations", total=len(configurations))
        for configuration in configurations:
            bar = progress.add_task(configuration.name, total=None)

            def say(
                stage: str, done: int, total: int, bar: Any = bar, name: str = configuration.name
            ) -> None:
                progress.update(bar, description=f"{name}: {stage}", completed=done, total=total)

            rows += run_configuration(configuration, specs, Store(out), on_progress=say)
            progress.remove_task(bar)
            progress.advance(whole)
    return rows


def _write(
    rows: list[Row],
    configurations: list[Configuration],
    methods: list[str],
    out: Path,
    *,
    plots: bool,
    as_json: bool,
) -> None:
    """The tables of every measure, the plots, and the main table on the screen."""
    from xmil.toy.result_table import as_records, as_text, summarise

    paper = all(c.comparable for c in configurations)
    _write_tables(rows, out, paper=paper)
    if plots:
        from xmil.toy.plots import draw_all

        draw_all(rows, configurations, methods, out, paper=paper)
    table = summarise(rows, paper=paper)
    if as_json:
        print(json.dumps({"measure": "auprc2", "rows": as_records(table), "out": str(out)}, indent=2))
        return
    print(as_text(table))
    beside = "; [paper, difference]" if paper else ""
    print(f"\nAUPRC-2, mean ± std; * best, + second{beside}. Written to {out}.")


def _write_tables(rows: list[Row], out: Path, *, paper: bool) -> None:
    from xmil.core.storage import write_text
    from xmil.evaluate.evidence_batch import MEASURES
    from xmil.toy.result_table import FORMATS, summarise

    for measure in MEASURES:
        table = summarise(rows, measure, paper=paper)
        for suffix, render in FORMATS.items():
            text = render(table)
            path = out / f"{'table1' if measure == 'auprc2' else measure}.{suffix}"
            write_text(path, text)
