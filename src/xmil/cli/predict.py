"""`xmil predict`: what a model, or an ensemble, says of every slide, and how good it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xmil.cli import _options, _workers
from xmil.cli._screen import Screen, finished


def predict(
    model: _options.Models,
    features: _options.Features,
    out: Annotated[Path, typer.Option(help="Folder for results.")],
    cohort: _options.CohortTable = None,
    label: _options.Labels = "",
    time: _options.Time = "time",
    event: _options.Event = "event",
    split: _options.Splits = "",
    by: _options.By = "slide",
    draws: Annotated[int, typer.Option(help="Bootstrap draws, over cases.")] = 1000,
    instances: Annotated[int, typer.Option(help="Sample this many patches per slide; 0 uses all.")] = 0,
    repetitions: Annotated[int, typer.Option(help="How often to sample; outputs are averaged.")] = 1,
    mpp: _options.Mpp = None,
    patch_size: _options.PatchSize = None,
    format: _options.Layout = "auto",  # noqa: A002 - the word users know
    class_names: _options.ClassNames = "",
    as_json: _options.Json = False,
    device: _options.Device = "cpu",
    seed: Annotated[int, typer.Option(help="Seed for the bootstrap and the sampled patches.")] = 0,
    restart: _options.Restart = False,
    follow_links: _options.FollowLinks = True,
    full_digests: _options.FullDigests = False,
    engine: _workers.Kind = "local",
    workers: _workers.WorkerCount = 0,
    address: _workers.Address = "",
    cpus: _workers.Cpus = 1.0,
    gpus: _workers.Gpus = 0.0,
) -> int:
    """Predict every slide: probabilities, values or risks, with measures where the truth is known."""
    from xmil.runs.predict import predict_slides

    chosen = _workers.workers_of(
        engine, workers=workers, address=address, cpus=cpus, gpus=gpus, device=device
    )
    screen = Screen(as_json)
    run = predict_slides(
        model,
        features,
        out=out,
        cohort=cohort,
        label=label,
        time=time,
        event=event,
        split=split,
        by=by,
        draws=draws,
        instances=instances,
        repetitions=repetitions,
        mpp=mpp,
        patch_size=patch_size,
        format=format,
        class_names=class_names,
        device=device,
        seed=seed,
        restart=restart,
        workers=chosen,
        follow_links=follow_links,
        full_digests=full_digests,
        listener=screen,
    )
    return finished(run, screen)
