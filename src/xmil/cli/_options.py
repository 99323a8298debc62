"""Options that mean the same in every command over a cohort."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Models = Annotated[
    list[Path],
    typer.Option(
        help="Checkpoint, folder of `xmil train`, or a network of yours as module:function or "
        "file.py:function; several are a fold ensemble."
    ),
]
Features = Annotated[Path, typer.Option(help="Folder of feature files, or one of them.")]
CohortTable = Annotated[Path | None, typer.Option(help="Table of slides and labels; all files without it.")]
Labels = Annotated[
    str, typer.Option(help="Label column; several, with commas, for several labels or values.")
]
Time = Annotated[str, typer.Option(help="Column of times, for risks.")]
Event = Annotated[str, typer.Option(help="Column of events, for risks: 1 seen, 0 censored.")]
Splits = Annotated[str, typer.Option(help="Only slides of these splits, separated by commas.")]
By = Annotated[str, typer.Option(help="What is one bag: slide, or case with all its slides.")]
Mpp = Annotated[float | None, typer.Option(help="Microns a level-0 pixel, where files lack it.")]
PatchSize = Annotated[int | None, typer.Option(help="Patch edge in level-0 pixels, where files lack it.")]
Layout = Annotated[
    str, typer.Option("--format", help="Layout of the feature files, where it cannot be told.")
]
ClassNames = Annotated[
    str, typer.Option(help="Names of the classes in the model's order, where its file lacks them.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Background = Annotated[
    str,
    typer.Option(
        help="For a model without a background: a folder of features, none, or auto (the run's own, from "
        "50 slides on). lrp measures patches against its mean."
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="Remove the earlier run in --out and begin anew.")]
FollowLinks = Annotated[
    bool, typer.Option(help="Follow links in input folders; those that are not followed are named.")
]
FullDigests = Annotated[
    bool,
    typer.Option("--full-digests", help="Tell changed inputs by every byte, not by head, tail and samples."),
]
