"""Whether what `insight` is given fits the run: its kind, features, model, slides, evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.core.errors import InputError, UnknownNameError, XmilError
from xmil.core.identity import unchanged
from xmil.core.names import counted
from xmil.core.run import Run, open_run
from xmil.core.storage import read_provenance
from xmil.data import open_bag
from xmil.runs.inputs import named
from xmil.runs.insight_slide import chosen_explanation

if TYPE_CHECKING:
    from xmil.runs.insight import InsightRun


EXPLAINED = ("explain", "evaluate")  # runs that hold explanations


def explained_run(given: Run | str | PathLike[str]) -> Run:
    """A run that holds explanations; others are refused."""
    run = given if isinstance(given, Run) else open_run(given)
    if run.kind not in EXPLAINED:
        raise InputError(f"{run.path}: a run of `xmil {run.kind}`; give the folder of `xmil explain`.")
    return run


def evaluated_run(folder: str | PathLike[str]) -> Path:
    """The folder of a finished evaluation."""
    run = open_run(folder)
    if run.kind != "evaluate" or not (run.path / "summary.csv").is_file():
        raise InputError(f"{run.path}: no finished run of `xmil evaluate`; give its folder, or leave it out.")
    return run.path


def check_inputs(run: InsightRun) -> None:
    """Refuse, before anything is computed, what does not fit the run."""
    check_widths(run)
    _check_model(run)
    _check_method(run)
    given = {"slides": run.pictures, "annotations (SLIDE.geojson)": run.regions}
    for what, files in given.items():
        if files and not any(slide in files for slide in run.items):
            raise InputError(f"{next(iter(files.values())).parent}: holds no {what} of the run's slides.")
    for path in run.beside:
        if not any(slide in run.items for slide in Run(path).slides):
            raise InputError(f"{path}: explains none of the run's slides; name a run of the same slides.")


def _check_model(run: InsightRun) -> None:
    """Refuse a model that cannot be loaded, or that takes other features."""
    wide = run.run.spec.get("in_dim")
    if run.model is None or not isinstance(wide, int):
        return
    from xmil.runs.ensemble import Ensemble, model_paths

    found = Ensemble.load(model_paths(run.model)).spec.in_dim
    if found != wide:
        raise InputError(
            f"{run.model}: takes {found} features, and the run explained {wide}; give the run's model."
        )


def _check_method(run: InsightRun) -> None:
    """Refuse a method or target that no slide was explained with."""
    unknown: UnknownNameError | None = None
    for slide in run.items:
        try:
            chosen_explanation(run.run.file(slide), run.chosen.method, run.chosen.target)
        except UnknownNameError as error:
            unknown = unknown or error
        except XmilError:
            return  # cannot be read, which the slide's failure says
        else:
            return
    if unknown is not None:
        raise unknown


def check_widths(run: InsightRun) -> None:
    """Refuse features of another width than those that were explained, or than the first slide's."""
    wide, unread = run.run.spec.get("in_dim"), []
    for slide in run.items:
        try:
            found = open_bag(run.paths[slide], run.layout).dim
        except XmilError as error:
            unread.append(error)  # which the slide's failure will say, unless it is every slide's
            continue
        wide = wide if isinstance(wide, int) else found
        if found != wide:
            raise InputError(
                f"{run.paths[slide]}: has {found} features, and the run explained {wide}; give the features "
                "that were explained."
            )
    if len(unread) == len(run.items):
        raise unread[0]


def doubts(run: InsightRun) -> list[str]:
    """A sentence for each of the inputs that the run was not made of."""
    others = [*_other_features(run), *_other_models(run), *_other_evaluation(run)]
    return [*_left_out(run), *run.columns.notes, *others]


def _left_out(run: InsightRun) -> list[str]:
    """Slides without features, and those without a picture where there are pictures."""
    told = []
    gone = [slide for slide in run.run if slide not in run.paths]
    if gone:
        told.append(f"{counted(len(gone), 'slide')} of the run left out, without features ({named(gone)}).")
    dark = [slide for slide in run.items if slide not in run.pictures] if run.pictures else []
    if dark:
        told.append(f"{counted(len(dark), 'slide')} without a picture ({named(dark)}).")
    return told


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
