"""The interface of every container: named arrays with shapes, attributes, and rows on demand."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from xmil.core.bag import FloatArray
from xmil.core.budget import check_budget, stored_bytes
from xmil.core.errors import FileError, XmilError
from xmil.core.text import shorten

Index = npt.NDArray[np.int64]
Empty = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
NUMBERS = "fiub"
MARKS = (".zgroup", ".zarray", ".zmetadata", "zarr.json")  # files that make a folder a zarr store
_RATIO = 1100  # more than deflate can shrink; other codecs rarely come close
_SLACK = 1 << 20


@dataclass(frozen=True)
class ArrayInfo:
    """Shape, type and attributes of a stored array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the array once read."""
        return self.dtype.itemsize * math.prod(int(length) for length in self.shape)


@dataclass(frozen=True)
class Rows:
    """A stored (n, d) array of a type, whose rows are read on demand.

    `read(index)` returns rows in the order of an index, or all for None, as float32. `read_stored(empty)`, if
    that is faster, returns all in their stored type, in an array that `empty` allocates.
    """

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    read: Callable[[Index | None], FloatArray]
    read_stored: Callable[[Empty], npt.NDArray[Any]] | None = None


def take_rows(array: npt.NDArray[Any], index: Index | None) -> FloatArray:
    """Copy rows of an array in memory or in a memory map."""
    rows = array if index is None else array[index]
    return np.array(rows, dtype=np.float32, order="C")


def array_rows(array: npt.NDArray[Any]) -> Rows:
    """Offer the rows of an array in memory."""
    return Rows((int(array.shape[0]), int(array.shape[1])), array.dtype, partial(take_rows, array))


class Contents(ABC):
    """An opened container: names, and arrays on demand."""

    kind: ClassVar[str]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arrays: dict[str, ArrayInfo] = {}
        self.attrs: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def describe(self) -> str:
        """The arrays by name, shape and type, in one line."""
        names = [f"{name} {info.shape} {info.dtype}" for name, info in self.arrays.items()]
        return shorten(names, 8) or "no arrays"

    def read(self, name: str) -> npt.NDArray[Any]:
        """Read one small array of numbers."""
        info = self._numbers(name)
        check_memory(info.nbytes, name, self.path)
        return self._read(name)

    def rows(self, name: str) -> Rows:
        """The (n, d) array of a name, as rows on demand; drops a leading axis of 1."""
        shape = self._numbers(name).shape
        if len(shape) == 3 and shape[0] == 1:
            shape = shape[1:]
        if shape == (0,):
            shape = (0, 0)
        if len(shape) == 1:
            raise FileError(
                f"{self.path}: {name!r} is one vector of {shape[0]} numbers, a slide-level embedding and not "
                "a bag of patches; use the patch features it was made from."
            )
        if len(shape) != 2:
            raise FileError(f"{self.path}: {name!r} must have shape (patches, width). Got {shape} instead.")
        n, width = int(shape[0]), int(shape[1])
        check_memory(n * width * 4, name, self.path)
        return self._rows(name, (n, width))

    def info(self, name: str) -> ArrayInfo:
        """Shape and type of an array; an error if it is missing."""
        if name not in self.arrays:
            raise FileError(f"{self.path}: has no {name!r}; found {self.describe()}.")
        return self.arrays[name]

    def _numbers(self, name: str) -> ArrayInfo:
        """Like `info`; refuse objects, text and compound types."""
        info = self.info(name)
        if info.dtype.kind not in NUMBERS or info.dtype.names is not None:
            raise FileError(f"{self.path}: {name!r} must hold numbers. Got dtype {info.dtype} instead.")
        return info

    @abstractmethod
    def _read(self, name: str) -> npt.NDArray[Any]: ...

    @abstractmethod
    def _rows(self, name: str, shape: tuple[int, int]) -> Rows: ...


def check_stored(declared: int, stored: int, *, packed: bool, name: str, path: Path) -> None:
    """Refuse an array that declares more bytes than the file stores."""
    limit = stored * _RATIO + _SLACK if packed else stored
    if declared > limit:
        raise FileError(
            f"{path}: {name!r} declares {declared:,} bytes but the file stores {stored:,}: it is truncated, "
            "incomplete or damaged; write it again."
        )


def check_chunks(written: int, chunks: int, *, name: str, path: Path) -> None:
    """Refuse an array with missing chunks, which libraries read as zeros."""
    if written < chunks:
        raise FileError(
            f"{path}: {name!r} has {written:,} of {chunks:,} chunks; the others were never written and would "
            "read as zeros; write the file again."
        )


def check_memory(nbytes: int, name: str, path: Path, *, stored: int | None = None) -> None:
    """Refuse an array beyond the budget of its file or store."""
    check_budget(nbytes, name, path, stored=stored_bytes(path) if stored is None else stored)


@contextmanager
def readable(path: Path, what: str) -> Iterator[None]:
    """Turn any error of a library into one sentence: on damage it raises almost any type."""
    try:
        yield
    except XmilError:
        raise
    except MemoryError:
        raise FileError(f"{path}: declares more data than memory can hold; it is damaged.") from None
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileError(f"{path}: not a readable {what} ({reason[:200]}); write or copy it again.") from None
