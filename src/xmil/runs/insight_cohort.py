"""The cohort's table for `insight`: labels, columns that may be causes, outcomes, and what is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xmil.core.errors import InputError
from xmil.core.names import counted
from xmil.data import read_cohort
from xmil.runs.inputs import named
from xmil.runs.slide_inputs import StrPath

NOT_CAUSES = ("slide_id", "case_id", "split", "fold", "path", "patient", "time", "event")
OUTCOMES = ("time", "event")
LABEL = "label"
EMPTY = ("", "nan", "na", "n/a", "#n/a", "null")  # what tables write where nothing is known
Column = Mapping[str, Any]


@dataclass(frozen=True)
class CohortColumns:
    """Columns of the cohort by slide: the label, what may be a cause, time and event; None where unknown.

    `notes` say what the table lacks.
    """

    label: Column = field(default_factory=dict)
    causes: Mapping[str, Column] = field(default_factory=dict)
    outcomes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_columns(
    cohort: StrPath | None, slides: Sequence[str], *, label: str = LABEL, causes: Sequence[str] = ()
) -> CohortColumns:
    """The columns of a table for these slides; a table of other slides is refused."""
    if cohort is None:
        return CohortColumns()
    columns = _by_slide(Path(cohort), slides)
    for name in [*causes, *([] if label == LABEL else [label])]:
        if name not in columns:
            raise InputError(f"{cohort}: has no column {name!r}; found {', '.join(columns)}.")
    asked = causes or tuple(name for name in columns if name not in (*NOT_CAUSES, label))
    outcomes, unfit = _outcomes(columns)
    labels = columns.get(label, {})
    notes = [*_missing_rows(cohort, slides, columns), *_missing_labels(slides, labels, label), *unfit]
    if not asked:
        notes.append(f"{cohort}: has no columns that could be causes; shortcuts are looked for in pictures.")
    known = labels if any(labels.get(slide) is not None for slide in slides) else {}
    return CohortColumns(known, {name: columns[name] for name in asked}, outcomes, tuple(notes))


def _by_slide(cohort: Path, slides: Sequence[str]) -> dict[str, dict[str, str | None]]:
    table = read_cohort(cohort)
    if not set(table.slides) & set(slides):
        first = f" Its first is {table.slides[0]!r}, the run's {slides[0]!r}." if len(table) else ""
        raise InputError(f"{cohort}: names none of the run's slides; give the table of this cohort.{first}")
    return {
        name: dict(zip(table.slides, map(known_cell, table.column(name)), strict=True))
        for name in table.columns
        if name != "slide_id"
    }


def known_cell(cell: str | None) -> str | None:
    """A cell, None where it says that nothing is known.

    >>> known_cell(" NaN "), known_cell("north")
    (None, 'north')
    """
    return None if cell is None or cell.strip().lower() in EMPTY else cell


def _missing_rows(cohort: StrPath, slides: Sequence[str], columns: Mapping[str, Column]) -> list[str]:
    held: Iterable[str] = next(iter(columns.values()), {})
    gone = [slide for slide in slides if slide not in held]
    if not columns or not gone:
        return []
    return [f"{Path(cohort).name}: has no row for {counted(len(gone), 'slide')} of the run ({named(gone)})."]


def _missing_labels(slides: Sequence[str], labels: Column, label: str) -> list[str]:
    unknown = [slide for slide in slides if labels.get(slide) is None]
    if len(unknown) == len(slides):
        return [f"No slide has a {label!r}: shortcuts are asked about over all slides together."]
    if unknown:
        who = f"{counted(len(unknown), 'slide')} without a {label!r} ({named(unknown)})"
        return [f"Shortcuts in columns and light are asked about without {who}."]
    return []


def _outcomes(columns: Mapping[str, Column]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Times and events as numbers where they are outcomes, and why they are not."""
    if not set(OUTCOMES) <= set(columns):
        return {}, []
    found = {name: {s: number(cell) for s, cell in columns[name].items()} for name in OUTCOMES}
    times, events = ([value for value in found[name].values() if value == value] for name in OUTCOMES)
    if times and events and min(times) >= 0 and set(events) <= {0.0, 1.0}:
        return found, []
    return {}, ["Survival was left out: 'time' must be numbers from 0 on, and 'event' 0 or 1."]


def number(cell: Any) -> float:
    """A cell as a number, nan where it is none."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return float("nan")
