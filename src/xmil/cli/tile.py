"""`xmil tile`: lay patches on the tissue of slides."""

from __future__ import annotations

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen, finish_command
from xmil.runs.requests import TileRequest


@with_examples("tile slides --out tiles", "tile slide.svs --mpp 0.25 --drop pen,blur --out tiles")
@command(TileRequest)
def tile(request: TileRequest, screen: Screen) -> int:
    """Lay patches on the tissue of slides; write corners in TRIDENT's layout, outlines and overviews."""
    from xmil.cli.inspect import embedding
    from xmil.runs.tile import tile_slides

    run = tile_slides.run(request, listener=screen)
    folders = {path if path.is_dir() else path.parent for path in request.slides}
    return finish_command(
        run, screen, then=embedding(request.out, folders.pop() if len(folders) == 1 else None)
    )
