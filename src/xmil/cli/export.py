"""`xmil export`: a run's scores in the formats of other programs."""

from __future__ import annotations

from xmil.cli._command import command
from xmil.cli._screen import Screen, finished
from xmil.runs.requests import ExportRequest


@command(ExportRequest)
def export(request: ExportRequest, screen: Screen) -> int:
    """Write each slide's scores for QuPath, ASAP, DICOM, OME-Zarr, SpatialData and tables."""
    from xmil.runs.heatmap import draw_slides

    folder = request.run.parent if request.run.is_file() else request.run
    written = draw_slides(
        request.run,
        slides=request.slides,
        out=request.out or folder / "export",
        pictures=(),
        to=request.to,
        methods=request.methods,
        target=request.target,
        mpp=request.mpp,
        patch_size=request.patch_size,
        restart=request.restart,
        follow_links=request.follow_links,
        listener=screen,
    )
    return finished(written, screen)
