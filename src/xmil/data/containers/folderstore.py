"""Text tables and folders of single vectors."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import FloatArray
from xmil.core.errors import FileError
from xmil.core.parsing import small_number
from xmil.data.containers.container import ArrayInfo, Contents, Index, Rows, check_memory

_CELL = 1 << 22  # characters of one cell; longer ones are damage, not data


class CsvContents(Contents):
    """A text table; its columns are arrays of numbers where they can be."""

    kind = "csv"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.columns = read_csv(path)
        for name, values in self.columns.items():
            self.arrays[name] = ArrayInfo((len(values),), np.dtype(object))

    def read(self, name: str) -> npt.NDArray[Any]:
        """One column as floats."""
        self.info(name)
        return self._read(name)

    def _read(self, name: str) -> npt.NDArray[Any]:
        try:
            return np.array([float(value or "nan") for value in self.columns[name]])
        except (ValueError, TypeError):
            raise FileError(f"{self.path}: the column {name!r} must hold numbers.") from None

    def _rows(self, name: str, shape: tuple[int, int]) -> Rows:  # noqa: ARG002 - the base's signature
        raise FileError(f"{self.path}: a text table holds no features.")


class FolderContents(Contents):
    """A folder of `<id>.pt` vectors, one instance each, in ascending order of the id."""

    kind = "folder"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.ids = sorted(n for entry in path.glob("*.pt") if (n := small_number(entry.stem)) is not None)
        vector = _vector(path, self.ids[0]) if self.ids else None
        if vector is not None and vector.ndim == 1:  # else a folder of bags whose slides are numbered
            self.arrays["vectors"] = ArrayInfo((len(self.ids), len(vector)), vector.dtype)

    def _read(self, name: str) -> npt.NDArray[Any]:
        return self.rows(name).read()

    def _rows(self, name: str, shape: tuple[int, int]) -> Rows:
        return FolderRows(self.path, self.ids, shape, self.arrays[name].dtype)


class FolderRows(Rows):
    """One row from each file."""

    def __init__(self, path: Path, ids: list[int], shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
        self.path, self.ids, self.shape, self.dtype = path, ids, shape, dtype

    def read(self, index: Index | None = None) -> FloatArray:
        picked = self.ids if index is None else [self.ids[i] for i in index]
        out = np.empty((len(picked), self.shape[1]), np.float32)
        for row, name in enumerate(picked):
            vector = _vector(self.path, name)
            if vector.shape != self.shape[1:]:
                entry = self.path / f"{name}.pt"
                raise FileError(f"{entry}: has shape {vector.shape}, the others ({self.shape[1]},).")
            out[row] = vector
        return out


def is_bag_folder(path: Path) -> bool:
    """Whether a folder is one bag: single vectors in numbered files."""
    numbered = path.is_dir() and any(small_number(entry.stem) is not None for entry in path.glob("*.pt"))
    return numbered and bool(FolderContents(path).arrays)


def _vector(path: Path, name: int) -> npt.NDArray[Any]:
    from xmil.data.containers.torchfile import TENSOR, TorchContents

    entry = path / f"{name}.pt"
    if not entry.resolve().is_relative_to(path.resolve()):
        raise FileError(f"{entry}: a link out of the folder, which is not followed; copy the file in.")
    contents = TorchContents(entry)
    values = contents.read(TENSOR)
    return values[0] if values.ndim == 2 and values.shape[0] == 1 else values


def read_csv(path: Path) -> dict[str, list[str | None]]:
    """Columns of a text table as text; empty cells are None. Comma, semicolon or tab."""
    check_memory(path.stat().st_size * 8, "the table", path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise FileError(f"{path}: not a text table in UTF-8; save it as CSV in UTF-8.") from None
    if "\0" in text:
        raise FileError(f"{path}: not a text table (it holds zero bytes); save it as CSV in UTF-8.")
    csv.field_size_limit(_CELL)
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True))
    except csv.Error as error:
        raise FileError(f"{path}: not a readable CSV table ({error}); save it again.") from None
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    if not rows:
        raise FileError(f"{path}: the table is empty; a header and one row at least are needed.")
    return _columns(rows, path)


def _delimiter(text: str) -> str:
    first = text.split("\n", 1)[0]
    return max(",;\t", key=first.count)


def _columns(rows: list[list[str]], path: Path) -> dict[str, list[str | None]]:
    header = [name.strip() for name in rows[0]]
    doubled = sorted({name for name in header if name and header.count(name) > 1})
    if doubled:
        raise FileError(
            f"{path}: the header names {', '.join(doubled)} more than once; name each column once."
        )
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise FileError(
                f"{path}: row {number} has {len(row)} cells, the header {len(header)}; fix the row."
            )
    cells = zip(*rows[1:], strict=True) if len(rows) > 1 else [()] * len(header)
    return {
        name: [cell.strip() or None for cell in column] for name, column in zip(header, cells, strict=True)
    }
