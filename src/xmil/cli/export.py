"""`xmil export`: a run's scores in the formats of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xmil.cli import _options
from xmil.cli._screen import Screen, finished


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or one explanation file (.parquet).")],
    to: Annotated[
        str,
        typer.Option(
            help="Of qupath (gzipped GeoJSON), asap (XML), dicom (Parametric Map), dicom-annotations, "
            "ome-zarr, spatialdata, geojson, scores, colours (OME-TIFF), csv, parquet."
        ),
    ],
    slides: Annotated[
        Path | None,
        typer.Option(help="Folder of slides; needed for coordinates in microns or with an offset."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the files; RUN/export by default.")] = None,
    methods: Annotated[str, typer.Option(help="Export only these methods, separated by commas.")] = "",
    target: Annotated[str, typer.Option(help="Only these explained classes, or 'predicted'.")] = "",
    mpp: Annotated[
        float | None, typer.Option(help="Microns per level-0 pixel, if no file stores it.")
    ] = None,
    patch_size: Annotated[int | None, typer.Option(help="Patch edge in level-0 pixels, if unknown.")] = None,
    as_json: _options.Json = False,
    restart: Annotated[bool, typer.Option("--restart", help="Write existing files again.")] = False,
    follow_links: _options.FollowLinks = True,
) -> int:
    """Write each slide's scores for QuPath, ASAP, DICOM, OME-Zarr, SpatialData and tables."""
    from xmil.runs.heatmap import draw_slides

    folder = run.parent if run.is_file() else run
    screen = Screen(as_json)
    made = draw_slides(
        run,
        slides=slides,
        out=out or folder / "export",
        pictures=(),
        exports=to,
        methods=methods,
        target=target,
        mpp=mpp,
        patch_size=patch_size,
        restart=restart,
        follow_links=follow_links,
        listener=screen,
    )
    return finished(made, screen)
