"""`xmil study`: blinded readings of cases with and without evidence, and their report."""

from __future__ import annotations

import json
import signal
from contextlib import suppress

import typer

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen
from xmil.runs.requests import AgreementRequest, StudyReportRequest, StudyRequest

study = typer.Typer()


@study.callback()
@with_examples("study init run --slides slides --plan study.toml --out study", "study report study")
def about() -> None:
    """Let pathologists read cases with and without evidence, blinded, and measure what they find."""


@study.command("init")
@with_examples(
    "study init run --slides slides --plan study.toml --out study",
    "study init run evaluated --slides slides --plan study.toml --out study",
)
@command(StudyRequest)
def init(request: StudyRequest, screen: Screen) -> int:
    """Set up a reading study from runs and a plan: cases, arms, and an order for each reader.

    `xmil view STUDY` serves it.
    """
    from xmil.viewer.study import make_study, read_plan, sample_size

    plan = read_plan(request.plan)
    with suppress(ValueError):  # signals belong to the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no labels and codes are left
    made = make_study(request.runs, slides=request.slides, plan=plan, out=request.out, say=screen.say)
    for reader, code in made.codes.items():
        screen.say(f"{reader}: code {code}")
    screen.say(sample_size(made.plan, len({case.patient for case in made.cases})))
    screen.say(f"Written to {request.out}; serve it with: xmil view {request.out}")
    if screen.as_json:
        counts = {"cases": len(made.cases), "practice": len(made.practice)}
        print(json.dumps({"out": str(request.out), **counts, "readers": made.codes, "said": screen.lines}))
    return 0


@study.command("agreement")
@with_examples(
    "study agreement run --annotations run/annotations",
    "study agreement run --annotations qupath --slides slides --out compared",
)
@command(AgreementRequest)
def agreement(request: AgreementRequest, screen: Screen) -> int:
    """Compare a run's scores with the regions that readers drew in the viewer or in QuPath."""
    from xmil.runs.agreement import measure_agreement

    found = measure_agreement.run(request, listener=screen)
    if screen.as_json:
        print(json.dumps({"summary": found.summary, "left_out": found.left_out, "said": screen.lines}))
    return 0


@study.command("report")
@with_examples("study report study", "study report study --out report")
@command(StudyReportRequest)
def report(request: StudyReportRequest, screen: Screen) -> int:
    """Write what the readers of a study found: one HTML page, and tables for R."""
    from xmil.viewer.study import open_study, write_report

    folder = write_report(open_study(request.study), request.out)
    screen.say(f"Written to {folder / 'report.html'}.")
    if screen.as_json:
        print(json.dumps({"out": str(folder)}))
    return 0
