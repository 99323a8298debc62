"""Whether a model has seen a case before: what `xmil train` writes beside its models says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xmil.core.errors import XmilError
from xmil.data.cases import Case
from xmil.data.cohort import SPLIT, read_cohort
from xmil.engine.folder import RUN, read_run

HELD_OUT = "test"


def seen_warning(models: Sequence[Path], cases: Sequence[Case]) -> str | None:
    """One sentence where cases were in the training of one of the models, else None."""
    known = set().union(*(training_cases(path) for path in models)) if models else set()
    seen = [case for case in cases if (case.case_id or case.name) in known]
    if not seen:
        return None
    return (
        f"{len(seen)} of {len(cases)} predictions are of cases that were in the training of a model: their "
        "measures flatter. The predictions.csv of the training run has those of held-out cases."
    )


def training_cases(model: Path) -> set[str]:
    """The cases a model of a training run was fitted on or chosen by; empty where nothing is written down.

    The run's cohort.csv says for each case on which side it was: a fold's model has held that fold out.
    """
    job = model if model.is_dir() else model.parent
    run = job.parent
    try:
        if (read_run(run / RUN) or {}).get("kind") != "train":
            return set()
        table = read_cohort(run / "cohort.csv")
        held_out = {HELD_OUT, *job.name.split("-")}
        sides = table.column(SPLIT)
    except XmilError:
        return set()
    return {case for case, side in zip(table.cases, sides, strict=True) if side not in held_out}
