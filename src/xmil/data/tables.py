"""Tables as text: CSV and Parquet, every cell a string or None, so that `007` stays `007`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xmil.core.errors import FileError
from xmil.data.containers import sniff
from xmil.data.containers.folder import read_csv

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
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, partitioning=None)
        columns = {
            name: table[name].to_pylist() for name in table.column_names if not name.startswith("__index")
        }
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise FileError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]}).") from None
    return {name: tuple(_text(value) for value in values) for name, values in columns.items()}


def _text(value: Any) -> str | None:
    if value is None or value != value or value == "":  # NaN is not itself
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
