"""The layout of the xMIL paper's own code (Hense, Jamshidi Idaji et al. 2024, arXiv 2406.04280).

Features as `<slide>.pt` (n, d), as `<slide>.npz` with one vector for each patch number, or as a folder of
`<number>.pt`; always in ascending patch number. Boxes and annotations in `patches/<slide>/metadata/df.csv`.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import FileError
from xmil.core.text import parse_json
from xmil.data.containers import Contents
from xmil.data.containers.arrays import TENSOR, NpzContents
from xmil.data.containers.stores import FolderContents, read_csv
from xmil.data.header import Ask, Header, index_beside, patch_table, place, slide_name
from xmil.data.readers import reader

Columns = dict[str, list[str | None]]
ANNOTATION = "annotation:"  # prefix of the per-instance columns made of `annotation_classes`


def _claims(contents: Contents) -> bool:
    if contents.kind == "pt":
        return (
            list(contents.arrays) == [TENSOR]
            and not index_beside(contents.path)
            and patch_table(contents.path) is not None
        )
    if contents.kind == "npz":
        return bool(contents.arrays) and all(name.isdecimal() for name in contents.arrays)
    return bool(contents.arrays)


@reader("xmil", kinds=("pt", "npz", "folder"), claims=_claims)
def read(contents: Contents, ask: Ask) -> Header:
    """Read vectors in ascending patch number, with boxes and annotations if there is a patch table."""
    stored: list[int] | None = None
    if isinstance(contents, NpzContents):
        names = sorted(contents.arrays, key=int)
        rows, stored = contents.stacked(names), [int(name) for name in names]
    elif isinstance(contents, FolderContents):
        rows, stored = contents.rows("vectors"), contents.ids
    else:
        rows = contents.rows(TENSOR)
    header = Header(contents.path, "xmil", rows, slide_id=slide_name(contents.path))
    table = patch_table(contents.path)
    if table is None:
        numbered = {} if stored is None else {"patch_id": np.array(stored)}
        return place(replace(header, columns=numbered), None, ask=ask)
    columns = _ascending(read_csv(table), table)
    numbers = [int(value or 0) for value in columns["patch_id"]]
    if len(numbers) != len(header) or (stored is not None and stored != numbers):
        raise FileError(
            f"{header.path}: its {len(header)} vectors do not match the {len(numbers)} patches in {table}."
        )
    header = replace(header, columns={"patch_id": np.array(numbers), **_annotations(columns, table)})
    xy, edge = _boxes(columns, table)
    note = f"boxes of {table.parent.parent.name}/metadata/df.csv, joined in ascending patch_id"
    return place(header, xy, edge=edge, ask=ask, notes=[note])


def _ascending(columns: Columns, path: Path) -> Columns:
    if "patch_id" not in columns:
        raise FileError(f"{path}: has no column 'patch_id'. Found: {', '.join(columns)}.")
    try:
        order = sorted(range(len(columns["patch_id"])), key=lambda i: int(columns["patch_id"][i] or ""))
    except ValueError:
        raise FileError(f"{path}: the column 'patch_id' must hold whole numbers.") from None
    return {name: [values[i] for i in order] for name, values in columns.items()}


def _boxes(columns: Columns, path: Path) -> tuple[Any, float | None]:
    if "position_abs" not in columns:
        return None, None
    try:
        xy = [_numbers(value)[:2] for value in columns["position_abs"]]
        sizes = {_numbers(value)[0] for value in columns.get("patch_size_abs", [])}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, IndexError):
        raise FileError(
            f"{path}: 'position_abs' and 'patch_size_abs' must hold numbers such as (x, y)."
        ) from None
    if len(sizes) > 1:
        raise FileError(f"{path}: its patches must have one size. Got {sorted(sizes)[:6]}.")
    return np.array(xy, dtype=np.float64).reshape(-1, 2), (sizes.pop() if sizes else None)


def _numbers(cell: str | None) -> tuple[float, ...]:
    """Parse a number or tuple of numbers."""
    if cell is None or len(cell) > 200:
        raise ValueError
    value = ast.literal_eval(cell)
    return tuple(float(part) for part in value) if isinstance(value, tuple | list) else (float(value),)


def _annotations(columns: Columns, path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Make one column per annotation class: the share of the patch that it covers."""
    cells = columns.get("annotation_classes")
    if cells is None:
        return {}
    try:
        parsed = [parse_json(cell) if cell else {} for cell in cells]
        names = sorted({str(key) for row in parsed for key in row})
        return {
            ANNOTATION + name: np.array([float(row.get(name, 0)) for row in parsed], np.float32)
            for name in names
        }
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise FileError(f"{path}: 'annotation_classes' must hold JSON such as {{\"1\": 0.5}}.") from None
