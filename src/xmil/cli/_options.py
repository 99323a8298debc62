"""Options that mean the same in every command over a cohort."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Models = Annotated[
    list[Path],
    typer.Option(
        help="Checkpoint, folder of `xmil train`, or a network of yours as module:function or "
        "file.py:function; several models form an ensemble."
    ),
]
Features = Annotated[Path, typer.Option(help="Folder of feature files, or a single file.")]
CohortTable = Annotated[
    Path | None, typer.Option(help="Table of slides and labels; without it, all files are used.")
]
Labels = Annotated[str, typer.Option(help="Label column; separate several labels or values with commas.")]
Time = Annotated[str, typer.Option(help="Column with survival times.")]
Event = Annotated[str, typer.Option(help="Column with events: 1 observed, 0 censored.")]
Splits = Annotated[str, typer.Option(help="Use only slides of these splits, separated by commas.")]
By = Annotated[str, typer.Option(help="Unit of a bag: slide, or case (all slides of a case together).")]
Mpp = Annotated[float | None, typer.Option(help="Microns per level-0 pixel, if the files do not store it.")]
PatchSize = Annotated[
    int | None, typer.Option(help="Patch edge in level-0 pixels, if the files do not store it.")
]
Layout = Annotated[
    str, typer.Option("--format", help="Layout of the feature files, if it cannot be recognised.")
]
ClassNames = Annotated[
    str, typer.Option(help="Names of the classes in the model's order, if its file does not store them.")
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
Restart = Annotated[bool, typer.Option("--restart", help="Delete the earlier run in --out and start over.")]
FollowLinks = Annotated[
    bool, typer.Option(help="Follow links in input folders; links that are not followed are reported.")
]
FullDigests = Annotated[
    bool,
    typer.Option(
        "--full-digests", help="Detect changed inputs from every byte, not from head, tail and samples."
    ),
]
