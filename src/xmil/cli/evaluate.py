"""`xmil evaluate`: how faithful each method is for a model, over a cohort."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmil.core.errors import InputError, unknown_name

if TYPE_CHECKING:
    from xmil.data import Cohort
    from xmil.models import MILModel
    from xmil.study.faithfulness_run import Outcome, Run, Slide
    from xmil.study.faithfulness_truth import Truth


def evaluate(
    model: Annotated[Path, typer.Option(help="Checkpoint of the model.")],
    features: Annotated[Path, typer.Option(help="Folder of feature files.")],
    out: Annotated[Path, typer.Option(help="Folder for results; a run goes on where it stopped.")],
    cohort: Annotated[
        Path | None, typer.Option(help="Table of slides and labels; all files without it.")
    ] = None,
    label: Annotated[
        str, typer.Option(help="Label column; slides classified wrongly do not count.")
    ] = "label",
    split: Annotated[str, typer.Option(help="Only slides of these splits, separated by commas.")] = "",
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
    mask_downsample: Annotated[float, typer.Option(help="Level-0 pixels a pixel of the masks.")] = 1.0,
    best: Annotated[
        bool, typer.Option("--best", help="End with the method to trust for this model.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of ties, random orders and the bootstrap.")] = 0,
) -> int:
    """Drop instances by each method's scores and see whether the prediction follows."""
    from xmil.models import load_model
    from xmil.study.faithfulness import Settings
    from xmil.study.faithfulness_run import Run, file_digest
    from xmil.study.faithfulness_truth import Truth

    net = load_model(model).to(_device(device))
    settings = Settings(
        methods=_methods(methods, net),
        modes=tuple(_listed(modes)),
        steps=steps,
        orders=orders,
        top=top,
        seed=seed,
        truth_class=1 if truth is None else _class(truth_class, net),
    )
    settings.check(net)
    slides = _slides(features, cohort, label=label, splits=_listed(split), net=net)
    known = None if truth is None else Truth(_folder(truth), tuple(_listed(truth_names)), mask_downsample)
    inputs = {
        "model": file_digest(model),
        "features": str(features.resolve()),
        "truth": None if truth is None else str(truth.resolve()),
        "truth_names": _listed(truth_names),
        "mask_downsample": mask_downsample,
    }
    run = Run(out, settings, inputs)
    run.prepare()
    outcome = _measure(run, net, slides, known)
    return _report(run, slides, outcome, best=best)


def _methods(text: str, net: Any) -> tuple[str, ...]:
    from xmil.methods import list_methods
    from xmil.study.faithfulness import DEFAULT_METHODS

    able = list_methods(net)
    if text == "all":
        return tuple(able)
    return tuple(_listed(text)) or tuple(name for name in DEFAULT_METHODS if name in able)


def _class(text: str, net: MILModel) -> int:
    """A class of the model by its name or number; models without classes have one truth."""
    from xmil.core.target import Target
    from xmil.models.tasks import CLASS_TASKS, count_targets

    if net.task not in CLASS_TASKS:
        return 0
    names = net.spec.target_names
    return int(
        Target(text).resolve(n_classes=count_targets(net.task, net.n_classes), predicted=0, class_names=names)
    )


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _device(name: str) -> str:
    import torch

    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise InputError(f"Unknown device {name!r}; use cpu, cuda or cuda:N.") from None
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"The device {name!r} is not there; use cpu.")
    return name


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise InputError(f"{path}: no such folder.")
    return path


def _slides(
    features: Path, cohort: Path | None, *, label: str, splits: list[str], net: MILModel
) -> list[Slide]:
    from xmil.data import read_cohort
    from xmil.data.join import feature_files, join_features
    from xmil.data.siblings import slide_name
    from xmil.models.tasks import CLASS_TASKS
    from xmil.study.faithfulness_run import Slide

    if cohort is None:
        files, _ = feature_files(features)
        if not files:
            raise InputError(f"{features}: no feature files in this folder.")
        return [Slide(slide_name(path), path) for path in files]
    table = read_cohort(cohort)
    table = table.subset(*splits) if splits else table
    joined, report = join_features(table, features)
    if report.without_features or report.doubled:
        print(f"{cohort}: {report}")
    if net.task in CLASS_TASKS:
        labels = _labels(joined, label, net.class_names)
    else:
        print(f"A {net.task} model is neither right nor wrong: every slide counts.")
        labels = [None] * len(joined)
    paths = [Path(str(path)) for path in joined.column("path")]
    return [Slide(*row) for row in zip(joined.slides, paths, labels, strict=True)]


def _labels(cohort: Cohort, column: str, names: tuple[str, ...] | None) -> list[int | None]:
    """Class indices: by the model's class names where the labels are among them."""
    if column not in cohort.columns:
        if column != "label":
            raise unknown_name("column", column, cohort.columns)
        print("The cohort has no column 'label': every slide counts, right or wrong.")
        return [None] * len(cohort)
    cells = cohort.column(column)
    if names and all(cell is None or cell in names for cell in cells):
        return [None if cell is None else names.index(cell) for cell in cells]
    return [None if value < 0 else int(value) for value in cohort.labels(column)]


def _measure(run: Run, net: Any, slides: list[Slide], truth: Truth | None) -> Outcome:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("slides", total=len(slides))
        return run.measure(net, slides, truth=truth, on_slide=lambda _: progress.advance(bar))


def _report(run: Run, slides: list[Slide], outcome: Outcome, *, best: bool) -> int:
    """Tables, figures, and a few lines on the screen; the exit code."""
    from xmil.core.storage import write_text
    from xmil.study.faithfulness_plots import draw_summary
    from xmil.study.faithfulness_summary import FORMATS, as_text, statistics_csv, summarise

    for slide, reason in outcome.failed.items():
        print(f"{slide}: failed: {reason}")
    rows = run.rows(slides)
    if not rows:
        raise InputError(f"No slide could be measured; {run.folder / 'failures.csv'} says why.")
    summary = summarise(rows, seed=run.settings.seed)
    run.write_results(rows)
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
