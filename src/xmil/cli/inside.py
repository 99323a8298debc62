"""`xmil inside`: what in a patch speaks for the class."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xmil.cli import _options, _workers
from xmil.cli._screen import Screen, finished


def inside(
    run: Annotated[Path, typer.Argument(help="Folder of a run of `xmil explain` with lrp.")],
    slides: Annotated[Path, typer.Option(help="Folder of slides.")],
    encoder: Annotated[str, typer.Option(help="The encoder that made the features; see `xmil embed`.")],
    weights: Annotated[Path | None, typer.Option(help="State dict of the encoder.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="The run's checkpoint; needed if no relevance vectors are stored.")
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(help="Feature files; without them and without vectors, patches are encoded again."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the maps; RUN/inside by default.")] = None,
    patches: Annotated[int, typer.Option(help="Number of strongest patches per slide.")] = 16,
    method: Annotated[
        str, typer.Option(help="turned, tokens, lrp, occlusion, keep, shifted, ig or gradient.")
    ] = "turned",
    target: Annotated[str, typer.Option(help="Explained class, if the run has several.")] = "",
    patch_px: Annotated[
        int | None, typer.Option(help="Patch size in pixels, as given to the encoder.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    random: Annotated[bool, typer.Option("--random", help="Use an untrained encoder, for testing.")] = False,
    format: _options.Layout = "auto",  # noqa: A002 - the word users know
    as_json: _options.Json = False,
    tiff: Annotated[bool, typer.Option("--tiff", help="Write the maps as OME-TIFF as well.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Delete earlier maps and start over.")] = False,
    engine: _workers.Kind = "local",
    workers: _workers.WorkerCount = 0,
    address: _workers.Address = "",
    follow_links: _options.FollowLinks = True,
) -> int:
    """Map where inside the strongest patches their scores come from; sheets and tiles for QuPath."""
    from xmil.runs.inside import inside_slides

    screen = Screen(as_json)
    found = inside_slides(
        run,
        slides=slides,
        encoder=encoder,
        weights=weights,
        model=model,
        features=features,
        out=out,
        patches=patches,
        method=method,
        target=target or None,
        patch_px=patch_px,
        device=device,
        random=random,
        tiff=tiff,
        format=format,
        restart=restart,
        workers=_workers.workers_of(engine, workers=workers, address=address, device=device),
        follow_links=follow_links,
        listener=screen,
    )
    return finished(found, screen)
