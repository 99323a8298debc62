"""A reading process: opens slides, decodes patches, writes their pixels into shared memory.

It runs as a separate program, not as a copy of the caller, so that scripts and notebooks need no guard;
it does not import torch. It ends when the other end of its connection closes for any reason.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import tempfile
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xmil.core.errors import XmilError
from xmil.slides import Slide, open_slide
from xmil.slides.backends.direct import with_direct_tiles
from xmil.slides.slide import PatchFit
from xmil.slides.stain import Macenko

OPEN = 2  # slides that a process keeps open


@dataclass(frozen=True)
class PatchSource:
    """A slide and how to read its patches: level-0 edge, pixels, fit for the encoder, stains."""

    path: Path
    edge0: int
    size: int
    fit: PatchFit
    stain: Macenko | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a patch as the encoder sees it."""
        edge = self.fit.edge(self.size)
        return edge, edge, 3

    def pixels(self, slide: Slide, xy0: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """Read one patch as the encoder sees it."""
        x, y = (int(value) for value in np.asarray(xy0))
        patch = slide.read_area((x, y, self.edge0, self.edge0), (self.size, self.size))
        return self.fit(patch if self.stain is None else self.stain.normalise(patch))


class FillRequest(NamedTuple):
    """Patches to write into a slot."""

    slot: int
    source: PatchSource
    xy0: npt.NDArray[np.int64]  # (n, 2)


class FillReply(NamedTuple):
    """A slot that is full, or the error."""

    slot: int
    error: str | None = None


class Shelf:
    """The last used slides, kept open."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, Slide] = OrderedDict()

    def slide(self, path: Path) -> Slide:
        """Return the slide of a file; open it if it is not open."""
        if path not in self._open:
            while len(self._open) >= OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[path] = with_direct_tiles(open_slide(path))
        self._open.move_to_end(path)
        return self._open[path]

    def close(self) -> None:
        for slide in self._open.values():
            slide.close()
        self._open.clear()


def fill(request: FillRequest, shelf: Shelf, ring: Ring) -> FillReply:
    source = request.source
    try:
        slide = shelf.slide(source.path)
        into = ring.view(request.slot, (len(request.xy0), *source.shape))
        for row, xy0 in enumerate(request.xy0):
            into[row] = source.pixels(slide, xy0)
    except XmilError as error:
        return FillReply(request.slot, str(error))
    except Exception as error:  # no fault of one slide may end the run
        words = " ".join(str(error).split())
        return FillReply(request.slot, f"{source.path}: {type(error).__name__}: {words}")
    return FillReply(request.slot)


def main() -> None:
    """Serve requests until the other end closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interruptions
    line, memory, slots, slot_bytes = (int(word) for word in sys.argv[1:5])
    ring, shelf = Ring(memory, slots, slot_bytes), Shelf()
    with Connection(line) as connection:
        try:
            while True:
                connection.send(fill(connection.recv(), shelf, ring))
        except (EOFError, OSError):
            pass  # the run is over
    shelf.close()


Pixels = npt.NDArray[np.uint8]


class Ring:
    """Slots of shared memory behind a file handle."""

    def __init__(self, handle: int, slots: int, slot_bytes: int) -> None:
        self.handle, self.slots, self.slot_bytes = handle, slots, slot_bytes
        self._map = mmap.mmap(handle, slots * slot_bytes)
        self.memory: Pixels = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> Ring:
        """Allocate memory; on systems without anonymous files, in a deleted file."""
        size = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("xmil-patches")
        else:
            handle, name = tempfile.mkstemp(prefix="xmil-patches")
            os.unlink(name)
        os.ftruncate(handle, slots * size)
        return cls(handle, slots, size)

    def view(self, slot: int, shape: tuple[int, ...]) -> Pixels:
        """View the bytes of a slot as an array of pixels, without a copy."""
        size = int(np.prod(shape))
        if not 0 <= slot < self.slots or size > self.slot_bytes:
            raise ValueError(f"{shape} does not fit slot {slot} of {self.slot_bytes} bytes")
        start = slot * self.slot_bytes
        return self.memory[start : start + size].reshape(shape)

    def close(self) -> None:
        """Free the memory, once no array uses it."""
        self.memory = np.empty(0, dtype=np.uint8)
        with suppress(BufferError):  # an array still uses it, and frees it later
            self._map.close()
        handle, self.handle = self.handle, -1
        if handle >= 0:  # close it only once, as its number may be reused
            os.close(handle)
