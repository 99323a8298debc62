"""`xmil evaluate`: how faithful each method is for a model, over a cohort."""

from __future__ import annotations

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen, finish_command
from xmil.runs.requests import EvaluateRequest


@with_examples(
    "evaluate --model model.pt --features features --out evaluated",
    "evaluate --model model.pt --features features --truth regions --out against-truth",
)
@command(EvaluateRequest)
def evaluate(request: EvaluateRequest, screen: Screen) -> int:
    """Measure how faithful each method is: drop patches by its scores and watch the prediction."""
    from xmil.runs.evaluate import evaluate_slides

    run = evaluate_slides.run(request, listener=screen)
    best = next(iter((run.about.get("best") or {}).values()), None)
    screen.say(best or "The model classifies no slide correctly, so there is no method to recommend.")
    return finish_command(run, screen)
