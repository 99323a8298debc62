"""What `insight` is given: the cohort's columns, and whether features, model, slides and runs fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.core.errors import InputError, UnknownNameError, XmilError
from xmil.core.identity import unchanged
from xmil.core.text import counted
from xmil.data import open_bag, read_cohort
from xmil.runs.ensemble import load_models
from xmil.runs.inputs import StrPath, join_names
from xmil.storage import Run, open_run, read_provenance

if TYPE_CHECKING:
    from xmil.insights.run import InsightRun

CASE, LABEL = "case_id", "label"
OUTCOMES = ("time", "event")
NOT_CAUSES = ("slide_id", CASE, "split", "fold", "path", "patient", *OUTCOMES)
EMPTY = ("", "nan", "na", "n/a", "#n/a", "null")  # what tables write where nothing is known
Column = Mapping[str, Any]


@dataclass(frozen=True)
class CohortColumns:
    """Columns of the cohort by slide: the label, what may be a cause, time and event; None where unknown.

    `cases` holds the patient of each slide; it is empty if nothing says which slides are of one patient.
    `notes` say what the table lacks.
    """

    label: Column = field(default_factory=dict)
    causes: Mapping[str, Column] = field(default_factory=dict)
    outcomes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cases: Mapping[str, str] = field(default_factory=dict)


def read_columns(
    cohort: StrPath | None,
    slides: Sequence[str],
    *,
    label: str,
    causes: Sequence[str],
    run_cases: Mapping[str, str],
) -> CohortColumns:
    """The columns of a table for these slides; a table of other slides is refused.

    `run_cases` are the cases that the run itself noted, for tables without a `case_id`.
    """
    noted = {slide: case for slide, case in run_cases.items() if case}
    if all(slide == case for slide, case in noted.items()):  # a run without cases notes the slides
        noted = {}
    if cohort is None:
        return CohortColumns(cases=noted)
    table = read_cohort(cohort)
    if not set(table.slides) & set(slides):
        first = f" Its first is {table.slides[0]!r}, the run's {slides[0]!r}." if len(table) else ""
        raise InputError(f"{cohort}: names none of the run's slides; give the table of this cohort.{first}")
    columns: dict[str, dict[str, str | None]] = {
        name: dict(zip(table.slides, map(read_cell, table.column(name)), strict=True))
        for name in table.columns
        if name != "slide_id"
    }
    for name in [*causes, *([] if label == LABEL else [label])]:
        if name not in columns:
            raise InputError(f"{cohort}: has no column {name!r}; found {', '.join(columns)}.")
    tested = causes or tuple(name for name in columns if name not in (*NOT_CAUSES, label))
    labels = columns.get(label, {})
    cases = {slide: case for slide, case in columns.get(CASE, {}).items() if case is not None} or noted
    outcomes, unfit = _read_outcomes(columns, cases)
    notes = [*_missing_cells(Path(cohort).name, slides, columns, labels, label, cases), *unfit]
    if not tested:
        notes.append(f"{cohort}: has no columns that could be causes; shortcuts are looked for in pictures.")
    has_labels = any(labels.get(slide) is not None for slide in slides)
    return CohortColumns(
        labels if has_labels else {}, {name: columns[name] for name in tested}, outcomes, tuple(notes), cases
    )


def read_cell(cell: str | None) -> str | None:
    """A cell, None where it says that nothing is known.

    >>> read_cell(" NaN "), read_cell("north")
    (None, 'north')
    """
    return None if cell is None or cell.strip().lower() in EMPTY else cell


def read_number(cell: Any) -> float:
    """A cell as a number; nan if it is not one."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return float("nan")


def _missing_cells(
    table: str,
    slides: Sequence[str],
    columns: Mapping[str, Column],
    labels: Column,
    label: str,
    cases: Mapping[str, str],
) -> list[str]:
    """A sentence each for slides without a row, without a label and without a case."""
    notes = []
    rows: Iterable[str] = next(iter(columns.values()), slides)
    if absent := [slide for slide in slides if slide not in rows]:
        notes.append(f"{table}: has no row for {_count(absent, ' of the run')}.")
    unlabelled = [slide for slide in slides if labels.get(slide) is None]
    if len(unlabelled) == len(slides):
        notes.append(f"No slide has a {label!r}: shortcuts are asked about over all slides together.")
    elif unlabelled:
        who = _count(unlabelled, f" without a {label!r}")
        notes.append(f"Shortcuts in columns and light are asked about without {who}.")
    if not cases:
        notes.append(
            f"{table}: has no case_id, so slides are taken as independent; if patients have several slides, "
            "p-values and intervals claim too much."
        )
    elif alone := [slide for slide in slides if slide not in cases]:
        notes.append(f"{_count(alone, ' without a case_id')}: each is its own case.")
    return notes


def _count(slides: list[str], which: str = "") -> str:
    return f"{counted(len(slides), 'slide')}{which} ({join_names(slides)})"


