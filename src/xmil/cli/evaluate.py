"""`xmil evaluate`: how faithful each method is for a model, over a cohort."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmil.cli import _options, _workers
from xmil.cli._cohort import checked_device, checked_folder, class_index, find_cases, listed, progress_bar
from xmil.cli._report import print_failures
from xmil.core.errors import InputError

if TYPE_CHECKING:
    from xmil.evaluate.localisation import Truth
    from xmil.runs.evaluate import EvaluateOutcome, EvaluateRun, LabelledSlide


def evaluate(
    model: Annotated[Path, typer.Option(help="Checkpoint, or a folder of `xmil train` with one model.")],
    features: _options.Features,
    out: Annotated[Path, typer.Option(help="Folder for results; a run goes on where it stopped.")],
    cohort: _options.CohortTable = None,
    label: Annotated[
        str, typer.Option(help="Label column, that of the training by default; only correct slides count.")
    ] = "",
    split: _options.Splits = "",
    by: _options.By = "slide",
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas; 'all' that fit the model.")
    ] = "",
    modes: Annotated[
        str, typer.Option(help="remove, mask, or both; band and SRG in the first.")
    ] = "remove,mask",
    steps: Annotated[int, typer.Option(help="Steps of a curve.")] = 100,
    orders: Annotated[int, typer.Option(help="Random orders of the band.")] = 20,
    top: Annotated[float, typer.Option(help="Share of instances for sufficiency and necessity.")] = 0.1,
    truth: Annotated[Path | None, typer.Option(help="Folder of GeoJSON, masks or instance labels.")] = None,
    truth_class: Annotated[
        str, typer.Option(help="The class the ground truth is evidence for, by name or number.")
    ] = "1",
    truth_names: Annotated[str, typer.Option(help="QuPath classes that count, separated by commas.")] = "",
    slides: Annotated[
        Path | None,
        typer.Option(help="Folder of slides, where QuPath's GeoJSON is of slides with a bounds offset."),
    ] = None,
    mask_downsample: Annotated[float, typer.Option(help="Level-0 pixels per pixel of the masks.")] = 1.0,
    mpp: _options.Mpp = None,
    patch_size: _options.PatchSize = None,
    best: Annotated[
        bool, typer.Option("--best", help="End with the method to trust for this model.")
    ] = False,
    device: _options.Device = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of ties, random orders and the bootstrap.")] = 0,
    restart: Annotated[
        bool, typer.Option("--restart", help="Remove the earlier run in --out and begin anew.")
    ] = False,
    engine: _workers.Kind = "local",
    workers: _workers.WorkerCount = 0,
    address: _workers.Address = "",
    cpus: _workers.Cpus = 1.0,
    gpus: _workers.Gpus = 0.0,
) -> int:
    """Drop instances by each method's scores and see whether the prediction follows."""
    from xmil.core.task import TASKS
    from xmil.evaluate.faithfulness import FaithfulnessSettings
    from xmil.models import load_model
    from xmil.runs.cautions import seen_warning
    from xmil.runs.evaluate import EvaluateRun, LabelledSlide, file_digest
    from xmil.runs.workers.pool import Workers

    chosen = _workers.workers_of(
        engine, workers=workers, address=address, cpus=cpus, gpus=gpus, device=device
    )
    model = _one_model(model)
    net = load_model(model)
    net = net.to(checked_device(device)) if chosen == Workers() else net
    settings = FaithfulnessSettings(
        methods=_methods(methods, net),
        modes=tuple(listed(modes)),
        steps=steps,
        orders=orders,
        top=top,
        seed=seed,
        truth_class=1 if truth is None else class_index(truth_class, net),
    )
    settings.check(net)
    decides = TASKS[net.task].decides
    if not decides:
        print(f"A {net.task} model is neither right nor wrong: every slide counts.")
    column = label if decides else None
    cases, missing = find_cases(
        features, cohort, label=column, splits=listed(split), names=net.class_names, by=by, spec=net.spec
    )
    counted = [LabelledSlide.of(case) for case in cases]
    warnings = [said for said in (missing.warning(), seen_warning([model], cases)) if said is not None]
    reading = {key: value for key, value in (("mpp", mpp), ("patch_size", patch_size)) if value is not None}
    known = None if truth is None else _truth(truth, listed(truth_names), mask_downsample, slides)
    inputs = {
        "model": file_digest(model),
        "features": str(features.resolve()),
        "truth": None if truth is None else str(truth.resolve()),
        "truth_names": listed(truth_names),
        "mask_downsample": mask_downsample,
        "by": by,
        "reading": reading,
        **({} if slides is None else {"slides": str(slides.resolve())}),
    }
    about = {
        "model": {"path": str(model), "digest": inputs["model"], "spec": asdict(net.spec)},
        "class_names": net.class_names,
        "task": net.task,
        "methods": settings.methods,
        "targets": ["predicted"],
        "features": inputs["features"],
        "cohort": None if cohort is None else str(cohort.resolve()),
        **missing.as_dict(),
        "warnings": warnings,
    }
    run = EvaluateRun(out, settings, inputs, about, reading)
    with (
        run.opened(restart=restart),
        progress_bar("slides" if by == "slide" else "cases", len(counted)) as advance,
    ):
        outcome = run.measure(
            net if chosen == Workers() else model,
            counted,
            truth=known,
            on_slide=lambda _: advance(),
            engine=chosen,
            device=device,
        )
    for warning in warnings:
        print(f"warning: {warning}")
    return _report(run, counted, outcome, best=best)


