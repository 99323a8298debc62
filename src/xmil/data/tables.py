"""Tables as text: CSV and Parquet, every cell a string or None, so that `007` stays `007`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xmil.core.budget import read_parquet
from xmil.core.errors import FileError, InputError, XmilError
from xmil.data.containers import sniff
from xmil.data.containers.folderstore import read_csv

Cells = tuple[str | None, ...]
Table = dict[str, Cells]


def read_table(path: Path) -> Table:
    """The columns of a CSV or Parquet table."""
    kind = sniff(path)
    if kind == "parquet":
        return _read_parquet(path)
    if kind != "csv":
        raise FileError(f"{path}: not a table; a cohort is a CSV or Parquet file.")
    return {name: tuple(cells) for name, cells in read_csv(path).items()}


def typed(cells: Cells) -> list[Any]:
    """Cells as whole numbers or floats where all of them are, else as text."""
    for kind in (int, float):
        try:
            return [None if cell is None else kind(cell) for cell in cells]
        except ValueError:
            continue
    return list(cells)


def _read_parquet(path: Path) -> Table:
    import pyarrow as pa

    try:
        table = read_parquet(path)
        columns = {
            name: table[name].to_pylist() for name in table.column_names if not name.startswith("__index")
        }
    except XmilError:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise FileError(f"{path}: not a readable Parquet file ({why}); write or copy it again.") from None
    return {name: tuple(_text(value) for value in values) for name, values in columns.items()}


def _text(value: Any) -> str | None:
    if value is None or value != value or value == "":  # NaN is not itself
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


_CASES, _SLIDES = "case_metadata.csv", "slide_metadata.csv"
_KEY = "case_id"


def is_metadata(folder: Path) -> bool:
    """Whether a folder holds the paper's metadata."""
    return (folder / _SLIDES).is_file()


def read_metadata(folders: list[Path]) -> Table:
    """Slides with the columns of their cases, over several sources; `source_id` counts the folders."""
    parts = [_one_source(folder, str(number)) for number, folder in enumerate(folders)]
    names = list(dict.fromkeys(name for part in parts for name in part))
    return {name: _stacked(parts, name) for name in names}


def merge(split: Table, slides: Table, *, path: Path) -> Table:
    """The slides of the cases in a split file, with its label and subset columns."""
    if _KEY not in split:
        raise FileError(f"{path}: a split file needs a column 'case_id'. Found: {', '.join(split)}.")
    merged = _join(slides, split, keep_all=False)
    if not merged or not next(iter(merged.values())):
        raise InputError(f"{path}: none of its cases is in the metadata; check that they are of one dataset.")
    return merged


def _one_source(folder: Path, number: str) -> Table:
    if not is_metadata(folder):
        raise FileError(f"{folder}: has no {_SLIDES}; give the folder with the paper's metadata.")
    slides = read_table(folder / _SLIDES)
    for needed in (_KEY, "slide_id"):
        if needed not in slides:
            raise FileError(f"{folder / _SLIDES}: needs a column {needed!r}. Found: {', '.join(slides)}.")
    cases = read_table(folder / _CASES) if (folder / _CASES).is_file() else {}
    joined = _join(slides, cases, keep_all=True) if _KEY in cases else slides
    return {**joined, "source_id": (number,) * len(joined[_KEY])}


def _join(left: Table, right: Table, *, keep_all: bool) -> Table:
    """Rows of `left` with the columns of `right` for their case; `right` wins where both have one."""
    place = {case: i for i, case in reversed(list(enumerate(right[_KEY])))}
    rows = [i for i, case in enumerate(left[_KEY]) if keep_all or case in place]
    joined = {name: tuple(cells[i] for i in rows) for name, cells in left.items() if name}
    for name, cells in right.items():
        if name and name != _KEY:
            found = [place.get(left[_KEY][i]) for i in rows]
            joined[name] = tuple(None if at is None else cells[at] for at in found)
    return joined


def _stacked(parts: list[Table], name: str) -> Cells:
    empty: list[Cells] = [part.get(name, (None,) * len(part[_KEY])) for part in parts]
    return tuple(cell for cells in empty for cell in cells)
