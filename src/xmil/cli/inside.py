"""`xmil inside`: which parts of a patch support the class."""

from __future__ import annotations

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen, finish_command
from xmil.runs.requests import InsideRequest


@with_examples(
    "inside run --slides slides --encoder resnet50",
    "inside run --slides slides --encoder resnet50 --patches 4 --map lrp",
)
@command(InsideRequest)
def inside(request: InsideRequest, screen: Screen) -> int:
    """Map where inside the strongest patches the scores come from; sheets, and tiles for QuPath."""
    from xmil.runs.inside import inside_slides

    return finish_command(inside_slides.run(request, listener=screen), screen)