def _truth(folder: Path, names: list[str], downsample: float, slides: Path | None) -> Truth:
    from xmil.evaluate.localisation import Truth
    from xmil.slides import find_slides

    found = {} if slides is None else find_slides(slides)
    return Truth(checked_folder(folder), tuple(names), downsample, slides=found)


def _one_model(path: Path) -> Path:
    """The checkpoint a path stands for; an ensemble has several, whose curves would be of several outputs."""
    from xmil.models.checkpoints.files import checkpoint_files

    files = checkpoint_files(path)
    if len(files) > 1:
        names = ", ".join(map(str, files))
        raise InputError(
            f"{path}: xmil evaluate takes one model, and here are {len(files)}; name one: {names}."
        )
    return files[0]


def _methods(text: str, net: Any) -> tuple[str, ...]:
    from xmil.evaluate.faithfulness import DEFAULT_METHODS
    from xmil.methods import list_methods

    able = list_methods(net)
    if text == "all":
        return tuple(able)
    return tuple(listed(text)) or tuple(name for name in DEFAULT_METHODS if name in able)


def _report(run: EvaluateRun, slides: list[LabelledSlide], outcome: EvaluateOutcome, *, best: bool) -> int:
    """Tables, figures, and a few lines on the screen; the exit code."""
    from xmil.core.storage import write_text
    from xmil.evaluate.faithfulness_plots import draw_summary
    from xmil.evaluate.faithfulness_table import FORMATS, as_text, statistics_csv, summarise

    print_failures(outcome.failed)
    rows = run.rows(slides)
    if not rows:
        raise InputError(f"No slide could be measured; {run.folder / 'failures.csv'} says why.")
    summary = summarise(rows, seed=run.settings.seed)
    run.write_results(rows)
    run.write_slides(slides, rows)
    texts = {f"summary.{suffix}": render(summary) for suffix, render in FORMATS.items()}
    for name, text in {**texts, "statistics.csv": statistics_csv(summary)}.items():
        write_text(run.folder / name, text)
    draw_summary(rows, summary, run.folder / "faithfulness.png")
    print(as_text(summary))
    if best:
        print(_best(summary))
    print(f"{len(outcome.measured)} measured, {len(outcome.found)} found done. Written to {run.folder}.")
    return 1 if outcome.failed else 0


def _best(summary: Any) -> str:
    if not summary.best:
        return "No slide is classified correctly: there is no method to name."
    return f"Best: {summary.best[summary.modes[0]]}"
