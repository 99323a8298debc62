"""`verify_run`: is every file of a run whole, of the run's settings, and of the inputs that are there now?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmil.core.errors import FileError, XmilError
from xmil.core.identity import file_digest, unchanged
from xmil.core.run import Run
from xmil.core.storage import read_explanations, read_provenance
from xmil.data import feature_files
from xmil.data.siblings import slide_name


@dataclass(frozen=True)
class Fault:
    """Something of a run that is missing, damaged or of something else."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


def verify_run(run: Run, *, on_slide: Callable[[], None] = lambda: None) -> list[Fault]:
    """Every fault of a run of `xmil explain`: files, settings, models and features."""
    faults = [*_models(run)]
    features = _features(run)
    for slide in run:
        faults += _slide(run, slide, features.get(slide) if features is not None else None)
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


def _features(run: Run) -> dict[str, Path] | None:
    """The feature files by slide, where their folder is still there."""
    folder = run.about.get("features")
    try:
        return {slide_name(path): path for path in feature_files(str(folder))[0]} if folder else None
    except (XmilError, OSError, ValueError):  # gone, or no name of a folder at all
        return None


def _slide(run: Run, slide: str, features: Path | None) -> Iterator[Fault]:
    name = f"slides/{slide}.parquet"
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
    if features is not None and not _same(features, stored.get("source")):
        yield Fault(name, f"{features.name} has changed since it was explained")


def _same(path: Path, stored: Any) -> bool:
    try:
        return not isinstance(stored, str) or unchanged(path, stored, times=True) or unchanged(path, stored)
    except FileError:
        return False
