"""Reads HDF5's text attributes without HDF5: on a damaged heap the library hangs or crashes.

Text of variable length lies in a global heap. HDF5 2.0 walks a heap with an empty free block for ever, and
other damage crashes it, so we walk the object header and the heap ourselves (HDF5 File Format Specification
3.0, sections III.E and IV.A). Whatever is not understood is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_CONTINUATION, _ATTRIBUTE, _VARIABLE_LENGTH = 0x10, 0x0C, 9
_BLOCKS = 64  # continuation blocks of one header
_HEAP = 1 << 26  # bytes of one heap
Message = tuple[int, int, bytes]


def read_texts(path: Path, address: int) -> dict[str, str]:
    """The variable-length text attributes of the object at `address`, as far as they are sound."""
    found: dict[str, str] = {}
    try:
        with open(path, "rb") as file:
            for name, places in _texts(file, address):
                text = _heap_object(file, *places[0]) if len(places) == 1 else None
                if text is not None:
                    found[name] = text.decode("utf-8", "replace")
    except (struct.error, ValueError, OSError, OverflowError, IndexError):
        pass
    return found


def _texts(file: IO[bytes], address: int) -> Iterator[tuple[str, list[tuple[int, int, int]]]]:
    for kind, flags, body in _messages(file, address):
        if kind == _ATTRIBUTE and not flags & 2:
            name, datatype, data = _attribute(body)
            if datatype[0] & 0x0F == _VARIABLE_LENGTH:
                yield name, [struct.unpack_from("<IQI", data, at) for at in range(0, len(data) - 15, 16)]


def _attribute(body: bytes) -> tuple[str, bytes, bytes]:
    version, flags, *sizes = struct.unpack_from("<BBHHH", body)
    if version not in (1, 2, 3) or (version > 1 and flags):
        raise ValueError
    at, parts = (9 if version == 3 else 8), []
    for size in sizes:
        parts.append(body[at : at + size])
        at += -(-size // 8) * 8 if version == 1 else size
    name, datatype, _ = parts
    return name.split(b"\0")[0].decode("utf-8", "replace"), datatype, body[at:]


def _messages(file: IO[bytes], address: int) -> Iterator[Message]:
    head = _read(file, address, 32)
    first, order = _second_version(head) if head.startswith(b"OHDR") else (_first_version(head), None)
    blocks = [(address + first[0], first[1])]
    for count, (start, length) in enumerate(blocks):
        if count >= _BLOCKS:
            raise ValueError
        for kind, flags, body in _block(_read(file, start, length), order):
            if kind == _CONTINUATION:
                offset, size = struct.unpack_from("<QQ", body)
                blocks.append((offset, size) if order is None else (offset + 4, size - 8))
            yield kind, flags, body


def _first_version(head: bytes) -> tuple[int, int]:
    version, _, _, _, size = struct.unpack_from("<BBHII", head)
    if version != 1:
        raise ValueError
    return 16, size


def _second_version(head: bytes) -> tuple[tuple[int, int], int]:
    flags = head[5]
    at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
    width = 1 << (flags & 3)
    return (at + width, int.from_bytes(head[at : at + width], "little")), 2 if flags & 4 else 0


def _block(block: bytes, order: int | None) -> Iterator[Message]:
    """Messages of one block; `order` is the size of the creation-order field in version 2 headers."""
    at = 0
    while at + (8 if order is None else 4) <= len(block):
        if order is None:
            kind, size, flags = struct.unpack_from("<HHB", block, at)
            at += 8
        else:
            kind, size, flags = struct.unpack_from("<BHB", block, at)
            at += 4 + order
        yield kind, flags, block[at : at + size]
        at += size


def _heap_object(file: IO[bytes], length: int, address: int, index: int) -> bytes | None:
    """An object of the heap at the address, or None where the heap is damaged."""
    if length == 0:
        return b""
    magic, version, _, _, size = struct.unpack("<4sBBHQ", _read(file, address, 16))
    if magic != b"GCOL" or version != 1 or not 16 <= size <= _HEAP:
        return None
    heap, at = _read(file, address, size), 16
    while at + 16 <= len(heap):
        number, _, _, held = struct.unpack_from("<HHIQ", heap, at)
        if number == index:
            data = heap[at + 16 : at + 16 + min(length, held)]
            return data if len(data) == length else None
        step = 16 + -(-held // 8) * 8 if number else held
        if step < 16:
            return None
        at += step
    return None


def _read(file: IO[bytes], start: int, length: int) -> bytes:
    if length > _HEAP:
        raise ValueError
    file.seek(start)
    data = file.read(length)
    if not data:
        raise ValueError
    return data
