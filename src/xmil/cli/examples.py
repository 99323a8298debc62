"""`xmil examples`: ten tasks, ten commands."""

from __future__ import annotations

import json

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen
from xmil.core.request import Request

EXAMPLES = {
    "See everything work on made-up slides": "xmil demo",
    "Find out what a file or folder is": "xmil inspect features/ model.pt slide.svs",
    "Explain one slide": "xmil explain --model model.pt --features slide.h5 --out run",
    "Explain a cohort for every class": (
        "xmil explain --model model.pt --features features/ --target all --out run"
    ),
    "Draw heatmaps and files for QuPath": "xmil heatmap run --slides slides/",
    "Look at slides and evidence in the browser": "xmil view run --slides slides/",
    "Find the method to trust for this model": (
        "xmil evaluate --model model.pt --features features/ --cohort cohort.csv --out check"
    ),
    "Go from slides to features": (
        "xmil tile slides/ --out tiles && xmil embed --tiles tiles --slides slides/ --encoder resnet50"
    ),
    "Train a model": "xmil train config.toml",
    "Compare methods on bags whose evidence is known": "xmil bench --suite paper --quick",
}


class ExamplesRequest(Request):
    """Ten tasks, with the command for each."""


@with_examples("examples", "examples --json")
@command(ExamplesRequest)
def examples(request: ExamplesRequest, screen: Screen) -> int:  # noqa: ARG001  # it has no options
    """Print ten tasks with the command for each."""
    if screen.as_json:
        print(json.dumps(EXAMPLES, indent=2))
        return 0
    for task, words in EXAMPLES.items():
        print(f"{task}:\n    {words}\n")
    return 0
