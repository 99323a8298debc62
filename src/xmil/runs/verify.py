"""`verify_run`: is every file of a run as it was written, and does it match its settings and inputs?

A run's ledger names every file; in runs of early versions, without one, each file is read to its end.
"""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.budget import check_regular, read_parquet
from xmil.core.durable import reads_every_byte, unchanged
from xmil.core.errors import FileError, XmilError, one_line
from xmil.core.explanation import Explanation
from xmil.core.ledger import LEDGER, MANIFEST, store_files
from xmil.core.registry import is_function_name
from xmil.core.task import TASKS, with_reference
from xmil.core.text import counted, parse_json
from xmil.data import feature_files
from xmil.data.header import slide_name
from xmil.data.inspection import inspect_features
from xmil.methods import deal
from xmil.models import load_model
from xmil.runs.ensemble import model_fault
from xmil.runs.rows import prediction
from xmil.storage import (
    RUN,
    SLIDES,
    Run,
    command_of,
    compare_files,
    is_as_written,
    list_files,
    list_runs,
    read_explanation,
    read_explanations,
    read_ledger,
    read_provenance,
    read_rows,
)

SCORED = ("explain", "evaluate")  # kinds of runs with scores of slides


def verify_run(run: Run, *, quick: bool = False, on_slide: Callable[[], None] = lambda: None) -> list[Fault]:
    """List every fault of a run and of the runs inside it: files missing, changed or extra.

    Scores are also checked against audits, table, settings, models and features. `quick` compares only sizes.

    >>> verify_run(Run("tests/fixtures/runs/tiles"))
    []
    """
    faults = [] if run.about else [Fault(RUN, "is missing; run the command again")]
    if not quick:
        faults += _models(run)
        try:
            faults += [*_scores(run, on_slide)] if run.kind in SCORED else []
        except XmilError as error:  # in the table, which lists the slides
            faults.append(Fault(SLIDES, str(error).removeprefix(f"{SLIDES}: ")))
    reported = {fault.what for fault in faults}
    faults += [fault for fault in file_faults(run, quick=quick) if fault.what not in reported]
    for name in list_runs(run.path):
        try:
            inner = verify_run(Run(run.path / name), quick=quick)
        except XmilError as error:
            inner = [Fault(RUN, str(error).removeprefix(f"{run.path / name / RUN}: "))]
        faults += [f if Path(f.what).is_absolute() else replace(f, what=f"{name}/{f.what}") for f in inner]
    return faults


def unknowns(run: Run) -> list[str]:
    """Write sentences on what `verify_run` cannot check."""
    notes = []
    for part in (run, *(Run(run.path / name) for name in list_runs(run.path))):
        with suppress(XmilError):
            notes += [f"{_prefix(part, run)}{sentence}" for sentence in _unknown_files(part)]
    for row, _ in _model_rows(run):
        path = str(row.get("path") or "")
        if is_function_name(path):
            notes.append(f"{path[:300]} builds the model and was not called; it may build another model now.")
        elif path and _find_model(run, Path(path)) is None and not Path(path).is_absolute():
            notes.append(
                f"The model {path[:300]} was not found: its path is relative to where the run was made."
            )
    with suppress(XmilError):
        if run.kind in SCORED and (earlier := _unlisted(run, is_own=True)):
            notes.append(
                f"{counted(len(earlier), 'slide')} explained earlier and not in slides.csv, because the last "
                f"command had fewer slides: {', '.join(earlier[:3])}{', ...' * (len(earlier) > 3)}."
            )
    if run.kind in SCORED and not reads_every_byte():
        notes.append(
            "Feature files over 1 MiB are compared by size, ends and samples; XMIL_FULL_DIGESTS=1 before "
            "explaining compares every byte."
        )
    elif run.kind not in SCORED:
        notes.append("The input files of the run are not compared.")
    return notes


def _unknown_files(run: Run) -> Iterator[str]:
    ledger = read_ledger(run.path)
    if ledger is None and not _states_ledger(run):
        yield (
            "The run is from an early version, without a ledger: missing files, and changes that leave a "
            "file readable, cannot be noticed."
        )
    if ledger is not None and ledger.begun:
        yield (
            f"{command_of(ledger.begun[:40])} has not finished; repeat it to continue. Until then, "
            "files without an entry do not count as faults."
        )
    if ledger is not None and ledger.sized:
        yield f"{counted(ledger.sized, 'file')} older than the ledger: compared by size and read in full."


