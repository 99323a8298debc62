"""One allocation budget for every reader: a small file must not allocate gigabytes.

An input may take memory in proportion to its bytes on disk: `RATIO` times its size, at least `FLOOR`, and
never more than is free. `XMIL_MEMORY` (bytes, or `4G`) raises the floor for a sound file that compresses very
well.
"""

from __future__ import annotations

import csv
import math
import os
import re
import stat
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from xmil.core.errors import SPECIAL, FileError, StrPath, XmilError, bad_parameter, one_line
from xmil.core.quoting import plain_cell

if TYPE_CHECKING:
    import pyarrow as pa

FLOOR = 1 << 28
RATIO = (
    64  # features, scores and pictures compress by small factors; only empty data compresses a hundredfold
)
OBJECT = 64  # bytes of a number or a short text as a Python object, with its place in a list
MOST_COLUMNS = 100_000  # of a text table; one column for each gene is fewer
LARGE = 1 << 22  # bytes; several threads read larger tables faster than one
VARIABLE = "XMIL_MEMORY"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_WIDTHS = {0: 1, 1: 4, 3: 12, 4: 4}  # BOOLEAN, INT32, INT96, FLOAT, by Parquet's numbers; others take 8
_BYTE_ARRAY, _DELTA_BYTE_ARRAY = 6, 7  # a type and an encoding
MAGIC = b"PAR1"
_DEEP = 12  # a sound footer has fewer levels
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 11, 12


def allowance(stored: int) -> int:
    """The bytes of memory that an input may take, by its bytes on disk."""
    floor = os.environ.get(VARIABLE)
    return max(FLOOR if floor is None else _bytes(floor), RATIO * stored)


def check_budget(nbytes: int, name: str, path: StrPath, *, stored: int | None = None) -> None:
    """Refuse an allocation beyond the budget of its file, or beyond the free memory."""
    stored = os.stat(path).st_size if stored is None else stored
    if nbytes > allowance(stored):
        raise FileError(
            f"{path}: {name!r} asks for {nbytes / 2**30:,.1f} GiB, more than {stored:,} bytes on disk hold: "
            f"the file is damaged or a memory bomb; if it is sound, set {VARIABLE}={-(-nbytes // 2**30)}G."
        )
    free = available_memory()
    if free is not None and nbytes > free:
        raise FileError(
            f"{path}: {name!r} needs {nbytes / 2**30:,.1f} GiB but {free / 2**30:,.1f} GiB are free; "
            "read it in parts with `rows=`, or on a larger machine."
        )


def check_regular(path: StrPath) -> None:
    """Refuse pipes, sockets and devices, which may never end; missing files are left to the reader."""
    try:
        kind = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise FileError(f"{path}: {SPECIAL}")


def check_archive(path: StrPath) -> int:
    """Count the bytes of an unpacked zip, and refuse those beyond the budget."""
    with zipfile.ZipFile(path) as archive:
        total = sum(member.file_size for member in archive.infolist())
    check_budget(total, "the archive", path)
    return total


