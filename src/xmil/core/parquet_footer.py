"""The counts in a Parquet file's footer, read without Arrow, whose process a damaged statistic can end.

The footer is a Thrift structure in the compact protocol: fields by number, integers as variable bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from os import PathLike
from typing import Any

MAGIC = b"PAR1"
_DEEP = 12  # levels of a sound footer are fewer
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 11, 12


@dataclass(frozen=True)
class ColumnChunk:
    """One column of one group of rows, as the footer counts it."""

    physical: int  # Parquet's number of the type
    encodings: tuple[int, ...]
    path: tuple[str, ...]
    values: int
    unpacked: int  # bytes


def column_chunks(path: str | PathLike[str]) -> list[ColumnChunk]:
    """Every column chunk of a file; ValueError where the footer is damaged."""
    try:
        footer = _Compact(_footer(path)).structure(0)
        groups = footer[4]
        return [_chunk(column[3]) for group in groups for column in group[1]]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the footer is damaged ({error})") from None


def _chunk(held: dict[int, Any]) -> ColumnChunk:
    names = tuple(name.decode("utf-8", "replace") for name in held[3])
    counts = (held[1], held[5], held[6], *held[2])
    if not all(isinstance(count, int) for count in counts) or held[5] < 0 or held[6] < 0:
        raise TypeError("a count is none")
    return ColumnChunk(held[1], tuple(held[2]), names, held[5], held[6])


def _footer(path: str | PathLike[str]) -> bytes:
    with open(path, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 8))
        length, mark = int.from_bytes(stream.read(4), "little"), stream.read(4)
        if mark != MAGIC or length + 8 > size:
            raise ValueError("no Parquet file, or cut off")
        stream.seek(size - 8 - length)
        return stream.read(length)


class _Compact:
    """Reads structures of Thrift's compact protocol as dicts by the numbers of their fields."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def structure(self, depth: int) -> dict[int, Any]:
        if depth > _DEEP:
            raise ValueError("the footer is nested too deep")
        found: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != _STOP:
            number = number + (head >> 4) if head >> 4 else self._signed()
            found[number] = self._value(head & 15, depth)
        return found

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
        raise ValueError("the footer holds what Parquet does not use")

    def _list(self, depth: int) -> list[Any]:
        if depth > _DEEP:
            raise ValueError("the footer is nested too deep")
        head = self._byte()
        count, kind = head >> 4, head & 15
        count = self._unsigned() if count == 15 else count
        if count > len(self.content) - self.at:  # each takes a byte at least
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
