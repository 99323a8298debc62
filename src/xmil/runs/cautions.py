"""Slides that a cohort names and that have no features, and the cases that lack them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xmil.core.errors import XmilError
from xmil.core.runfiles import read_run
from xmil.data.cases import Case
from xmil.data.cohort import SPLIT, read_cohort

SHOWN = 5


@dataclass(frozen=True)
class Missing:
    """Slides of the cohort without features; by case, the cases taken without some of their slides."""

    slides: tuple[str, ...] = ()
    incomplete: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """What run.json says of them."""
        return {"without_features": list(self.slides), "incomplete_cases": dict(self.incomplete)}

    def warning(self) -> str | None:
        """One sentence that names the incomplete cases.

        >>> Missing(("a2",), {"a": ("a2",)}).warning()
        '1 case lacks slides without features and was taken with the rest: a (without a2). run.json has all.'
        """
        if not self.incomplete:
            return None
        named = [
            f"{case} (without {', '.join(gone)})" for case, gone in list(self.incomplete.items())[:SHOWN]
        ]
        more = f" and {len(self.incomplete) - SHOWN} more" if len(self.incomplete) > SHOWN else ""
        who = (
            "1 case lacks slides without features and was"
            if len(self.incomplete) == 1
            else (f"{len(self.incomplete)} cases lack slides without features and were")
        )
        return f"{who} taken with the rest: {', '.join(named)}{more}. run.json has all."


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
        if (read_run(run) or {}).get("kind") != "train":
            return set()
        table = read_cohort(run / "cohort.csv")
        held_out = {HELD_OUT, *job.name.split("-")}
        sides = table.column(SPLIT)
    except XmilError:
        return set()
    return {case for case, side in zip(table.cases, sides, strict=True) if side not in held_out}