def _states_ledger(run: Run) -> bool:
    """Whether run.json says that the run has a ledger, or the manifest of xmil 0.2."""
    return bool(run.about.get("ledger") or run.about.get("manifest"))


def _prefix(part: Run, run: Run) -> str:
    return "" if part is run else f"{part.path.relative_to(run.path).as_posix()}: "


def _scores(run: Run, on_slide: Callable[[], None]) -> Iterator[Fault]:
    features, rows = _features(run), run.rows
    for slide in run:
        yield from slide_faults(run, slide, rows.get(slide, {}), features)
        on_slide()
    for name in _unlisted(run, is_own=False):
        yield Fault(f"slides/{name}.parquet", "is not in slides.csv")


def _unlisted(run: Run, *, is_own: bool) -> list[str]:
    """List slides with a file but no row: from the run itself when it had more slides, or foreign ones."""
    ledger = read_ledger(run.path)
    if ledger is not None and ledger.begun is not None:  # the table of a killed run may lag behind its files
        return []
    entries = {} if ledger is None else ledger.files
    files = {path.stem for path in (run.path / "slides").glob("*.parquet")}
    return sorted(name for name in files - {*run.rows} if (f"slides/{name}.parquet" in entries) is is_own)


def _model_rows(run: Run) -> list[tuple[dict[str, Any], str]]:
    """Read each model's entry in run.json, and its digest."""
    models = run.about.get("models") or run.about.get("model")
    rows = [row for row in (models if isinstance(models, list) else [models]) if isinstance(row, dict)]
    stored = run.settings.get("models")
    digests = stored if isinstance(stored, list) else [row.get("digest") for row in rows]
    return [(row, str(digest or "")) for row, digest in zip(rows, digests, strict=False)]


def _models(run: Run) -> Iterator[Fault]:
    """Compare the run's models with their recorded paths and digests."""
    for row, digest in _model_rows(run):
        path = str(row.get("path") or "")
        if not path or is_function_name(path):  # functions are never called here
            continue
        found = _find_model(run, Path(path))
        if found is None and Path(path).is_absolute():
            yield Fault(path[:300], "the model no longer exists")
        elif found is not None and (why := digest and model_fault(found, digest)):
            yield Fault(path[:300], why)


def _find_model(run: Run, path: Path) -> Path | None:
    """Find a model's file; earlier versions recorded paths relative to their working directory."""
    candidates = [path] if path.is_absolute() else [path, *(f / path for f in run.path.absolute().parents)]
    return next((candidate for candidate in candidates if os.path.exists(candidate)), None)


def _features(run: Run) -> dict[str, Path]:
    """List the feature files of the explained folder by slide; empty if it no longer exists."""
    folder = run.about.get("features")
    try:
        return {slide_name(path): path for path in feature_files(str(folder))[0]} if folder else {}
    except (XmilError, OSError, ValueError):  # missing, or not a path
        return {}


ROUNDING = 1e-5  # of a sum of scores, as a share of their sizes
MOST_ROWS = 10**8  # of all sub-bags of a score; more is damage
DIGITS = 1e-4  # of the numbers of slides.csv, which are rounded
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Fault:
    """A fault of a run: a file and what is wrong with it."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


def slide_faults(run: Run, slide: str, row: Mapping[str, str], folder: Mapping[str, Path]) -> Iterator[Fault]:
    """Check one slide's file against its row of the table and its features."""
    name, features = f"slides/{slide}.parquet", Path(row["features"]) if row.get("features") else None
    if features is None or not os.path.exists(
        features
    ):  # moved: a file of the slide's name in the folder will do
        features = folder.get(slide, features)
    if not os.path.exists(run.path / name):
        yield Fault(name, "is missing; explain the slide again")
        return
    if not (run.path / name).is_file():
        yield Fault(name, "is not a file; remove it and explain the slide again")
        return
    try:
        path = run.file(slide)
        header, rows = read_provenance(path)
        explanations = read_explanations(path)
        as_written = is_as_written(path)
    except XmilError as error:
        yield Fault(name, str(error))
        return
    if not as_written:
        yield Fault(name, "has changed since it was written; explain the slide again")
    if any(len(e) != rows for e in explanations):
        yield Fault(name, "its columns have different lengths; explain the slide again")
    provenance = header.get("provenance")
    stored: dict[str, Any] = provenance if isinstance(provenance, dict) else {}
    mark = run.about.get("fingerprint")
    if mark and stored.get("fingerprint") not in (None, mark):
        yield Fault(name, "was made with other settings than the run's")
    yield from (Fault(name, why) for e in explanations for why in _account(run, e, stored))
    yield from _row(run, slide, row, explanations, stored)
    if features is not None and not os.path.exists(features):
        yield Fault(name, f"{str(features)[:300]}, which it explains, no longer exists")
    elif features is not None and not _same(features, stored.get("source")):
        yield Fault(name, f"{features.name} has changed since it was explained")