@contextmanager
def open_picture(path: StrPath, *, width: int) -> Iterator[Any]:
    """Open a picture with Pillow if its pixels, of `width` bytes each, are within the budget."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # bombs and truncated files still raise errors
        try:
            opened = Image.open(path)
        except Image.DecompressionBombError:
            raise FileError(f"{path}: too large for a plain picture; convert it to a tiled TIFF.") from None
        with opened as picture:
            check_budget(width * picture.width * picture.height, "the picture", path)
            yield picture


def read_arrays(path: StrPath, *, width: int = 0) -> dict[str, Any]:
    """Read the arrays of a NumPy file by name, that of a `.npy` under "", if they are within the budget.

    `width` is how many more bytes the reader needs per number. Raise ValueError for damaged files.
    """
    import numpy as np

    check_regular(path)
    try:
        total = 0
        with open(path, "rb") as stream:
            for name, member, size in _members(stream):
                shape, dtype = array_header(member)
                declared = math.prod(shape) * dtype.itemsize
                if dtype.hasobject or min((*shape, 0)) < 0 or declared > size:
                    raise ValueError(f"{name or 'the array'} claims more numbers than are stored, or objects")
                total += declared + math.prod(shape) * width
            check_budget(total, "the arrays", path)
            stream.seek(0)
            loaded = np.load(stream, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {"": loaded}
            return {name: loaded[name] for name in loaded.files}
    except (XmilError, OSError):
        raise
    except Exception as error:  # damaged archives raise almost any type
        raise ValueError(one_line(error)) from None


def _members(stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes], int]]:
    """Yield the arrays in a NumPy file: name, stream and number of bytes."""
    if stream.read(2) != b"PK":
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        yield "", stream, size
        return
    with zipfile.ZipFile(stream) as archive:
        for member in archive.infolist():
            with archive.open(member) as inner:
                yield member.filename, inner, member.file_size


def array_header(stream: IO[bytes]) -> tuple[tuple[int, ...], Any]:
    """Read shape and type from the head of a NumPy array, without the array."""
    from numpy.lib import format as npy

    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    return shape, dtype


def csv_rows(path: StrPath) -> list[dict[str, str]]:
    """Read the rows of a CSV table by the names in its header; missing cells are empty.

    Raise ValueError for damaged files.
    """
    check_csv(path)
    with open(path, newline="", encoding="utf-8-sig") as stream, _csv_errors():
        rows = csv.DictReader(stream)
        return [
            {plain_cell(k): plain_cell(v or "") for k, v in row.items() if isinstance(k, str)} for row in rows
        ]


def check_csv(path: StrPath) -> None:
    """Refuse a CSV table that would exceed its budget if all rows were as wide as the header."""
    check_regular(path)
    with open(path, newline="", encoding="utf-8-sig") as stream, _csv_errors():
        width = len(next(filter(None, csv.reader(stream)), ()))  # pandas skips empty lines
        check_columns(width, path)
        rows = sum(1 for _ in stream)
    check_budget(OBJECT * width * rows, "the table", path)


def check_columns(count: int, path: StrPath) -> None:
    """Refuse a table with too many columns: each costs a kilobyte as an array, however few rows it has."""
    if count > MOST_COLUMNS:
        raise FileError(f"{path}: has {count:,} columns; a table may have {MOST_COLUMNS:,}; remove some.")


@contextmanager
def _csv_errors() -> Iterator[None]:
    try:
        yield
    except csv.Error as error:
        raise ValueError(str(error)) from None


def parquet_rows(path: StrPath, columns: list[str] | None = None) -> list[dict[str, Any]]:
    """Read the rows of a Parquet table as Python objects, if these are within the budget."""
    table = read_parquet(path, columns)
    check_objects(table, path)
    return table.to_pylist()  # type: ignore[no-any-return]


def check_objects(table: pa.Table, path: StrPath) -> None:
    """Refuse a table that would exceed its budget as Python objects."""
    objects = sum(OBJECT * (len(column) + _inner(column)) for column in table.columns)
    check_budget(objects + table.nbytes, "the rows", path)


def _inner(column: pa.ChunkedArray) -> int:
    """Count the values in the lists of a column, at every level."""
    total = 0
    for chunk in column.chunks:
        while hasattr(chunk, "values") and hasattr(chunk, "offsets"):
            chunk = chunk.flatten()
            total += len(chunk)
    return total


def read_parquet(path: StrPath, columns: list[str] | None = None, *, checksums: bool = False) -> pa.Table:
    """Read a Parquet table, if it is within the budget by its footer.

    Text is read as a dictionary and only expanded if that fits, because repeats cost nothing on disk.
    """
    import pyarrow.parquet as pq

    check_regular(path)
    declared = 0  # bytes of the columns in memory, by the counts in the footer
    for chunk in column_chunks(path):
        if not chunk.path:
            raise ValueError("a column has no name")
        if columns is None or chunk.path[0] in columns:
            # in lists and with shared prefixes, each text may repeat everything that is stored
            nested = len(chunk.path) > 1 and chunk.physical == _BYTE_ARRAY
            repeats = chunk.values if nested or _DELTA_BYTE_ARRAY in chunk.encodings else 1
            declared += chunk.values * _WIDTHS.get(chunk.physical, 8) + repeats * chunk.unpacked
    check_budget(declared, "the table", path)
    with pq.ParquetFile(path, page_checksum_verification=checksums) as file:
        texts = [field.name for field in file.schema_arrow if _is_text(field.type)]
        if not texts and columns is None:  # a dataset of a small file takes longer than reading it
            return _spread(file.read(use_threads=declared > LARGE), path)
    options: dict[str, Any] = {"partitioning": None, "page_checksum_verification": checksums}
    table = pq.read_table(path, columns=columns, read_dictionary=texts, **options)
    return _spread(table, path)


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    plain = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in plain)


def _spread(table: pa.Table, path: StrPath) -> pa.Table:
    """Expand the dictionaries of a table to plain columns, if they fit."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for i, column in enumerate(table.columns):
        if not pa.types.is_dictionary(column.type) or not _is_text(column.type.value_type):
            continue
        sizes = [pc.sum(pc.binary_length(c.dictionary).take(c.indices)).as_py() or 0 for c in column.chunks]
        check_budget(sum(sizes), table.column_names[i], path)
        kind = column.type.value_type
        plain = pa.chunked_array([chunk.dictionary_decode() for chunk in column.chunks], type=kind)
        table = table.set_column(i, table.field(i).with_type(kind), plain)
    return table


