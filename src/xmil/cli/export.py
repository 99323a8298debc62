"""`xmil export`: a run's scores in the formats of other programs."""

from __future__ import annotations

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen, finish_command
from xmil.runs.requests import ExportRequest


@with_examples("export run --to qupath --slides slides", "export run --to csv,parquet --out tables")
@command(ExportRequest)
def export(request: ExportRequest, screen: Screen) -> int:
    """Write each slide's scores for QuPath, ASAP, DICOM, OME-Zarr, SpatialData, and as tables."""
    from xmil.runs.heatmap import draw_slides

    folder = request.run.parent if request.run.is_file() else request.run
    drawing = {**vars(request), "out": request.out or folder / "export", "pictures": ()}
    return finish_command(draw_slides(**drawing, listener=screen), screen)