def _read_outcomes(
    columns: Mapping[str, Column], cases: Mapping[str, str]
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Times and events as numbers where they are outcomes, and why they are not."""
    if not set(OUTCOMES) <= set(columns):
        return {}, []
    outcomes = {name: {s: read_number(cell) for s, cell in columns[name].items()} for name in OUTCOMES}
    times, events = ([value for value in outcomes[name].values() if value == value] for name in OUTCOMES)
    if not (times and events and min(times) >= 0 and set(events) <= {0.0, 1.0}):
        return {}, ["Survival was left out: 'time' must be numbers from 0 on, and 'event' 0 or 1."]
    for name, values in outcomes.items():
        of_case: dict[str, float] = {}
        for slide, value in values.items():
            case = cases.get(slide, slide)
            if value == value and of_case.setdefault(case, value) != value:
                return {}, [f"Survival was left out: slides of case {case!r} differ in {name!r}."]
    return outcomes, []


def evaluated_run(folder: str | PathLike[str]) -> Path:
    """The folder of a finished evaluation."""
    run = open_run(folder)
    if run.kind != "evaluate" or not (run.path / "summary.csv").is_file():
        raise InputError(
            f"{run.path}: not a finished run of `xmil evaluate`; give its folder, or leave it out."
        )
    return run.path


def check_inputs(run: InsightRun) -> None:
    """Refuse, before anything is computed, what does not fit the run."""
    if not run.items:
        raise InputError(
            f"{run.request.features}: holds no features of the run's slides; name the folder that was "
            "explained."
        )
    _check_widths(run)
    _check_method(run)
    files_of = {"slides": run.pictures, "annotations (SLIDE.geojson)": run.regions}
    for what, files in files_of.items():
        if files and not any(slide in files for slide in run.items):
            raise InputError(f"{next(iter(files.values())).parent}: holds no {what} of the run's slides.")
    for path in run.beside:
        if not any(slide in run.items for slide in Run(path).slides):
            raise InputError(f"{path}: explains none of the run's slides; name a run of the same slides.")


def _check_widths(run: InsightRun) -> None:
    """Refuse features of another width than those that were explained, and a model that takes others."""
    width, unread = run.explained.spec.get("in_dim"), []
    if run.request.model is not None and isinstance(width, int):
        taken = load_models(run.request.model).spec.in_dim
        if taken != width:
            raise InputError(
                f"{run.request.model}: takes {taken} features, and the run explained {width}; give the run's "
                "model."
            )
    for slide in run.items:
        try:
            own = open_bag(run.paths[slide], run.request.format).dim
        except XmilError as error:
            unread.append(error)  # which the slide's failure will say, unless it is every slide's
            continue
        width = width if isinstance(width, int) else own
        if own != width:
            raise InputError(
                f"{run.paths[slide]}: has {own} features, and the run explained {width}; give the features "
                "that were explained."
            )
    if len(unread) == len(run.items):
        raise unread[0]


def _check_method(run: InsightRun) -> None:
    """Refuse a method or target that no slide was explained with."""
    unknown = []
    for slide in run.items:
        try:
            run.explanation(slide)
        except UnknownNameError as error:
            unknown.append(error)
        except XmilError:
            return  # cannot be read, which the slide's failure says
        else:
            return
    raise unknown[0]


def find_doubts(run: InsightRun) -> list[str]:
    """A sentence for each of the inputs that the run was not made of."""
    doubts = []
    if featureless := [slide for slide in run.explained if slide not in run.paths]:
        doubts.append(f"{_count(featureless, ' of the run left out, without features')}.")
    if dark := [slide for slide in run.items if run.pictures and slide not in run.pictures]:
        doubts.append(f"{_count(dark, ' without a picture')}.")
    doubts += run.columns.notes
    if changed := [slide for slide in run.items if not _has_explained_features(run, slide)]:
        doubts.append(
            f"The features of {_count(changed)} are not those that the run explained; give the folder that "
            "it names."
        )
    return [*doubts, *_doubt_models(run)]


def _has_explained_features(run: InsightRun, slide: str) -> bool:
    """Whether a feature file holds what was explained, as far as the run has noted it."""
    try:
        provenance = read_provenance(run.explained.file(slide))[0].get("provenance")
        stored = provenance.get("source") if isinstance(provenance, dict) else None
        path = run.paths[slide]
        return stored is None or unchanged(path, stored, times=True) or unchanged(path, stored)
    except XmilError:
        return True  # cannot be read, which the slide's failure says


def _doubt_models(run: InsightRun) -> list[str]:
    """Sentences where the models at hand, or the evaluated ones, are not those that were explained."""
    doubts = []
    explained = {str(digest) for digest in run.explained.settings.get("models") or () if digest}
    own = None if run.request.model is None else set(load_models(run.request.model).digests)
    if run.request.model is not None and explained and own != explained:
        doubts.append(
            f"The run was explained with other models than {run.request.model.name}: scores and biomarkers "
            "are the run's; concepts, deletions and sanity tests are those of the model given."
        )
    if run.evaluated is not None and explained:
        models = open_run(run.evaluated).about.get("models")
        rows = [row for row in models if isinstance(row, dict)] if isinstance(models, list) else []
        evaluated = {str(row["digest"]) for row in rows if row.get("digest")}
        if evaluated and evaluated != explained:
            doubts.append(
                f"{run.evaluated.name} evaluated other models than the run's: its certificates and measures "
                "are not of these explanations; evaluate the run's model."
            )
    return doubts
