"""Whether what `insight` is given is what the run was made of: features, model, evaluation."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.core.errors import InputError, XmilError
from xmil.core.identity import unchanged
from xmil.core.names import counted
from xmil.core.run import open_run
from xmil.core.runfiles import check_own
from xmil.core.storage import read_provenance
from xmil.data import open_bag
from xmil.runs.inputs import named

if TYPE_CHECKING:
    from xmil.runs.insight import InsightRun


def check_widths(run: InsightRun) -> None:
    """Refuse features of another width than those that were explained."""
    wide = run.run.spec.get("in_dim")
    for slide in run.items if isinstance(wide, int) else ():
        found = open_bag(run.paths[slide], run.layout).dim
        if found != wide:
            raise InputError(
                f"{run.paths[slide]}: has {found} features, and the run explained {wide}; give the features "
                "that were explained."
            )


def evaluated_rows(folder: Path) -> list[dict[str, str]]:
    """The measures of a run of `xmil evaluate`; what is none is refused before the work begins."""
    path = folder / "summary.csv"
    try:
        check_own(path)
        with path.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
        for row in rows:
            float(row["mean"]), float(row["low"]), float(row["high"]), row["method"], row["mode"], row["n"]
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        why = "not a table of measures" if path.is_file() else "no such file"
        raise InputError(f"{path}: {why}; give the folder of a finished xmil evaluate.") from None
    return rows


def doubts(run: InsightRun) -> list[str]:
    """A sentence for each of the inputs that the run was not made of."""
    return [*_other_features(run), *_other_models(run), *_other_evaluation(run)]


def _other_features(run: InsightRun) -> list[str]:
    other = [slide for slide in run.items if not _explained(run, slide)]
    if not other:
        return []
    who = f"{counted(len(other), 'slide')} ({named(other)})"
    return [f"The features of {who} are not those that the run explained; give the folder that it names."]


def _explained(run: InsightRun, slide: str) -> bool:
    """Whether a feature file holds what was explained, as far as the run has noted it."""
    try:
        made = read_provenance(run.run.file(slide))[0].get("provenance")
        stored = made.get("source") if isinstance(made, dict) else None
        path = run.paths[slide]
        return stored is None or unchanged(path, stored, times=True) or unchanged(path, stored)
    except XmilError:
        return True  # cannot be read, which the slide's failure says


def _other_models(run: InsightRun) -> list[str]:
    """A warning where the models at hand are not those that the run was explained with."""
    from xmil.runs.ensemble import Ensemble, model_paths

    known = _digests(run.run.settings.get("models") or ())
    if run.model is None or not known or known == set(Ensemble.load(model_paths(run.model)).digests):
        return []
    return [
        f"The run was explained with other models than {run.model.name}: scores and biomarkers are the "
        "run's; concepts, deletions and sanity tests are those of the model given."
    ]


def _other_evaluation(run: InsightRun) -> list[str]:
    """A warning where the evaluated models are not those that the run was explained with."""
    known = _digests(run.run.settings.get("models") or ())
    evaluated = set() if run.evaluated is None else _evaluated(run.evaluated)
    if run.evaluated is None or not known or not evaluated or known == evaluated:
        return []
    return [
        f"{run.evaluated.name} evaluated other models than the run's: its certificates and measures are not "
        "of these explanations; evaluate the run's model."
    ]


def _evaluated(folder: Path) -> set[str]:
    held = open_run(folder).about.get("models")
    rows = held if isinstance(held, list) else []
    return _digests(row.get("digest") for row in rows if isinstance(row, dict))


def _digests(given: Iterable[Any]) -> set[str]:
    return {str(digest) for digest in given if digest}
