"""`xmil predict`: predict every slide with a model or an ensemble, and measure how good it is."""

from __future__ import annotations

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen, finish_command
from xmil.runs.requests import PredictRequest


@with_examples(
    "predict --model model.pt --features features --out predictions",
    "predict --model models --features features --cohort cohort.csv --out predictions",
)
@command(PredictRequest)
def predict(request: PredictRequest, screen: Screen) -> int:
    """Predict every slide: probabilities, values or risks, and measures if the labels are known."""
    from xmil.runs.predict import predict_slides

    return finish_command(predict_slides.run(request, listener=screen), screen)
