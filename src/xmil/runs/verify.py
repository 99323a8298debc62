"""`verify_run`: is every file of a run whole, of the run's settings, and of the inputs that are there now?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.errors import FileError, InputError, XmilError
from xmil.core.explanation import Explanation
from xmil.core.identity import file_digest, unchanged
from xmil.core.run import Run
from xmil.core.runfiles import RUN
from xmil.core.storage import read_explanation, read_explanations, read_provenance
from xmil.core.task import TASKS
from xmil.data import feature_files
from xmil.data.siblings import slide_name
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


def verify_run(run: Run, *, on_slide: Callable[[], None] = lambda: None) -> list[Fault]:
    """Every fault of a run of `xmil explain`: files, accounts, table, settings, models and features."""
    if run.kind != "explain":
        raise InputError(
            f"{run.path}: a run of `xmil {run.kind}`; give the folder of a run of `xmil explain`."
        )
    faults = [*_models(run)] if run.about else [Fault(RUN, "is missing; explain the slides again")]
    features, rows = _features(run), run.rows
    for slide in run:
        faults += _slide(run, slide, rows.get(slide, {}), _source(slide, rows.get(slide, {}), features))
        on_slide()
    listed, files = set(run.rows), {path.stem for path in (run.path / "slides").glob("*.parquet")}
    faults += [Fault(f"slides/{name}.parquet", "is not in slides.csv") for name in sorted(files - listed)]
    return faults


def _models(run: Run) -> Iterator[Fault]:
    held = run.settings.get("models")
    digests = held if isinstance(held, list) else []
    for path, digest in zip(_model_paths(run), digests, strict=False):
        if not _exists(path):
            yield Fault(str(path)[:300], "the model is no longer there")
        elif file_digest(path) != digest:
            yield Fault(str(path), "the model has changed since")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no name of a file
        return False


def _model_paths(run: Run) -> list[Path]:
    held = run.about.get("models") or run.about.get("model")
    rows = held if isinstance(held, list) else [held]
    return [Path(str(row["path"])) for row in rows if isinstance(row, dict) and row.get("path")]


def _features(run: Run) -> dict[str, Path]:
    """The feature files by slide, of the folder that was explained; none where it is gone."""
    folder = run.about.get("features")
    try:
        return {slide_name(path): path for path in feature_files(str(folder))[0]} if folder else {}
    except (XmilError, OSError, ValueError):  # gone, or no name of a folder at all
        return {}


def _source(slide: str, row: Mapping[str, str], features: Mapping[str, Path]) -> Path | None:
    """The file a slide was explained from: as the table says, or of its name where that one is gone."""
    told = Path(row["features"]) if row.get("features") else None
    return told if told is not None and _exists(told) else features.get(slide, told)


def _slide(run: Run, slide: str, row: Mapping[str, str], features: Path | None) -> Iterator[Fault]:
    name = f"slides/{slide}.parquet"
    if not _exists(run.path / name):
        yield Fault(name, "is missing; explain the slide again")
        return
    try:
        path = run.file(slide)
        header, rows = read_provenance(path)
        held = read_explanations(path)
    except XmilError as error:
        yield Fault(name, str(error))
        return
    if any(len(e) != rows for e in held):
        yield Fault(name, "its columns have different lengths; explain the slide again")
    made = header.get("provenance")
    stored: dict[str, Any] = made if isinstance(made, dict) else {}
    mark = run.about.get("fingerprint")
    if mark and stored.get("fingerprint") not in (None, mark):
        yield Fault(name, "was made with other settings than the run's")
    yield from (Fault(name, why) for e in held for why in _account(run, e, stored))
    yield from _row(run, slide, row, held, stored)
    if features is not None and not _exists(features):
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
