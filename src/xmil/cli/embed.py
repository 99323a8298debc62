"""`xmil embed`: features of the patches of slides."""

from __future__ import annotations

from xmil.cli._command import command
from xmil.cli._screen import Screen, command_line, finished
from xmil.runs.requests import EmbedRequest


@command(EmbedRequest)
def embed(request: EmbedRequest, screen: Screen) -> int:
    """Encode the patches of slides; features in TRIDENT's layout, one file per slide."""
    from xmil.runs.embed import embed_slides

    run = embed_slides.run(request, listener=screen)
    words = ("xmil", "explain", "--model", "MODEL", "--features", run.path, "--out", "run")
    return finished(run, screen, then=command_line(*words, "--slides", *request.slides[:1]))
