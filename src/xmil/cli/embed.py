"""`xmil embed`: features of the patches of slides."""

from __future__ import annotations

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen, command_line, finish_command
from xmil.runs.requests import EmbedRequest


@with_examples(
    "embed --tiles tiles --slides slides --encoder resnet50",
    "embed --tiles tiles --slides slides --encoder resnet18 --config stain_norm=true --out features",
)
@command(EmbedRequest)
def embed(request: EmbedRequest, screen: Screen) -> int:
    """Turn the patches of slides into features: one file per slide, in TRIDENT's layout."""
    from xmil.runs.embed import embed_slides

    run = embed_slides.run(request, listener=screen)
    words = ("xmil", "explain", "--model", "MODEL", "--features", run.path, "--out", "run")
    return finish_command(run, screen, then=command_line(*words, "--slides", *request.slides[:1]))
