"""What is doubtful about a run: missing slides, slides of the training, features made otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xmil.core.errors import XmilError
from xmil.core.names import bare_name
from xmil.core.runfiles import read_run
from xmil.data.bags import open_bag
from xmil.data.cases import Case
from xmil.data.cohort import SPLIT, read_cohort
from xmil.data.feature_facts import feature_facts, features_warning
from xmil.models.base import ModelSpec

SHOWN = 5
LOOKING = 16  # threads that read headers: they wait for the disk


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
        '1 case has slides without features; only its other slides are used: a (without a2). See run.json.'
        """
        if not self.incomplete:
            return None
        named = [
            f"{case} (without {', '.join(gone)})" for case, gone in list(self.incomplete.items())[:SHOWN]
        ]
        more = f" and {len(self.incomplete) - SHOWN} more" if len(self.incomplete) > SHOWN else ""
        who = (
            "1 case has slides without features; only its"
            if len(self.incomplete) == 1
            else (f"{len(self.incomplete)} cases have slides without features; only their")
        )
        return f"{who} other slides are used: {', '.join(named)}{more}. See run.json."


HELD_OUT = "test"


def seen_warning(models: Sequence[Path], cases: Sequence[Case]) -> str | None:
    """One sentence where slides, or others of their cases, were in the training of a model, else None."""
    trained = [training_slides(path) for path in models]
    slides = {bare_name(slide) for known in trained for slide in known}
    owners = {owner for known in trained for owner in known.values()}
    seen = [case for case in cases if any(bare_name(slide) in slides for slide in case.slides)]
    alike = [case for case in cases if _own_case(case) in owners]
    if seen:
        return (
            f"{len(seen)} of {len(cases)} predictions are of cases that were in the training of a model: "
            "the results look better than they are. Those of held-out cases are in the predictions.csv of "
            "the training run."
        )
    if alike:
        return (
            f"{len(alike)} of {len(cases)} predictions are of cases with the case_id of a case in the "
            "training of a model, though from other slides: if they are the same patients, the results look "
            "better than they are."
        )
    return None


def _own_case(case: Case) -> str | None:
    """The case's id, where it says more than the slide's name."""
    return None if case.case_id in case.slides else case.case_id


def training_slides(model: Path) -> dict[str, str]:
    """The slides a model of a training run was fitted on or chosen by, with their cases.

    The run's cohort.csv says for each slide on which side it was: a fold's model has held that fold out, and
    rows without a side took no part. Empty where nothing is written down.
    """
    job = model if model.is_dir() else model.parent
    run = job.parent
    try:
        if (read_run(run) or {}).get("kind") != "train":
            return {}
        table = read_cohort(run / "cohort.csv")
        held_out = {HELD_OUT, *job.name.split("-")}
        sides = table.column(SPLIT)
    except XmilError:
        return {}
    rows = zip(table.slides, table.cases, sides, strict=True)
    return {slide: case for slide, case, side in rows if side is not None and side not in held_out}


def made_otherwise(spec: ModelSpec, cases: Sequence[Case]) -> str | None:
    """One sentence where features were not made as those the model was trained on, else None."""
    trained = {"encoder": spec.encoder, **(spec.features or {})}
    paths = [path for case in cases for path in case.paths]
    if not any(trained.values()):
        return None
    with ThreadPoolExecutor(LOOKING) as threads:
        return features_warning(trained, threads.map(_facts, paths))


def _facts(path: Path) -> dict[str, Any]:
    try:
        return feature_facts(open_bag(path))
    except (XmilError, OSError):  # it is reported as a failure
        return {}