def _account(run: Run, e: Explanation, stored: Mapping[str, Any]) -> Iterator[str]:
    """Check that the scores of a slide, or of all slides of its case, add up to the audit."""
    if e.audit is None:
        return
    case = stored.get("case")
    slides = case.get("slides") if isinstance(case, dict) else None
    names = [str(slide) for slide in slides] if isinstance(slides, list) else []
    try:
        parts = [
            e if name == e.bag else read_explanation(run.file(name), method=e.method, target=e.target)
            for name in names
        ]
    except XmilError:
        return  # a slide of the case cannot be read, which is another fault
    scores = np.concatenate([part.scores for part in parts or [e]]).astype(np.float64)
    scores = scores * _weights(e, len(scores))
    total, stated = float(scores.sum()), float(e.audit.instances)
    if not abs(total - stated) <= ROUNDING * (float(np.abs(scores).sum()) + abs(stated)) + 1e-9:
        yield f"the scores of {e.column} add up to {total:.6g}, not {stated:.6g} (audit); explain it again"


def _weights(e: Explanation, n: int) -> npt.NDArray[np.float64]:
    """How often each of n scores counts in the audit, which for contexts is a mean over sub-bags.

    A score is a mean over the sub-bags that hold its patch, so it counts by their share of all sub-bags.
    """
    contexts = e.params.get("contexts")
    if not isinstance(contexts, int) or not 0 < contexts * n <= MOST_ROWS:
        return np.ones(n)
    try:
        hands = deal(n, contexts=contexts, keep=e.params.get("keep", 0.5), seed=e.params.get("seed", 0))
    except (XmilError, *DAMAGED):
        return np.ones(n)
    return np.bincount(np.concatenate(hands), minlength=n) / len(hands)


def _row(
    run: Run,
    slide: str,
    row: Mapping[str, str],
    explanations: Sequence[Explanation],
    stored: Mapping[str, Any],
) -> Iterator[Fault]:
    """Check a slide's row of the table against its file."""
    if not row or not explanations or not run.spec:
        return
    try:
        e, task, spec = explanations[0], TASKS[run.task], run.spec
        outputs = np.atleast_2d(np.asarray(stored.get("logits", e.logits), dtype=np.float64))
        names = task.names(outputs.shape[1], run.class_names, spec.get("time_bins"))
        columns = {**prediction(task, with_reference(outputs, spec), names), "n": float(len(e))}
        wrong = [name for name, value in columns.items() if name in row and not _agree(row[name], value)]
    except DAMAGED:
        yield Fault("slides.csv", f"the row of {slide} cannot be compared with its file; explain it again")
        return
    for name in wrong:
        value = columns[name] if isinstance(columns[name], str) else f"{columns[name]:g}"
        yield Fault("slides.csv", f"{name} of {slide} is {row[name][:40]!r}, but {value} in the slide's file")


def _agree(cell: str, value: str | float) -> bool:
    if isinstance(value, str):
        return cell == value
    return bool(np.isclose(float(cell or "nan"), value, rtol=DIGITS, atol=1e-6, equal_nan=True))


def _same(path: Path, stored: Any) -> bool:
    try:
        return not isinstance(stored, str) or unchanged(path, stored, times=True) or unchanged(path, stored)
    except FileError:
        return False


MODEL = "model.safetensors"  # of each job of `xmil train`


def run_files(run: Run) -> list[Path]:
    """List the files and stores of a run and of runs inside it, without partial and hidden ones."""
    places = [run.path, *(run.path / name for name in list_runs(run.path))]
    return [place / name for place in places for name in list_files(place)]


