"""`verify_run`: is every file of a run whole, of the run's settings, and of the inputs that are there now?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from xmil.core.errors import XmilError
from xmil.core.identity import file_digest
from xmil.core.named_function import is_function_name
from xmil.core.run import Run
from xmil.core.runfiles import RUN, SLIDES
from xmil.data import feature_files
from xmil.data.siblings import slide_name
from xmil.models.checkpoints.files import IN_FOLDER
from xmil.runs.verify_files import file_faults
from xmil.runs.verify_slides import Fault, exists, slide_faults

SCORED = ("explain", "evaluate")  # whose slides have files of scores


def verify_run(run: Run, *, on_slide: Callable[[], None] = lambda: None) -> list[Fault]:
    """Every fault of a run: its files, and of scores their accounts, table, settings, models and features.

    >>> verify_run(Run("tests/fixtures/runs/tiles"))
    []
    """
    faults = [*_models(run)] if run.about else [Fault(RUN, "is missing; run the command again")]
    try:
        faults += [*_scores(run, on_slide)] if run.kind in SCORED else []
    except XmilError as error:  # of the table, without which slides are not known
        faults.append(Fault(SLIDES, str(error).removeprefix(f"{SLIDES}: ")))
    told = {fault.what for fault in faults}
    return faults + [fault for fault in file_faults(run) if fault.what not in told]


def _scores(run: Run, on_slide: Callable[[], None]) -> Iterator[Fault]:
    features, rows = _features(run), run.rows
    for slide in run:
        yield from slide_faults(run, slide, rows.get(slide, {}), features)
        on_slide()
    files = {path.stem for path in (run.path / "slides").glob("*.parquet")}
    yield from (Fault(f"slides/{name}.parquet", "is not in slides.csv") for name in sorted(files - {*rows}))


def _models(run: Run) -> Iterator[Fault]:
    for path, digest in _model_paths(run):
        why = _model_fault(path, digest)
        if why:
            yield Fault(str(path)[:300], why)


def _model_fault(path: Path, digest: str) -> str:
    """What is wrong with a model.

    A folder that holds none is not read: run.json may name any. A function is not called, so that of a model
    it builds nothing is said.
    """
    if is_function_name(str(path)):
        return ""
    if not exists(path):
        return "the model is no longer there"
    if path.is_dir() and not any(exists(path / name) for name in IN_FOLDER):
        return "the model is no longer there: a folder without one"
    try:
        return "the model has changed since" if digest and file_digest(path) != digest else ""
    except (XmilError, OSError) as error:  # a pipe, a file that may not be read
        return f"the model cannot be read ({' '.join(str(error).split())[:200]})"


def _model_paths(run: Run) -> list[tuple[Path, str]]:
    """Where the run's models lay, and the digests they had."""
    held = run.about.get("models") or run.about.get("model")
    rows = [row for row in (held if isinstance(held, list) else [held]) if isinstance(row, dict)]
    known = run.settings.get("models")
    digests = known if isinstance(known, list) else [row.get("digest") for row in rows]
    pairs = zip(rows, digests, strict=False)
    return [(Path(str(row["path"])), str(digest or "")) for row, digest in pairs if row.get("path")]


def _features(run: Run) -> dict[str, Path]:
    """The feature files by slide, of the folder that was explained; none where it is gone."""
    folder = run.about.get("features")
    try:
        return {slide_name(path): path for path in feature_files(str(folder))[0]} if folder else {}
    except (XmilError, OSError, ValueError):  # gone, or no name of a folder at all
        return {}
