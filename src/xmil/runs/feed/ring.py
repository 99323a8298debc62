"""Memory that reading processes fill and the encoder empties: slots of equal size, passed on by a handle.

The memory has no name, so nothing is left behind by whatever end a process meets.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


class Ring:
    """Slots of shared memory behind a file handle."""

    def __init__(self, handle: int, slots: int, slot_bytes: int) -> None:
        self.handle, self.slots, self.slot_bytes = handle, slots, slot_bytes
        self._map = mmap.mmap(handle, slots * slot_bytes)
        self.memory: Pixels = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> Ring:
        """New memory; on systems without anonymous files, a file that is already deleted."""
        size = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("xmil-patches")
        else:
            handle, name = tempfile.mkstemp(prefix="xmil-patches")
            os.unlink(name)
        os.ftruncate(handle, slots * size)
        return cls(handle, slots, size)

    def view(self, slot: int, shape: tuple[int, ...]) -> Pixels:
        """The bytes of a slot as an array of pixels, without a copy."""
        size = int(np.prod(shape))
        if not 0 <= slot < self.slots or size > self.slot_bytes:
            raise ValueError(f"{shape} does not fit slot {slot} of {self.slot_bytes} bytes")
        start = slot * self.slot_bytes
        return self.memory[start : start + size].reshape(shape)

    def close(self) -> None:
        """Let the memory go, once nobody looks at it any more."""
        self.memory = np.empty(0, dtype=np.uint8)
        with suppress(BufferError):  # an array of it is still held: it goes with that
            self._map.close()
        handle, self.handle = self.handle, -1
        if handle >= 0:  # once: the number may be another file's by now
            os.close(handle)
