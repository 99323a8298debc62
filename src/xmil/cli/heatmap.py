"""`xmil heatmap`: draw a run's scores, and write files for QuPath and other programs."""

from __future__ import annotations

from pathlib import Path

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen, finish_command, view_command
from xmil.runs.requests import DrawRequest


@with_examples(
    "heatmap run --slides slides",
    "heatmap run --slides slides --to pdf,csv --scale cohort --out figures",
)
@command(DrawRequest)
def heatmap(request: DrawRequest, screen: Screen) -> int:
    """Draw each slide's scores: overlays, panels, patch sheets; GeoJSON, OME-TIFF and tables."""
    from xmil.runs.heatmap import draw_slides
    from xmil.storage import Run

    drawn = draw_slides.run(request, listener=screen)
    view = view_command(request.run, slides=request.slides, mpp=request.mpp)
    code = finish_command(drawn, screen, then="" if Path(request.run).is_file() else view)
    return code or int(Path(request.run).is_dir() and not Run(request.run).is_finished)
