"""Zarr stores (extra `zarr`), text tables and folders of vectors; rows on demand."""

from __future__ import annotations

import csv
import io
import math
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import FloatArray
from xmil.core.budget import check_columns
from xmil.core.errors import FileError, refuse_damage
from xmil.core.quoting import plain_cell
from xmil.core.text import parse_json, small_number
from xmil.data.containers.container import (
    MARKS,
    ArrayInfo,
    Contents,
    Index,
    Rows,
    check_chunks,
    check_memory,
    check_stored,
    readable,
)
from xmil.data.containers.packing import check_zarr_chunks

# Codecs that only transform bytes; others (pickle, json objects) could run code or load plugins.
CODECS = {
    *("blosc", "zstd", "lz4", "gzip", "zlib", "bz2", "lzma", "bytes", "transpose", "shuffle", "delta"),
    *("crc32c", "fletcher32", "adler32", "crc32", "sharding_indexed", "vlen-utf8"),
}
_FILES = 2_000_000


class ZarrContents(Contents):
    """The arrays of a zarr group, found by their metadata files."""

    kind = "zarr"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        _check_store(path)
        self._checked = set[str]()
        self.attrs, self.groups = self.group_attrs("."), list[str]()
        marks = [Path(folder, name) for folder, _, files in os.walk(path) for name in files if name in MARKS]
        for mark in sorted(mark for mark in marks if mark.name != ".zmetadata"):
            name = str(mark.parent.relative_to(path))
            kind = _json(mark).get("node_type") if mark.name == "zarr.json" else mark.name
            if kind in ("array", ".zarray"):
                self.arrays[name] = _array_info(mark, name, path)
            else:
                self.groups.append(name)

    def group_attrs(self, name: str) -> dict[str, Any]:
        """Attributes of a group or array below the root."""
        folder = self.path / name
        if (folder / "zarr.json").is_file():
            attributes = _json(folder / "zarr.json").get("attributes", {})
        else:
            attributes = _json(folder / ".zattrs") if (folder / ".zattrs").is_file() else {}
        return attributes if isinstance(attributes, dict) else {}

    def _read(self, name: str) -> npt.NDArray[Any]:
        with readable(self.path, "zarr store"):
            return np.asarray(self._open(name)[...])

    def _rows(self, name: str, shape: tuple[int, int]) -> Rows:
        return Rows(shape, self.arrays[name].dtype, partial(self._read_rows, name, shape))

    def _read_rows(self, name: str, shape: tuple[int, int], index: Index | None) -> FloatArray:
        """Read only the chunks that hold the rows."""
        with readable(self.path, "zarr store"):
            array = self._open(name)
            check_chunks(int(array.nchunks_initialized), int(array.nchunks), name=name, path=self.path)
            if index is not None and array.ndim == 2 and len(index):
                values = np.asarray(array.oindex[index, :])
            else:
                values = np.asarray(array[...]).reshape(shape)
                values = values if index is None else values[index]
            return np.ascontiguousarray(values, dtype=np.float32)

    def _open(self, name: str) -> Any:
        folder = self.path / name
        stored = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        check_stored(self.arrays[name].nbytes, stored, packed=True, name=name, path=self.path)
        try:
            import zarr
        except ImportError:
            raise FileError(f"{self.path}: a zarr store; to read it, pip install 'xmil[zarr]'.") from None
        array = zarr.open_array(str(folder), mode="r")
        edges = getattr(array, "shards", None) or array.chunks
        chunk = math.prod(int(edge) for edge in edges) * self.arrays[name].dtype.itemsize
        for nbytes, what in ((self.arrays[name].nbytes, name), (chunk, f"a chunk of {name}")):
            check_memory(nbytes, what, self.path, stored=stored)
        if name not in self._checked and self.arrays[name].dtype != object:
            mark = next(folder / mark for mark in ("zarr.json", ".zarray") if (folder / mark).is_file())
            check_zarr_chunks(folder, _codec_names(_json(mark)), chunk, name=name, path=self.path)
        self._checked.add(name)
        return array


def _check_store(path: Path) -> None:
    """Refuse stores with symbolic links to the outside."""
    root = path.resolve()
    for count, (folder, folders, files) in enumerate(os.walk(path)):
        for name in folders + files:
            entry = Path(folder, name)
            if entry.is_symlink() and not entry.resolve().is_relative_to(root):
                raise FileError(f"{entry}: refused, it is a link out of the store; copy the data in.")
        if count > _FILES:
            raise FileError(f"{path}: has more than {_FILES:,} folders; it is not a feature store.")


def _json(path: Path) -> dict[str, Any]:
    with refuse_damage(f"{path}: not readable zarr metadata", way="write or copy the store again"):
        if path.stat().st_size > 1 << 24:
            raise FileError(f"{path}: refused, its metadata exceed 16 MiB; write the store again.")
        loaded = parse_json(path.read_bytes())
    return loaded if isinstance(loaded, dict) else {}


