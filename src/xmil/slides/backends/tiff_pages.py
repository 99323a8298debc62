"""A TIFF's list of pages, looked at before a library follows it.

tifffile follows a list that leads back into itself for ever; OpenSlide ends the process where it finds no
memory for a tile; both take a page at its word that claims more pixels than its tiles hold.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from xmil.core.errors import FileError
from xmil.slides.backends import UnreadableSlideError

LARGEST_TILE = 1 << 26  # pixels
_TAGS = 4096  # of one page, at most
_WIDTH, _LENGTH, _TILE_WIDTH, _TILE_LENGTH, _OFFSETS = 256, 257, 322, 323, 324


class _Kind(NamedTuple):
    """How a TIFF writes numbers: its byte order, and the sizes of plain and of large files."""

    counted: str
    offset: str
    tag: int
    value: int  # where in a tag
    first: int  # where in the head of the file


def check_pages(path: Path) -> None:
    """Refuse a TIFF whose pages cannot be what they claim; other files pass."""
    with path.open("rb") as stream:
        head = stream.read(16).ljust(16, b"\0")
        if head[:4] in (b"II*\0", b"MM\0*"):
            end = "<" if head[:1] == b"I" else ">"
            kind = _Kind(f"{end}H", f"{end}I", 12, 8, 4)
        elif head[:4] in (b"II+\0", b"MM\0+"):
            end = "<" if head[:1] == b"I" else ">"
            kind = _Kind(f"{end}Q", f"{end}Q", 20, 12, 8)
        else:
            return
        for tags in _pages(stream, kind, struct.unpack_from(kind.offset, head, kind.first)[0]):
            if fault := _tile_fault(tags, kind):
                raise FileError(f"{path}: {fault}; the file is damaged, copy it again.")


def _pages(stream: BinaryIO, kind: _Kind, at: int) -> Iterator[bytes]:
    """The tags of each page, until the list ends or leaves the file."""
    seen = set[int]()
    while at and at not in seen:
        seen.add(at)
        try:
            stream.seek(at)
            (count,) = struct.unpack(kind.counted, stream.read(struct.calcsize(kind.counted)))
            yield stream.read(min(count, _TAGS) * kind.tag)
            (at,) = struct.unpack(kind.offset, stream.read(struct.calcsize(kind.offset)))
        except (struct.error, OverflowError, OSError):
            return
    if at:
        raise UnreadableSlideError("its list of pages leads back into itself")


def _tile_fault(tags: bytes, kind: _Kind) -> str:
    """What is wrong with a page's tiles; empty where nothing is."""
    end, held, tiles = kind.counted[0], dict.fromkeys((_WIDTH, _LENGTH, _TILE_WIDTH, _TILE_LENGTH), 0), 0
    for at in range(0, len(tags) - kind.tag + 1, kind.tag):
        code, number = struct.unpack_from(f"{end}HH", tags, at)
        if code in held:
            wide = "H" if number == 3 else "I"
            held[code] = struct.unpack_from(f"{end}{wide}", tags, at + kind.value)[0]
        if code == _OFFSETS:
            tiles = struct.unpack_from(f"{end}{'Q' if kind.tag == 20 else 'I'}", tags, at + 4)[0]
    width, length = held[_TILE_WIDTH], held[_TILE_LENGTH]
    if width * length > LARGEST_TILE:
        return f"a tile of {width:,} by {length:,} pixels"
    if tiles and width and length and -(-held[_WIDTH] // width) * -(-held[_LENGTH] // length) > tiles:
        return f"a page claims more pixels than its {tiles:,} tiles hold"
    return ""
