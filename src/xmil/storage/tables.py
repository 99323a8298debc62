"""Tables and JSON files of a run: read with care, since a run may come from anyone, and written whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xmil.core.budget import check_regular, csv_rows, parquet_rows
from xmil.core.durable import is_inside, write_text
from xmil.core.errors import FileError, InputError, not_made
from xmil.core.text import csv_text, parse_json

Row = dict[str, str]


def read_rows(path: Path, key: str = "slide_id") -> dict[str, Row]:
    """Read the rows of a table by slide; empty without a table."""
    check_inside(path)
    try:
        rows = csv_rows(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not path.parent.is_dir():
            raise InputError(not_made(path.parent, error)) from None
        raise FileError(f"{path.name}: not a readable table ({error}).") from None
    return {row[key]: row for row in rows if row.get(key)}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        stored = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise FileError(f"{path.name}: damaged; it is not JSON.") from None
    if not isinstance(stored, dict):
        raise FileError(f"{path.name}: damaged; it is not a JSON object.")
    return stored


def read_curves(path: Path) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Read the flip curves of a bag by method and mode from a file of `xmil evaluate`."""
    import pyarrow as pa

    try:
        rows = parquet_rows(path, ["method", "mode", "morf", "lerf"])
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise FileError(f"{path.name}: not a readable result ({str(error).splitlines()[0]}).") from None
    last = {(str(row["method"]), str(row["mode"])): row for row in rows}
    return {key: {name: row[name] for name in ("morf", "lerf") if row[name]} for key, row in last.items()}


def check_inside(path: Path) -> None:
    """Refuse a pipe, or a link out of the run's folder."""
    check_regular(path)
    if path.is_symlink() and not is_inside(path, path.parent):
        raise FileError(f"{path}: a link out of the run's folder, which is not followed; copy the file in.")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def write_table(path: Path, header: Sequence[str], rows: Any) -> None:
    """Write a CSV file, whole or not at all; None is an empty cell."""
    write_text(path, csv_text(header, rows))
