"""What `xmil verify` asks of every file of a run: that it is a file, no link, and can be read to its end."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from xmil.core.budget import check_regular, read_parquet
from xmil.core.errors import XmilError
from xmil.core.parsing import parse_json
from xmil.core.run import Run
from xmil.core.runfiles import read_rows
from xmil.models import load_model
from xmil.runs.verify_slides import DAMAGED, Fault, exists

MODEL = "model.safetensors"  # of each job of `xmil train`


def run_files(run: Run) -> list[Path]:
    """The files of a run, without half-written and hidden ones."""
    found = sorted(path for path in run.path.rglob("*") if path.is_symlink() or not path.is_dir())
    return [path for path in found if not any(part.startswith(".") for part in _within(run, path).parts)]


def file_faults(run: Run) -> Iterator[Fault]:
    """What is missing, a link, or cannot be read in a run's folder."""
    if run.kind == "train":
        yield from _missing_models(run)
    for path in run_files(run):
        name = _within(run, path).as_posix()
        if path.is_symlink():
            yield Fault(name, "is a link, which is not followed; copy the file in")
            continue
        why = _unreadable(path)
        if why:
            yield Fault(name, f"cannot be read ({why}); run the command again")


def _within(run: Run, path: Path) -> Path:
    return path.relative_to(run.path)


def _missing_models(run: Run) -> Iterator[Fault]:
    """The models that the table says were trained, and that are not there."""
    for name, row in read_rows(run.path / "results.csv", key="model").items():
        if not row.get("failed") and not exists(run.path / name / MODEL):
            yield Fault(f"{name}/{MODEL}"[:300], "is missing; run the command again")


def _unreadable(path: Path) -> str:
    """Why a file cannot be read to its end; nothing where it can."""
    try:
        check_regular(path)
        READERS.get(path.suffix.lower(), _bytes)(path)
    except XmilError as error:
        said = str(error).removeprefix(f"{path}: ").rstrip(".")
        return said.removeprefix("cannot be read (").removesuffix(")") if "(" in said[:16] else said
    except (OSError, csv.Error, *DAMAGED) as error:
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""


def _bytes(path: Path) -> None:
    with path.open("rb") as stream:
        while stream.read(1 << 20):
            pass


def _json(path: Path) -> None:
    parse_json(path.read_bytes())


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


def _features(path: Path) -> None:
    from xmil.data.inspection import inspect_features

    inspect_features(path)


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
    except (SyntaxError, Image.DecompressionBombError) as error:  # the first is what a damaged PNG raises
        raise ValueError(str(error)) from None


READERS: dict[str, Callable[[Path], None]] = {
    ".json": _json,
    ".geojson": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".h5": _features,
    ".safetensors": _tensors,
    ".png": _picture,
}
