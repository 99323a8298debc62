"""Bound the size of a packed chunk before a library unpacks it.

A file's index declares the size of a chunk, but the chunk may hold a thousand times as much, and libraries
unpack all of it. Here HDF5's deflate, zlib, gzip, bz2 and lzma are unpacked only up to the declared size;
blosc, lz4 and zstd state their size in their header.
"""

from __future__ import annotations

import bz2
import lzma
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xmil.core.budget import allowance
from xmil.core.errors import FileError

DEFLATE, SHUFFLE, FLETCHER, SZIP, NBIT, SCALED = range(1, 7)  # HDF5's numbers of filters
KEEPING = (SHUFFLE, FLETCHER)  # keep a chunk's size, except for a checksum
CHUNK_CACHE = 1 << 17  # bytes of HDF5's cache: it stores unpacked chunks but counts declared sizes
_DEFLATES = 1032  # most bytes that one byte can unpack to
_ROOM = 64  # for checksums, headers and incompressible data
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SIZES = {0: 0, 1: 2, 2: 4, 3: 8}


def check_hdf5_chunks(dataset: Any, name: str, path: Path) -> None:
    """Refuse a chunked dataset whose chunks hold more than it declares, or are packed twice."""
    plan = dataset.id.get_create_plist()
    filters = [plan.get_filter(i) for i in range(plan.get_nfilters())]
    codes = [int(entry[0]) for entry in filters]
    packers = [code for code in codes if code not in KEEPING]
    cells, size = math.prod(dataset.chunks), int(dataset.dtype.itemsize)
    if len(packers) > 1 or len(codes) != len(set(codes)):
        raise FileError(f"{path}: {name!r} is packed several times over; write it with one compression.")
    for code, _, values, _ in filters:
        if code in (NBIT, SCALED) and (len(values) < 5 or (values[2], values[4]) != (cells, size)):
            raise _bomb(name, path)
    declared, most = cells * size, allowance(path.stat().st_size)
    with path.open("rb") as stream:
        for offset, stored in _stored(dataset.id):
            if packers and stored > declared + declared // 100 + _ROOM:
                raise _bomb(name, path)
            stream.seek(offset)
            if SZIP in packers and int.from_bytes(stream.read(4), "little") > declared:
                raise _bomb(name, path)
            if DEFLATE in packers and stored * _DEFLATES > most:
                check_unpacked("zlib", stream.read(stored), declared, name=name, path=path)


def _stored(dataset: Any) -> list[tuple[int, int]]:
    """Offset and length of every chunk in the file."""
    chunks: list[tuple[int, int]] = []
    if hasattr(dataset, "chunk_iter"):
        dataset.chunk_iter(lambda info: chunks.append((info.byte_offset, info.size)))
    else:
        infos = (dataset.get_chunk_info(i) for i in range(dataset.get_num_chunks()))
        chunks.extend((info.byte_offset, info.size) for info in infos)
    return chunks


def check_zarr_chunks(folder: Path, codecs: set[str], declared: int, *, name: str, path: Path) -> None:
    """Refuse an array of a zarr store whose chunks hold more than it declares."""
    packers = [codec for codec in codecs if codec in UNPACKED]
    if len(packers) > 1:
        raise FileError(f"{path}: {name!r} is packed several times over; write it with one compression.")
    if not packers or "sharding_indexed" in codecs:
        return
    for file in folder.rglob("*"):
        if file.is_file() and file.name not in ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata"):
            if file.stat().st_size > declared + declared // 100 + 16 * _ROOM:
                raise _bomb(name, path)
            with file.open("rb") as stream:
                content = stream.read(_ROOM if packers[0] in STATING else -1)
            check_unpacked(packers[0], content, declared, name=name, path=path)
            if packers[0] == "blosc" and struct.unpack_from("<I", content, 12)[0] != file.stat().st_size:
                raise _unreadable(name, path)  # blosc would leave the missing bytes uninitialised


def check_unpacked(codec: str, content: bytes, declared: int, *, name: str, path: Path) -> None:
    """Refuse packed bytes that unpack to more than declared."""
    try:
        unpacked = UNPACKED[codec](content, declared + _ROOM)
    except (zlib.error, OSError, EOFError, lzma.LZMAError, struct.error):
        raise _unreadable(name, path) from None
    if unpacked > declared + _ROOM - 1:
        raise _bomb(name, path)


def _inflated(content: bytes, most: int) -> int:
    return len(zlib.decompressobj(47).decompress(content, most))  # zlib or gzip, by its header


def _zstd(content: bytes, _: int) -> int:
    """The size in the frame's header; 0 if it states none."""
    if content[:4] != _ZSTD:
        return 0
    flags = content[4]
    single = flags >> 5 & 1
    width = _ZSTD_SIZES[flags >> 6] or single
    start = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    size = int.from_bytes(content[start : start + width], "little")
    return size + 256 if width == 2 else size


STATING = ("blosc", "lz4", "zstd")  # state their size in their header
UNPACKED: dict[str, Callable[[bytes, int], int]] = {
    "zlib": _inflated,
    "gzip": _inflated,
    "bz2": lambda content, most: len(bz2.BZ2Decompressor().decompress(content, most)),
    "lzma": lambda content, most: len(lzma.LZMADecompressor(memlimit=1 << 28).decompress(content, most)),
    "blosc": lambda content, _: int(struct.unpack_from("<III", content, 4)[0]),
    "lz4": lambda content, _: int(struct.unpack_from("<I", content)[0]),
    "zstd": _zstd,
}


def _unreadable(name: str, path: Path) -> FileError:
    return FileError(f"{path}: {name!r} has a chunk that cannot be unpacked; write or copy the file again.")


def _bomb(name: str, path: Path) -> FileError:
    return FileError(
        f"{path}: {name!r} has a chunk that unpacks to more than it declares: the file is damaged or a "
        "memory bomb; write it again."
    )
