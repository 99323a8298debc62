"""`xmil tile`: patches on the tissue of slides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xmil.cli._options import FollowLinks, FullDigests, Json
from xmil.cli._screen import Screen, finished
from xmil.cli._workers import Address, Cpus, Kind, WorkerCount, workers_of


def tile(
    slides: Annotated[list[Path], typer.Argument(help="Slides, or folders of slides.")],
    out: Annotated[
        Path, typer.Option(help="Folder for the patches; an interrupted run continues where it stopped.")
    ],
    size: Annotated[int, typer.Option(help="Patch size in pixels.")] = 256,
    mpp: Annotated[float, typer.Option(help="Microns per pixel of a patch.")] = 0.5,
    overlap: Annotated[int, typer.Option(help="Pixels that neighbouring patches share.")] = 0,
    magnification: Annotated[
        float | None, typer.Option(help="Magnification instead of --mpp: 20 is 0.5 µm/px, 40 is 0.25.")
    ] = None,
    slide_mpp: Annotated[
        float | None, typer.Option(help="Microns per level-0 pixel, for slides that do not store it.")
    ] = None,
    min_tissue: Annotated[float, typer.Option(help="Minimum share of tissue in a patch.")] = 0.25,
    min_std: Annotated[
        float, typer.Option(help="Minimum standard deviation of a patch's grey values.")
    ] = 8.0,
    pen: Annotated[bool, typer.Option(help="Keep patches with pen marks, or leave them out.")] = False,
    fold: Annotated[bool, typer.Option(help="Keep patches with folded tissue.")] = True,
    blur: Annotated[bool, typer.Option(help="Keep patches out of focus.")] = True,
    coverslip: Annotated[bool, typer.Option(help="Keep patches with the coverslip's edge.")] = True,
    keep_edge: Annotated[
        bool,
        typer.Option("--keep-edge", help="Also patches over the slide's right and lower border."),
    ] = False,
    as_json: Json = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete the earlier run in --out and start over.")
    ] = False,
    follow_links: FollowLinks = True,
    full_digests: FullDigests = False,
    engine: Kind = "local",
    workers: WorkerCount = 0,
    address: Address = "",
    cpus: Cpus = 1.0,
) -> int:
    """Lay patches on the tissue of slides: corners in TRIDENT's layout, outlines, overview pictures."""
    from xmil.cli._next_step import embedding
    from xmil.runs.tile import tile_slides

    screen = Screen(as_json)
    run = tile_slides(
        slides,
        out=out,
        size=size,
        mpp=mpp,
        overlap=overlap,
        magnification=magnification,
        slide_mpp=slide_mpp,
        min_tissue=min_tissue,
        min_std=min_std,
        pen=pen,
        fold=fold,
        blur=blur,
        coverslip=coverslip,
        keep_edge=keep_edge,
        restart=restart,
        workers=workers_of(engine, workers=workers, address=address, cpus=cpus),
        follow_links=follow_links,
        full_digests=full_digests,
        listener=screen,
    )
    folders = {path if path.is_dir() else path.parent for path in slides}
    return finished(run, screen, then=embedding(out, folders.pop() if len(folders) == 1 else None))
