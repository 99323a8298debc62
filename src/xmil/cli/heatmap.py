"""`xmil heatmap`: a run's scores as pictures, and as files for QuPath and other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xmil.cli import _options, _workers
from xmil.cli._screen import Screen, command, finished
from xmil.core.errors import InputError


def heatmap(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or one explanation file (.parquet).")],
    slides: Annotated[
        Path | None, typer.Option(help="Folder of slides; without it, scores are drawn alone.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the files; RUN/heatmaps by default.")] = None,
    names: Annotated[str, typer.Option(help="Draw only these slides, separated by commas.")] = "",
    methods: Annotated[str, typer.Option(help="Draw only these methods, in this order.")] = "",
    target: Annotated[str, typer.Option(help="Only these explained classes, or 'predicted'.")] = "",
    pictures: Annotated[
        str, typer.Option(help="Of panel, overlay, side, patches, map; 'none' for exports alone.")
    ] = "panel,overlay,patches",
    formats: Annotated[str, typer.Option(help="Of png, pdf, svg.")] = "png",
    exports: Annotated[
        str, typer.Option(help="Of geojson (QuPath), scores and colours (OME-TIFF), csv, parquet; or 'none'.")
    ] = "geojson",
    clip: Annotated[str, typer.Option(help="whiskers (1.5 IQR), percentile or none.")] = "whiskers",
    percentile: Annotated[float, typer.Option(help="With --clip percentile.")] = 99.0,
    scale: Annotated[
        str, typer.Option(help="slide: a colour scale per slide; cohort: one scale for all slides.")
    ] = "slide",
    alpha: Annotated[float, typer.Option(help="Opacity of the colours over the slide, 0 to 1.")] = 0.5,
    tissue: Annotated[str, typer.Option(help="Show the slide under the colours in grey or colour.")] = "grey",
    size: Annotated[int, typer.Option(help="Pixels of a picture's longer edge.")] = 1200,
    region: Annotated[str, typer.Option(help="Zoom: x,y,width,height in level-0 pixels.")] = "",
    top: Annotated[int, typer.Option(help="Number of highest and lowest patches on a sheet.")] = 8,
    pairs: Annotated[
        int,
        typer.Option(help="Most lines between patches that act together, if the run has interactions."),
    ] = 30,
    mpp: Annotated[
        float | None, typer.Option(help="Microns per level-0 pixel, if no file stores it.")
    ] = None,
    patch_size: Annotated[int | None, typer.Option(help="Patch edge in level-0 pixels, if unknown.")] = None,
    frame: Annotated[
        str, typer.Option(help="Origin of exported coordinates: the scanned bounds, as in QuPath, or level0.")
    ] = "bounds",
    downsample: Annotated[
        int | None,
        typer.Option(help="Level-0 pixels per OME-TIFF pixel; by default 1 unless the slide is very wide."),
    ] = None,
    as_json: _options.Json = False,
    restart: Annotated[bool, typer.Option("--restart", help="Draw existing files again.")] = False,
    follow_links: _options.FollowLinks = True,
    full_digests: _options.FullDigests = False,
    engine: _workers.Kind = "local",
    workers: _workers.WorkerCount = 0,
    address: _workers.Address = "",
) -> int:
    """Draw each slide's scores: overlays, panels, patch sheets; GeoJSON, OME-TIFF, tables."""
    from xmil.heatmaps.picture import Look
    from xmil.runs.heatmap import draw_slides

    if scale not in ("slide", "cohort"):
        raise InputError(f"--scale must be slide or cohort. Got {scale!r} instead.")
    screen = Screen(as_json)
    drawn = draw_slides(
        run,
        slides=slides,
        out=out,
        names=names,
        methods=methods,
        target=target,
        pictures=pictures,
        formats=formats,
        exports=exports,
        look=Look(
            clip,
            percentile,
            _share(alpha),
            tissue,
            _positive(size, "--size"),
            _region(region),
            top,
            pairs=_positive(pairs, "--pairs", least=0),
        ),
        scale=scale,
        mpp=mpp,
        patch_size=patch_size,
        frame=frame,
        downsample=downsample,
        restart=restart,
        workers=_workers.workers_of(engine, workers=workers, address=address),
        follow_links=follow_links,
        full_digests=full_digests,
        listener=screen,
    )
    shown = ("--slides", slides) if slides is not None else ()
    return finished(drawn, screen, then=command("xmil", "view", run, *shown))


def _share(alpha: float) -> float:
    if not 0 <= alpha <= 1:
        raise InputError(f"--alpha must be in the range [0, 1]. Got {alpha:g} instead.")
    return alpha


def _positive(value: int, option: str, *, least: int = 1) -> int:
    if value < least:
        raise InputError(f"{option} must be {least} or more. Got {value} instead.")
    return value


def _region(text: str) -> tuple[float, float, float, float] | None:
    if not text.strip():
        return None
    try:
        x, y, width, height = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--region must be x,y,width,height in level-0 pixels. Got {text!r} instead."
        ) from None
    return x, y, width, height
