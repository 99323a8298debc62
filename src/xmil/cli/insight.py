"""`xmil insight`: what the model looks at over a cohort."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xmil.cli import _options, _workers
from xmil.cli._screen import Screen, finished


def insight(
    run: Annotated[Path, typer.Argument(help="Folder of a run of `xmil explain`.")],
    features: Annotated[Path, typer.Option(help="Folder of the feature files that were explained.")],
    cohort: Annotated[
        Path | None, typer.Option(help="Table with labels and columns of acquisition (site, scanner, ...).")
    ] = None,
    slides: Annotated[
        Path | None,
        typer.Option(help="Folder of slides, for image properties of patches and examples in the report."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="The run's checkpoint, or its training folder; for concepts, and stability over folds."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the findings; RUN/insight by default.")] = None,
    method: Annotated[str, typer.Option(help="Method whose explanations are analysed.")] = "lrp",
    target: Annotated[str, typer.Option(help="Explained class, if the run has several.")] = "",
    label: Annotated[
        str, typer.Option(help="Label column; it is an outcome and never tested as a cause.")
    ] = "label",
    concepts: Annotated[int, typer.Option(help="Size of the dictionary.")] = 20,
    dictionary: Annotated[str, typer.Option(help="kmeans, nmf (features >= 0) or topk.")] = "kmeans",
    causes: Annotated[str, typer.Option(help="Columns to test, separated by commas, or all.")] = "",
    beside: Annotated[
        str, typer.Option(help="Further runs of the same slides (folds, seeds), separated by commas.")
    ] = "",
    evaluated: Annotated[
        Path | None, typer.Option(help="Run of `xmil evaluate`, for certificates in the card and the album.")
    ] = None,
    album: Annotated[bool, typer.Option("--album", help="Write album.pdf, one page per slide.")] = False,
    regions: Annotated[
        Path | None,
        typer.Option(help="Folder of annotations, SLIDE.geojson; biomarkers within them are added."),
    ] = None,
    within: Annotated[
        str, typer.Option(help="Classes of annotations that make a region, separated by commas, or all.")
    ] = "",
    sanity: Annotated[
        int, typer.Option(help="Slides for the card's sanity tests, with --model; 0 for none.", min=0)
    ] = 10,
    seed: Annotated[int, typer.Option(help="Seed for the sample, the dictionary and the tests.")] = 0,
    format: _options.Layout = "auto",  # noqa: A002 - the word users know
    as_json: _options.Json = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete earlier findings and start over.")
    ] = False,
    engine: _workers.Kind = "local",
    workers: _workers.WorkerCount = 0,
    address: _workers.Address = "",
    follow_links: _options.FollowLinks = True,
) -> int:
    """Find concepts, strategies, shortcuts and biomarkers over a run; write a report and a card."""
    from xmil.runs.insight import insight as look

    screen = Screen(as_json)
    found = look(
        run,
        features=features,
        cohort=cohort,
        slides=slides,
        model=model,
        out=out,
        method=method,
        target=target or None,
        label=label,
        concepts=concepts,
        dictionary=dictionary,
        causes=causes,
        beside=beside,
        evaluated=evaluated,
        album=album,
        regions=regions,
        within=within,
        sanity=sanity,
        seed=seed,
        format=format,
        restart=restart,
        workers=_workers.workers_of(engine, workers=workers, address=address),
        follow_links=follow_links,
        listener=screen,
    )
    return finished(found, screen)