def available_memory() -> int | None:
    """The free memory in bytes, or None if the system does not report it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(free.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def stored_bytes(path: Path) -> int:
    """The size of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())


def _bytes(text: str) -> int:
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if parts is None:
        raise bad_parameter(VARIABLE, "the environment", "a number of bytes such as 4G", text)
    return int(float(parts[1]) * _UNITS[parts[2].upper()])


@dataclass(frozen=True)
class ColumnChunk:
    """One column of one row group, as the footer describes it."""

    physical: int  # Parquet's number of the type
    encodings: tuple[int, ...]
    path: tuple[str, ...]
    values: int
    unpacked: int  # bytes


def column_chunks(path: StrPath) -> list[ColumnChunk]:
    """List every column chunk of a Parquet file; raise ValueError if the footer is damaged.

    This does not use Arrow, which damaged statistics can crash. The footer is a Thrift structure in the
    compact protocol: fields by number, integers as variable bytes.
    """
    try:
        groups = _Compact(_footer(path)).structure(0)[4]
        return [_chunk(column[3]) for group in groups for column in group[1]]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the footer is damaged ({error})") from None


def _chunk(fields: dict[int, Any]) -> ColumnChunk:
    names = tuple(name.decode("utf-8", "replace") for name in fields[3])
    counts = (fields[1], fields[5], fields[6], *fields[2])
    if not all(isinstance(count, int) for count in counts) or fields[5] < 0 or fields[6] < 0:
        raise TypeError("a count is not valid")
    return ColumnChunk(fields[1], tuple(fields[2]), names, fields[5], fields[6])


def _footer(path: StrPath) -> bytes:
    with open(path, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 8))
        length, mark = int.from_bytes(stream.read(4), "little"), stream.read(4)
        if mark != MAGIC or length + 8 > size:
            raise ValueError("not a Parquet file, or cut off")
        stream.seek(size - 8 - length)
        return stream.read(length)


class _Compact:
    """Read structures of Thrift's compact protocol as dicts by the numbers of their fields."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def structure(self, depth: int) -> dict[int, Any]:
        if depth > _DEEP:
            raise ValueError("the footer is nested too deep")
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != _STOP:
            number = number + (head >> 4) if head >> 4 else self._signed()
            fields[number] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _BYTE:
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind == _BINARY:
            return self._bytes(self._unsigned())
        if kind in (_LIST, _SET):
            return self._list(depth + 1)
        if kind == _STRUCT:
            return self.structure(depth + 1)
        raise ValueError("the footer has a type that Parquet does not use")

    def _list(self, depth: int) -> list[Any]:
        if depth > _DEEP:
            raise ValueError("the footer is nested too deep")
        head = self._byte()
        count, kind = head >> 4, head & 15
        count = self._unsigned() if count == 15 else count
        if count > len(self.content) - self.at:  # each takes at least a byte
            raise ValueError("a list is longer than the footer")
        if kind in (_TRUE, _FALSE):
            return [self._byte() == _TRUE for _ in range(count)]
        return [self._value(kind, depth) for _ in range(count)]

    def _byte(self) -> int:
        self.at += 1
        return self.content[self.at - 1]

    def _bytes(self, count: int) -> bytes:
        if count > len(self.content) - self.at:
            raise ValueError("a text is longer than the footer")
        self.at += count
        return self.content[self.at - count : self.at]

    def _unsigned(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("a number is too long")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
