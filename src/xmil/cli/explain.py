"""`xmil explain`: methods x targets x slides, over a cohort."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmil.cli import _options, _workers
from xmil.cli._cohort import checked_device, listed, named, progress_bar, task_cases
from xmil.cli._report import print_failures
from xmil.core.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from xmil.data import Case
    from xmil.models import MILModel
    from xmil.models.base import ModelSpec
    from xmil.runs.explain import ExplainRun, ExplainTally
    from xmil.runs.settings import ExplainSettings


def explain(
    model: _options.Models,
    features: _options.Features,
    out: Annotated[Path, typer.Option(help="Folder for results; a run goes on where it stopped.")],
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "lrp",
    target: Annotated[
        str,
        typer.Option(
            help="predicted, label, all, a class by name or number, a contrast A:B; several with commas."
        ),
    ] = "predicted",
    cohort: _options.CohortTable = None,
    label: _options.Labels = "",
    time: _options.Time = "time",
    event: _options.Event = "event",
    split: _options.Splits = "",
    by: _options.By = "slide",
    output: Annotated[
        str,
        typer.Option(help="The explained number: logit, contrastive, log_odds, probability, value, risk."),
    ] = "",
    preset: Annotated[str, typer.Option(help="Rules of lrp: default, exact, paper, released.")] = "",
    param: Annotated[
        list[str] | None, typer.Option(help="A method's own parameter, as ig.steps=100; repeatable.")
    ] = None,
    mpp: _options.Mpp = None,
    patch_size: _options.PatchSize = None,
    device: _options.Device = "cpu",
    memory: Annotated[
        str, typer.Option(help="What a batch of a method's temporaries may take, as 500MB or 4GB.")
    ] = "1GB",
    seed: Annotated[int, typer.Option(help="Seed of methods that draw at random.")] = 0,
    restart: Annotated[
        bool, typer.Option("--restart", help="Remove the earlier run in --out and begin anew.")
    ] = False,
    engine: _workers.Kind = "local",
    workers: _workers.WorkerCount = 0,
    address: _workers.Address = "",
    cpus: _workers.Cpus = 1.0,
    gpus: _workers.Gpus = 0.0,
) -> int:
    """Explain every slide: which instances speak for a class, and which against it."""
    from xmil.models.checkpoints.files import checkpoint_files
    from xmil.runs.explain import ExplainRun
    from xmil.runs.explainer import load_models
    from xmil.runs.settings import LABEL, ExplainSettings

    chosen = _workers.workers_of(
        engine, workers=workers, address=address, cpus=cpus, gpus=gpus, device=device
    )
    settings = ExplainSettings(
        methods=tuple(listed(methods)),
        targets=tuple(listed(target)),
        output=output or None,
        params=_params(param or [], preset),
        by=by,
        seed=seed,
        reading={
            key: value for key, value in (("mpp", mpp), ("patch_size", patch_size)) if value is not None
        },
    )
    if LABEL in settings.targets and cohort is None:
        raise InputError("--target label needs a --cohort with the labels.")
    paths = tuple(file for path in model for file in checkpoint_files(path))
    models = load_models(paths)
    spec = _checked(settings, models)
    truth = {"label": label, "time": time, "event": event}
    cases, missing = task_cases(features, cohort, spec, **truth, splits=listed(split), by=by)
    where = device if chosen.kind == "ray" else checked_device(device)
    run = ExplainRun(out, paths, models, settings, features, cohort, where, memory_bytes(memory), missing)
    with progress_bar("slides" if by == "slide" else "cases", len(cases)) as advance:
        tally = run.explain(cases, engine=chosen, restart=restart, on_case=advance)
    return _report(run, cases, tally, chosen)


def _checked(settings: ExplainSettings, models: Sequence[MILModel]) -> ModelSpec:
    """What the models have in common, once each of them can do what the settings ask for."""
    from xmil.runs.ensemble import bins_warning, shared_spec

    specs = [model.spec for model in models]
    shared = shared_spec(specs)
    try:
        for model in models:
            settings.check(model, shared)
    except UnknownNameError as error:
        warning = bins_warning(specs) if settings.asks_bins else None
        if warning is None:
            raise
        raise InputError(f"{error} Here {warning}") from None
    return shared


def memory_bytes(text: str) -> int:
    """A size in bytes from 500MB, 4GB, 2GiB or a plain number.

    >>> memory_bytes("500MB"), memory_bytes("2 GiB"), memory_bytes("1.5G")
    (500000000, 2147483648, 1500000000)
    """
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    units |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
    number = text.strip().rstrip("BbKMGTikmgt ").strip()
    unit = text.strip()[len(number) :].strip().removesuffix("B").removesuffix("b")
    try:
        size = int(float(number) * units[unit[:1].upper() + unit[1:]])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise InputError(f"--memory must be a size such as 500MB or 4GB. Got {text!r} instead.")
    return size


def _params(given: list[str], preset: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"lrp": {"preset": preset}} if preset else {}
    for text in given:
        place, _, value = text.partition("=")
        method, _, name = place.partition(".")
        if not (method and name and value):
            raise InputError(
                f"--param must read METHOD.NAME=VALUE, such as ig.steps=100. Got {text!r} instead."
            )
        try:
            found.setdefault(method, {})[name] = json.loads(value)
        except ValueError:
            found.setdefault(method, {})[name] = value
    return found


def _report(run: ExplainRun, cases: list[Case], tally: ExplainTally, engine: Any) -> int:
    """A few lines on the screen; the exit code."""
    from xmil.runs.explainer import slide_file
    from xmil.runs.summary import summarise_run

    for warning in run.warnings(tally, cases):
        print(f"warning: {warning}")
    print_failures(tally.failed)
    if not tally.rows:
        raise InputError(f"No slide could be explained; {run.out / 'failures.csv'} says why.")
    files = [slide_file(run.out, slide) for case in cases for slide in case.slides if slide in tally.rows]
    far = summarise_run(run.out, files, engine=engine)
    if far:
        who = "1 slide stands" if len(far) == 1 else f"{len(far)} slides stand"
        print(f"{who} out from the others: {named(far)} (summary/outliers.csv)")
    counts = f"{len(tally.explained)} explained, {len(tally.found)} found done, {len(tally.failed)} failed"
    print(f"{counts}. Written to {run.out}.")
    return 1 if tally.failed else 0