def _array_info(mark: Path, name: str, store: Path) -> ArrayInfo:
    meta = _json(mark)
    if unknown := _codec_names(meta) - CODECS:
        raise FileError(
            f"{store}: {name!r} is refused: the codec {', '.join(sorted(unknown))} is not allowed; write it "
            "with zstd or gzip."
        )
    fault = f"{store}: the metadata of {name!r} is damaged"
    with refuse_damage(fault, way="write the store again", kinds=(SyntaxError,)):
        shape = tuple(int(length) for length in meta["shape"])
        kind = meta["dtype"] if mark.name == ".zarray" else meta["data_type"]
        dtype = np.dtype(kind if isinstance(kind, str) and kind != "string" else object)
    if any(length < 0 for length in shape):
        raise FileError(f"{store}: {name!r} declares the impossible shape {shape}; the store is damaged.")
    return ArrayInfo(shape, dtype)


def _codec_names(meta: dict[str, Any]) -> set[str]:
    """Every codec, filter and compressor that a metadata document names, at any depth."""
    lists = [meta.get(name) for name in ("filters", "codecs")]
    codecs = [
        meta.get("compressor"),
        *(codec for entry in lists if isinstance(entry, list) for codec in entry),
    ]
    names: set[str] = set()
    for codec in codecs:
        if isinstance(codec, dict):
            names.add(str(codec.get("id") or codec.get("name")))
            inner = codec.get("configuration")
            names |= _codec_names(inner) if isinstance(inner, dict) else set()
    return names


_CELL = 1 << 22  # characters of one cell; longer ones are damage, not data


class CsvContents(Contents):
    """A text table whose columns can be read as numbers."""

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
        if vector is not None and vector.ndim == 1:  # else a folder of bags with numbered slides
            self.arrays["vectors"] = ArrayInfo((len(self.ids), len(vector)), vector.dtype)

    def _read(self, name: str) -> npt.NDArray[Any]:
        return self.rows(name).read(None)

    def _rows(self, name: str, shape: tuple[int, int]) -> Rows:
        return Rows(shape, self.arrays[name].dtype, partial(self._read_rows, shape[1]))

    def _read_rows(self, width: int, index: Index | None) -> FloatArray:
        """Read one row from each file."""
        ids = self.ids if index is None else [self.ids[i] for i in index]
        out = np.empty((len(ids), width), np.float32)
        for row, name in enumerate(ids):
            vector = _vector(self.path, name)
            if vector.shape != (width,):
                entry = self.path / f"{name}.pt"
                raise FileError(f"{entry}: has shape {vector.shape}, but the others have ({width},).")
            out[row] = vector
        return out


def is_bag_folder(path: Path) -> bool:
    """Whether a folder is one bag: single vectors in numbered files."""
    numbered = path.is_dir() and any(small_number(entry.stem) is not None for entry in path.glob("*.pt"))
    return numbered and bool(FolderContents(path).arrays)


def _vector(path: Path, name: int) -> npt.NDArray[Any]:
    from xmil.data.containers.arrays import TENSOR, TorchContents

    entry = path / f"{name}.pt"
    if not entry.resolve().is_relative_to(path.resolve()):
        raise FileError(f"{entry}: refused, it is a link out of the folder; copy the file in.")
    values = TorchContents(entry).read(TENSOR)
    return values[0] if values.ndim == 2 and values.shape[0] == 1 else values


def read_csv(path: Path) -> dict[str, list[str | None]]:
    """Read the columns of a text table (comma, semicolon or tab) as text; empty cells are None."""
    check_memory(path.stat().st_size * 8, "the table", path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise FileError(f"{path}: not a text table in UTF-8; save it as CSV in UTF-8.") from None
    if "\0" in text:
        raise FileError(f"{path}: not a text table (it holds zero bytes); save it as CSV in UTF-8.")
    csv.field_size_limit(_CELL)
    try:
        first = text.split("\n", 1)[0]
        rows = list(
            csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), strict=True)
        )
    except csv.Error as error:
        raise FileError(f"{path}: not a readable CSV table ({error}); save it again.") from None
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    if not rows:
        raise FileError(f"{path}: the table is empty; it needs a header and at least one row.")
    check_columns(len(rows[0]), path)
    header = [plain_cell(name.strip()) for name in rows[0]]
    repeated = sorted(name for name, count in Counter(header).items() if name and count > 1)
    if repeated:
        raise FileError(f"{path}: the header repeats {', '.join(repeated)}; name each column once.")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise FileError(
                f"{path}: row {number} has {len(row)} cells, but the header has {len(header)}; fix the row."
            )
    cells = zip(*rows[1:], strict=True) if len(rows) > 1 else [()] * len(header)
    return {
        name: [plain_cell(cell.strip()) or None for cell in column]
        for name, column in zip(header, cells, strict=True)
    }
