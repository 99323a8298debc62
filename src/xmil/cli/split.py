"""`xmil split`: write folds or fractions by case into the cohort table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen
from xmil.core.errors import InputError, XmilError
from xmil.core.request import Request, option
from xmil.core.text import counted

if TYPE_CHECKING:
    from xmil.data import Cohort


class SplitRequest(Request):
    """Split a cohort by case."""

    cohort: Path = option("CSV or Parquet table, or the paper's metadata folder.", argument=True)
    folds: int | None = option("Number of folds, written to the column `fold`.", None)
    fractions: str = option("Shares by name, if no folds are requested.", "train=0.6,val=0.15,test=0.25")
    stratify: str | None = option("Label column to stratify by.", None)
    sites: str | None = option("Column of sites; all cases of a site go to the same side.", None)
    seed: int = option("Seed of the split.", 0)
    slide_column: str | None = option("Column that names the slides, if it is not found by its name.", None)
    column: str | None = option("Column to write: `fold` or `split` by default.", None)
    out: Path | None = option("Where to write; the table itself by default.", None)
    overwrite: bool = option("Replace the column, or the file at --out, if it exists.", False)


@with_examples(
    "split cohort.csv --folds 5 --stratify label",
    "split cohort.csv --fractions train=0.7,val=0.1,test=0.2 --out split.csv",
)
@command(SplitRequest)
def split(request: SplitRequest, screen: Screen) -> int:
    """Split a cohort by case into folds, or into training, validation and test sets."""
    from xmil.data import read_cohort, split_folds, split_fractions
    from xmil.data.cohort import CASE
    from xmil.data.splits import check_labels

    cohort, column, stratify = request.cohort, request.column, request.stratify
    table = read_cohort(cohort, slide_column=request.slide_column)
    if table.taken and not screen.as_json:
        print(f"{cohort}: {table.taken}.")
    if stratify is not None:
        check_labels(table, stratify)
    name = column or ("fold" if request.folds is not None else "split")
    written = table.names.get(name, name)  # the table's spelling
    if (name in table.columns or name in table.names.values()) and not request.overwrite:
        raise InputError(
            f"{cohort}: has a column {written!r} already; pass --overwrite, or another --column."
        )
    if request.folds is not None:
        done = split_folds(
            table, request.folds, stratify=stratify, seed=request.seed, column=name, sites=request.sites
        )
    else:
        try:
            pairs = [part.split("=") for part in request.fractions.split(",")]
            shares = {side.strip(): float(share) for side, share in pairs}
        except ValueError:
            raise InputError(
                f"Shares must look like train=0.8,test=0.2. Got {request.fractions!r} instead."
            ) from None
        done = split_fractions(
            table, shares, stratify=stratify, seed=request.seed, column=name, sites=request.sites
        )
    target = request.out or cohort
    if target.is_dir():
        raise InputError(f"{target}: is a folder; name a table as --out.")
    if (
        not request.overwrite
        and target.exists()
        and not target.samefile(cohort)
        and not _holds(target, table, name, request.slide_column)
    ):
        raise InputError(f"{target}: already exists with another table; pass --overwrite, or another `out=`.")
    done.save_column(name, target)
    cases = done.cases
    sides: dict[str, list[int]] = {}  # rows of each side; an empty name for rows without one
    for row, cell in enumerate(done.column(name)):
        sides.setdefault(cell or "", []).append(row)
    counts = {
        side: {"slides": len(rows), "cases": len({cases[i] for i in rows})}
        for side, rows in sorted(sides.items())
    }
    if screen.as_json:
        print(json.dumps({"out": str(target), "column": written, "sides": counts}, indent=2))
        return 0
    unit = f"split by case ({counted(len(set(cases)), 'case')}, none on two sides)"
    if CASE not in table.columns:
        unit = f"split by slide: without {CASE}, slides of one patient may be on two sides"
    print(f"{target}: wrote {written!r}, {unit}")
    empty = counts.pop("", None)
    for side, count in counts.items():
        labels = Counter(map(done.column(stratify).__getitem__, sides[side])) if stratify else {}
        mix = ", ".join(f"{label}: {n}" for label, n in sorted(labels.items(), key=str))
        line = f"  {side:<8} {count['slides']:>6} slides {count['cases']:>6} cases"
        print(line + (f"   {stratify} {mix}" if mix else ""))
    if empty:
        print(f"  {'(none)':<8} {empty['slides']:>6} slides without {stratify}")
    return 0


def _holds(path: Path, table: Cohort, column: str, slide_column: str | None) -> bool:
    """Whether a file has the same table except for one column, as from an earlier split."""
    from xmil.data import read_cohort

    try:
        stored = read_cohort(path, slide_column=slide_column).columns
    except XmilError:
        return False
    one, other = ({k: v for k, v in cells.items() if k != column} for cells in (stored, table.columns))
    return one == other