def file_faults(run: Run, *, quick: bool = False) -> Iterator[Fault]:
    """Find what is missing, changed, extra, a link, or unreadable in a run's folder."""
    try:
        ledger = read_ledger(run.path)
    except XmilError as error:
        message = str(error).removeprefix(f"{run.path}{os.sep}")
        yield Fault(message.partition(":")[0], message.partition(": ")[2])
        ledger = None
    else:
        if ledger is None and _states_ledger(run):
            yield Fault(LEDGER if run.about.get("ledger") else MANIFEST, "is missing; copy the run again")
    names: Iterable[str] = list_files(run.path)
    if ledger is not None:
        every = compare_files(run.path, ledger, quick=quick)
        differing = {name: why for name, why in every if not _is_stage(run, name)}
        for name, why in differing.items():
            damage = "" if quick or not os.path.isfile(run.path / name) else _unreadable(run.path / name)
            yield Fault(name, f"cannot be read ({damage}); run the command again" if damage else why)
        sized = (name for name, entry in ledger.files.items() if "sha256" not in entry)
        names = [name for name in sized if name not in differing]
    if not quick:
        yield from _read_faults(run, names)


STAGES = {"tiles": "tile", "features": "embed"}  # runs in one of `explain` over slides, by folder


def _is_stage(run: Run, name: str) -> bool:
    """Whether a folder holds the tiles or features of a run; earlier versions did not list them in it."""
    if run.kind != "explain" or name not in STAGES:
        return False
    try:
        return Run(run.path / name).about.get("kind") == STAGES[name]
    except XmilError:
        return False


def _read_faults(run: Run, names: Iterable[str]) -> Iterator[Fault]:
    """Find files without a digest that are missing, a link, or unreadable."""
    trained = read_rows(run.path / "results.csv", key="model") if run.kind == "train" else {}
    for name, row in trained.items():
        if not row.get("failed") and not os.path.exists(run.path / name / MODEL):
            yield Fault(f"{name}/{MODEL}"[:300], "is missing; run the command again")
    for name in names:
        path = run.path / name
        if path.is_symlink():
            yield Fault(name, "is a link, which is not followed; copy the file in")
            continue
        inner = [file for _, file in store_files(path)] if path.is_dir() else [path]
        if why := next(filter(None, map(_unreadable, inner)), ""):
            yield Fault(name, f"cannot be read ({why}); run the command again")


def _unreadable(path: Path) -> str:
    """Say why a file cannot be read to its end; an empty string if it can."""
    try:
        check_regular(path)
        READERS.get(path.suffix.lower(), _bytes)(path)
    except XmilError as error:
        sentence = str(error).removeprefix(f"{path}: ").rstrip(".")
        return (
            sentence.removeprefix("cannot be read (").removesuffix(")") if "(" in sentence[:16] else sentence
        )
    except (OSError, csv.Error, *DAMAGED) as error:
        return one_line(error)
    return ""


def _bytes(path: Path) -> None:
    with path.open("rb") as stream:
        while stream.read(1 << 20):
            pass


def _csv(path: Path) -> None:
    with path.open(newline="", encoding="utf-8-sig") as stream:
        widths = {len(row) for row in csv.reader(stream) if row}
    if len(widths) > 1:
        raise ValueError("its rows have different numbers of cells")


def _parquet(path: Path) -> None:
    import pyarrow as pa

    try:
        read_parquet(path, checksums=True)
    except pa.ArrowException as error:
        raise ValueError(str(error).splitlines()[0]) from None


def _tensors(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    if path.name == MODEL:
        load_model(path)
        return
    try:
        with safe_open(path, "np") as file:
            file.keys()
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def _picture(path: Path) -> None:
    from PIL import Image

    try:
        with warnings.catch_warnings(), path.open("rb") as stream:
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # nothing is unpacked
            Image.open(stream).verify()
    except (SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError comes from a damaged PNG
        raise ValueError(str(error)) from None


READERS: dict[str, Callable[[Path], object]] = {
    ".json": lambda path: parse_json(path.read_bytes()),
    ".geojson": lambda path: parse_json(path.read_bytes()),
    ".csv": _csv,
    ".parquet": _parquet,
    ".h5": inspect_features,
    ".safetensors": _tensors,
    ".png": _picture,
}
