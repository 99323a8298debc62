"""`xmil tile`: patches on the tissue of slides."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xmil.cli._workers import Address, Cpus, Kind, WorkerCount
from xmil.core.names import counted

if TYPE_CHECKING:
    from xmil.runs.slidewise import Results


def tile(
    slides: Annotated[list[Path], typer.Argument(help="Slides, or folders of slides.")],
    out: Annotated[Path, typer.Option(help="Folder for the patches; a run goes on where it stopped.")],
    size: Annotated[int, typer.Option(help="Edge of a patch in its own pixels.")] = 256,
    mpp: Annotated[float, typer.Option(help="Microns a pixel of a patch.")] = 0.5,
    overlap: Annotated[int, typer.Option(help="Pixels that neighbouring patches share.")] = 0,
    magnification: Annotated[
        float | None, typer.Option(help="In place of --mpp: 20 is 0.5 µm/px, 40 is 0.25.")
    ] = None,
    slide_mpp: Annotated[
        float | None, typer.Option(help="Microns a pixel of level 0, for slides that do not store it.")
    ] = None,
    min_tissue: Annotated[float, typer.Option(help="Share of a patch that must be tissue.")] = 0.25,
    min_std: Annotated[float, typer.Option(help="Least standard deviation of a patch's grey values.")] = 8.0,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew.")] = False,
    engine: Kind = "local",
    workers: WorkerCount = 0,
    address: Address = "",
    cpus: Cpus = 1.0,
) -> int:
    """Lay patches on the tissue of slides: corners in TRIDENT's layout, outlines, overview pictures."""
    from xmil.cli._cohort import progress_bar
    from xmil.cli._slide import named_slides
    from xmil.cli._workers import workers_of
    from xmil.runs.tile import tile_slides
    from xmil.slides.tiling import TileSettings

    settings = TileSettings(
        size=size,
        mpp=mpp,
        overlap=overlap,
        min_tissue=min_tissue,
        min_std=min_std,
        slide_mpp=slide_mpp,
        magnification=magnification,
    )
    found = named_slides(slides)
    where = workers_of(engine, workers=workers, address=address, cpus=cpus)
    with progress_bar("slides", len(found.slides)) as advance:
        results = tile_slides(
            found.slides,
            out,
            settings,
            engine=where,
            restart=restart,
            on_slide=advance,
            refused=found.twice,
        )
    return _report(results, out)


def _report(results: Results, out: Path) -> int:
    from xmil.cli._slide import report_run

    for name, done in results.done.items():
        for note in done["inferred"]:
            print(f"{name}: {note}")
    patches = sum(done["patches"] for done in results.done.values())
    return report_run(results, f"{counted(patches, 'patch')} on {counted(len(results.done), 'slide')}", out)
