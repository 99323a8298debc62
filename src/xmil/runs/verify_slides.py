"""What `xmil verify` asks of a slide's scores: whole, as written, of this run and its features, adding up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.errors import FileError, XmilError
from xmil.core.explanation import Explanation
from xmil.core.identity import unchanged
from xmil.core.run import Run
from xmil.core.storage import is_as_written, read_explanation, read_explanations, read_provenance
from xmil.core.task import TASKS
from xmil.runs.rows import prediction, with_reference

ROUNDING = 1e-5  # of a sum of scores, as a share of their sizes
DIGITS = 1e-4  # of the numbers of slides.csv, which are rounded
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Fault:
    """Something of a run that is missing, damaged or of something else."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


def exists(path: Path) -> bool:
    """Whether a path is there; no where it is the name of no file."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _source(slide: str, row: Mapping[str, str], features: Mapping[str, Path]) -> Path | None:
    """The file a slide was explained from: as the table says, or of its name where that one is gone."""
    told = Path(row["features"]) if row.get("features") else None
    return told if told is not None and exists(told) else features.get(slide, told)


def slide_faults(run: Run, slide: str, row: Mapping[str, str], folder: Mapping[str, Path]) -> Iterator[Fault]:
    """The faults of one slide's file, its row of the table, and the features in the folder."""
    name, features = f"slides/{slide}.parquet", _source(slide, row, folder)
    if not exists(run.path / name):
        yield Fault(name, "is missing; explain the slide again")
        return
    if not (run.path / name).is_file():
        yield Fault(name, "is no file; remove it and explain the slide again")
        return
    try:
        path = run.file(slide)
        header, rows = read_provenance(path)
        held = read_explanations(path)
        as_written = is_as_written(path)
    except XmilError as error:
        yield Fault(name, str(error))
        return
    if not as_written:
        yield Fault(name, "has been changed since it was written; explain the slide again")
    if any(len(e) != rows for e in held):
        yield Fault(name, "its columns have different lengths; explain the slide again")
    made = header.get("provenance")
    stored: dict[str, Any] = made if isinstance(made, dict) else {}
    mark = run.about.get("fingerprint")
    if mark and stored.get("fingerprint") not in (None, mark):
        yield Fault(name, "was made with other settings than the run's")
    yield from (Fault(name, why) for e in held for why in _account(run, e, stored))
    yield from _row(run, slide, row, held, stored)
    if features is not None and not exists(features):
        yield Fault(name, f"{str(features)[:300]}, which it explains, is no longer there")
    elif features is not None and not _same(features, stored.get("source")):
        yield Fault(name, f"{features.name} has changed since it was explained")


def _account(run: Run, e: Explanation, stored: Mapping[str, Any]) -> Iterator[str]:
    """Whether the scores add up to what the audit says; of a case's slides, those of all of them."""
    if e.audit is None:
        return
    try:
        parts = [e.scores, *_others(run, e, stored)]
    except XmilError:
        return  # a slide of the case cannot be read, which is a fault of its own
    scores = np.concatenate(parts).astype(np.float64)
    found, said = float(scores.sum()), float(e.audit.instances)
    if not abs(found - said) <= ROUNDING * (float(np.abs(scores).sum()) + abs(said)) + 1e-9:
        yield f"the scores of {e.column} add up to {found:.6g}, its audit says {said:.6g}; explain it again"


def _others(run: Run, e: Explanation, stored: Mapping[str, Any]) -> list[Any]:
    """The scores of the other slides of a case that was explained as one."""
    case = stored.get("case")
    slides = case.get("slides") if isinstance(case, dict) else None
    names = [str(slide) for slide in slides if slide != e.bag] if isinstance(slides, list) else []
    every = [read_explanation(run.file(name), method=e.method, target=e.target) for name in names]
    return [other.scores for other in every]


def _row(
    run: Run, slide: str, row: Mapping[str, str], held: Sequence[Explanation], stored: Mapping[str, Any]
) -> Iterator[Fault]:
    """Whether the table says of a slide what its file says."""
    if not row or not held or not run.spec:
        return
    try:
        said = {**_said(run, held[0], stored), "n": float(len(held[0]))}
        wrong = [name for name, value in said.items() if name in row and not _agree(row[name], value)]
    except DAMAGED:
        yield Fault("slides.csv", f"the row of {slide} cannot be compared with its file; explain it again")
        return
    for name in wrong:
        value = said[name] if isinstance(said[name], str) else f"{said[name]:g}"
        yield Fault(
            "slides.csv", f"{name} of {slide} is {row[name][:40]!r}, and the slide's file says {value}"
        )


def _said(run: Run, e: Explanation, stored: Mapping[str, Any]) -> dict[str, Any]:
    """What the outputs in a slide's file mean, in the columns of the table."""
    each = np.atleast_2d(np.asarray(stored.get("logits", e.logits), dtype=np.float64))
    task, spec = TASKS[run.task], run.spec
    names = task.names(each.shape[1], run.class_names, spec.get("time_bins"))
    return prediction(task, with_reference(each, spec), names)


def _agree(cell: str, value: str | float) -> bool:
    if isinstance(value, str):
        return cell == value
    return bool(np.isclose(float(cell or "nan"), value, rtol=DIGITS, atol=1e-6, equal_nan=True))


def _same(path: Path, stored: Any) -> bool:
    try:
        return not isinstance(stored, str) or unchanged(path, stored, times=True) or unchanged(path, stored)
    except FileError:
        return False
