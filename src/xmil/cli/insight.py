"""`xmil insight`: what the model looks at over a cohort."""

from __future__ import annotations

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen, finish_command
from xmil.runs.requests import InsightRequest


@with_examples("insight run", "insight run --slides slides --cohort cohort.csv --config causes=site --album")
@command(InsightRequest)
def insight(request: InsightRequest, screen: Screen) -> int:
    """Find concepts, strategies, shortcuts and biomarkers in a run; write a report and a card."""
    from xmil.insights import insight as run_insight

    return finish_command(run_insight.run(request, listener=screen), screen)
