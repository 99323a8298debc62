"""NumPy files: `.npy` by memory map, `.npz` member by member, never a pickle."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from xmil.core.bag import FloatArray
from xmil.core.errors import FileError
from xmil.data.containers.container import (
    ArrayInfo,
    ArrayRows,
    Contents,
    Index,
    Rows,
    check_memory,
    check_stored,
)

ARRAY = "array"  # the name of the array in a `.npy`, which has none of its own
_HEADER = 10_000  # bytes a header may take; NumPy's own limit


class NpyContents(Contents):
    """The one array of a `.npy` file."""

    kind = "npy"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with _Readable(path), open(path, "rb") as stream:
            info = _header(stream, ARRAY, path)
            check_stored(
                info.nbytes, path.stat().st_size - stream.tell(), packed=False, name=ARRAY, path=path
            )
        self.arrays = {ARRAY: info}

    def _read(self, name: str) -> npt.NDArray[Any]:  # noqa: ARG002 - there is one array
        with _Readable(self.path):
            return np.asarray(np.load(self.path, allow_pickle=False))

    def _rows(self, name: str, shape: tuple[int, int]) -> Rows:
        return NpyRows(self.path, shape, self.arrays[name].dtype)


class NpyRows(Rows):
    """Rows of a `.npy` by memory map, opened for each reading."""

    def __init__(self, path: Path, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
        self.path, self.shape, self.dtype = path, shape, dtype

    def read(self, index: Index | None = None) -> FloatArray:
        with _Readable(self.path):
            array = np.load(self.path, mmap_mode="r" if self.shape[0] else None, allow_pickle=False)
            return ArrayRows(array.reshape(self.shape)).read(index)


class NpzContents(Contents):
    """The arrays of a `.npz`, their headers read without the data."""

    kind = "npz"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with _Readable(path), zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.endswith(".npy"):
                    self.arrays[member.filename[:-4]] = self._check(archive, member)

    def _check(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> ArrayInfo:
        packed = member.compress_type != zipfile.ZIP_STORED
        stored = min(member.compress_size, self.path.stat().st_size)
        check_stored(member.file_size, stored, packed=packed, name=member.filename, path=self.path)
        with archive.open(member) as stream:
            info = _header(stream, member.filename, self.path)
        check_stored(info.nbytes, member.file_size, packed=False, name=member.filename, path=self.path)
        return info

    def _read(self, name: str) -> npt.NDArray[Any]:
        check_memory(self.arrays[name].nbytes, name, self.path)
        with _Readable(self.path), np.load(self.path, allow_pickle=False) as archive:
            return np.asarray(archive[name])

    def _rows(self, name: str, shape: tuple[int, int]) -> Rows:
        return NpzRows(self, [name], shape, self.arrays[name].dtype)

    def stacked(self, names: list[str]) -> Rows:
        """One row per member: the vectors of the given names, in that order."""
        widths = {int(np.prod(self.arrays[name].shape, dtype=object)) for name in names}
        if len(widths) != 1:
            raise FileError(
                f"{self.path}: its vectors have several widths: {sorted(widths)[:8]}; one is needed."
            )
        shape = (len(names), widths.pop())
        check_memory(shape[0] * shape[1] * 4, "the bag", self.path)
        return NpzRows(self, names, shape, self.arrays[names[0]].dtype)


class NpzRows(Rows):
    """Rows of one member, or one row from each of several members."""

    def __init__(
        self, contents: NpzContents, names: list[str], shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> None:
        self.contents, self.names, self.shape, self.dtype = contents, names, shape, dtype
        self.by_member = len(names) != 1 or contents.arrays[names[0]].shape[-2:] != shape

    def read(self, index: Index | None = None) -> FloatArray:
        if not self.by_member:
            return ArrayRows(self.contents._read(self.names[0]).reshape(self.shape)).read(index)
        picked = self.names if index is None else [self.names[i] for i in index]
        out = np.empty((len(picked), self.shape[1]), np.float32)
        with _Readable(self.contents.path), np.load(self.contents.path, allow_pickle=False) as archive:
            for row, name in enumerate(picked):
                out[row] = archive[name].reshape(-1)
        return out


def _header(stream: IO[bytes], name: str, path: Path) -> ArrayInfo:
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream, max_header_size=_HEADER)
    if dtype.hasobject:
        raise FileError(f"{path}: {name!r} holds Python objects, which could run code, and is not read.")
    if any(length < 0 for length in shape):
        raise FileError(f"{path}: {name!r} declares the impossible shape {shape}; the file is damaged.")
    return ArrayInfo(tuple(shape), dtype)


class _Readable:
    """Whatever NumPy or zipfile find wrong, as one sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, FileError) or not isinstance(error, Exception):
            return
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileError(
            f"{self.path}: not a readable NumPy file ({first[:200]}); write or copy it again."
        ) from None
