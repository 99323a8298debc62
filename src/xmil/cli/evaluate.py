"""`xmil evaluate`: how faithful each method is for a model, over a cohort."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xmil.cli import _options, _workers
from xmil.cli._screen import Screen, finished

if TYPE_CHECKING:
    from xmil.core.run import Run


def evaluate(
    model: Annotated[Path, typer.Option(help="Checkpoint, or a folder of `xmil train` with one model.")],
    features: _options.Features,
    out: Annotated[
        Path, typer.Option(help="Folder for results; an interrupted run continues where it stopped.")
    ],
    cohort: _options.CohortTable = None,
    label: Annotated[
        str,
        typer.Option(
            help="Label column (default: that of the training); only correctly classified slides count."
        ),
    ] = "",
    split: _options.Splits = "",
    by: _options.By = "slide",
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas; 'all' for every method that fits the model.")
    ] = "",
    modes: Annotated[
        str, typer.Option(help="remove, mask, or both; the random band and SRG use the first.")
    ] = "remove,mask",
    steps: Annotated[int, typer.Option(help="Steps per curve.")] = 100,
    orders: Annotated[int, typer.Option(help="Random orders for the band.")] = 20,
    top: Annotated[float, typer.Option(help="Share of instances used for sufficiency and necessity.")] = 0.1,
    truth: Annotated[
        Path | None, typer.Option(help="Ground truth: a folder of GeoJSON, masks or instance labels.")
    ] = None,
    truth_class: Annotated[
        str, typer.Option(help="Class that the ground truth is evidence for, by name or number.")
    ] = "1",
    truth_names: Annotated[str, typer.Option(help="QuPath classes that count, separated by commas.")] = "",
    slides: Annotated[
        Path | None,
        typer.Option(help="Folder of slides; needed for QuPath's GeoJSON of slides with a bounds offset."),
    ] = None,
    mask_downsample: Annotated[float, typer.Option(help="Level-0 pixels per pixel of the masks.")] = 1.0,
    mpp: _options.Mpp = None,
    patch_size: _options.PatchSize = None,
    format: _options.Layout = "auto",  # noqa: A002 - the word users know
    class_names: _options.ClassNames = "",
    as_json: _options.Json = False,
    best: Annotated[
        bool, typer.Option("--best", help="Name the method to trust for this model at the end.")
    ] = False,
    device: _options.Device = "cpu",
    seed: Annotated[int, typer.Option(help="Seed for ties, random orders and the bootstrap.")] = 0,
    background: _options.Background = "auto",
    restart: _options.Restart = False,
    follow_links: _options.FollowLinks = True,
    full_digests: _options.FullDigests = False,
    engine: _workers.Kind = "local",
    workers: _workers.WorkerCount = 0,
    address: _workers.Address = "",
    cpus: _workers.Cpus = 1.0,
    gpus: _workers.Gpus = 0.0,
) -> int:
    """Drop instances by each method's scores and see whether the prediction follows."""
    from xmil.runs.evaluate import evaluate_slides

    chosen = _workers.workers_of(
        engine, workers=workers, address=address, cpus=cpus, gpus=gpus, device=device
    )
    screen = Screen(as_json)
    run = evaluate_slides(
        model,
        features,
        out=out,
        cohort=cohort,
        label=label,
        split=split,
        by=by,
        methods=methods,
        modes=modes,
        steps=steps,
        orders=orders,
        top=top,
        truth=truth,
        truth_class=truth_class,
        truth_names=truth_names,
        slides=slides,
        mask_downsample=mask_downsample,
        mpp=mpp,
        patch_size=patch_size,
        format=format,
        class_names=class_names,
        device=device,
        seed=seed,
        background=background,
        restart=restart,
        workers=chosen,
        follow_links=follow_links,
        full_digests=full_digests,
        listener=screen,
    )
    if best and not as_json:
        print(_best(run))
    return finished(run, screen)


def _best(run: Run) -> str:
    named = run.about.get("best") or {}
    if not named:
        return "No slide is classified correctly, so no method can be named."
    return f"Best: {next(iter(named.values()))}"
