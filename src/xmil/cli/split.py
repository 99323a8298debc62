"""`xmil split`: folds or fractions by case, written back into the cohort table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xmil.cli._command import Json
from xmil.core.errors import InputError

if TYPE_CHECKING:
    from xmil.data import Cohort


def split(
    cohort: Annotated[Path, typer.Argument(help="CSV or Parquet table, or the paper's metadata folder.")],
    folds: Annotated[int | None, typer.Option(help="Number of folds, written to the column `fold`.")] = None,
    fractions: Annotated[
        str, typer.Option(help="Shares by name, if no folds are requested.")
    ] = "train=0.6,val=0.15,test=0.25",
    stratify: Annotated[str | None, typer.Option(help="Label column to stratify by.")] = None,
    sites: Annotated[
        str | None, typer.Option(help="Column of sites; all cases of a site go to the same side.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    column: Annotated[str | None, typer.Option(help="Column to write: `fold` or `split` by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; the table itself by default.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the column if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Split a cohort by case, so that no case lies on two sides, and write the split as a column."""
    from xmil.data import read_cohort, split_folds, split_fractions

    table = read_cohort(cohort)
    name = column or ("fold" if folds is not None else "split")
    if name in table.columns and not overwrite:
        raise InputError(f"{cohort}: has a column {name!r} already; pass --overwrite, or --column another.")
    if folds is not None:
        done = split_folds(table, folds, stratify=stratify, seed=seed, column=name, sites=sites)
    else:
        try:
            pairs = [part.split("=") for part in fractions.split(",")]
            shares = {side.strip(): float(share) for side, share in pairs}
        except ValueError:
            raise InputError(
                f"Shares must look like train=0.8,test=0.2. Got {fractions!r} instead."
            ) from None
        done = split_fractions(table, shares, stratify=stratify, seed=seed, column=name, sites=sites)
    target = out or cohort
    if target.is_dir():
        raise InputError(f"{target}: is a folder; name the table to write with --out.")
    done.save(target)
    if as_json:
        print(json.dumps({"out": str(target), "column": name, "sides": _sides(done, name)}, indent=2))
        return
    _say(done, name, target, stratify=stratify)


def _sides(cohort: Cohort, column: str) -> dict[str, dict[str, int]]:
    """Slides and cases of each side; those on none under an empty name."""
    sides: dict[str, list[str]] = {}
    for cell, case in zip(cohort.column(column), cohort.cases, strict=True):
        sides.setdefault(cell or "", []).append(case)
    return {side: {"slides": len(cases), "cases": len(set(cases))} for side, cases in sorted(sides.items())}


def _say(cohort: Cohort, column: str, path: Path, *, stratify: str | None) -> None:
    cells = cohort.column(column)
    print(f"{path}: wrote {column!r}, split by case ({len(set(cohort.cases))} cases, none on two sides)")
    for side in sorted({cell for cell in cells if cell is not None}):
        rows = [i for i, cell in enumerate(cells) if cell == side]
        cases = len({cohort.cases[i] for i in rows})
        labels = Counter(cohort.column(stratify)[i] for i in rows) if stratify else {}
        mix = ", ".join(f"{label}: {count}" for label, count in sorted(labels.items(), key=str))
        print(f"  {side:<8} {len(rows):>6} slides {cases:>6} cases" + (f"   {stratify} {mix}" if mix else ""))
    empty = sum(cell is None for cell in cells)
    if empty:
        print(f"  {'(none)':<8} {empty:>6} slides without {stratify}")
