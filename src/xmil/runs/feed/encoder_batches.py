"""Parts of slides put together to batches of one size for the encoder, whichever slide they are of.

On a GPU pixels go over in uint8 from pinned memory while the batch before is encoded, and vectors come back
the same way: neither the GPU nor the reading processes wait for the other. Every batch has the same number of
rows, the last one padded, so a row's vector does not depend on what else was ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.core.errors import StopError
from xmil.encoders import Encoder
from xmil.runs.feed.feed import Feed, Filled
from xmil.runs.feed.tile_feed import TileFeed

IN_FLIGHT = 2  # batches that the GPU has before the vectors of an earlier one are waited for


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """Vectors of some patches of a slide."""

    slide: int
    rows: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class HostBatches:
    """The encoder on a CPU: a part is a batch."""

    def __init__(self, encoder: Encoder, feed: Feed | TileFeed) -> None:
        self._encoder, self._feed = encoder, feed

    def add(self, filled: Filled) -> Iterator[EncodedRows]:
        """Encode a part."""
        assert filled.pixels is not None  # noqa: S101  # parts that failed do not get here
        batch = _tensor(filled.pixels).permute(0, 3, 1, 2).contiguous()
        self._feed.release(filled.slot)
        values = encoded(self._encoder, batch).cpu().numpy()
        yield EncodedRows(filled.part.slide, filled.part.rows, values)

    def flush(self) -> Iterator[EncodedRows]:
        """Nothing is held back."""
        return iter(())

    def close(self) -> None:
        """Nothing to let go."""


@dataclass(eq=False)
class _Batch:
    """Pixels on the GPU that are being gathered: whose rows they are."""

    pixels: Tensor
    owners: list[tuple[int, npt.NDArray[np.int64]]] = field(default_factory=list)
    used: int = 0


@dataclass(eq=False)
class _Sent:
    """A batch that the GPU works on; its vectors arrive in pinned memory."""

    values: Tensor
    batch: _Batch
    done: torch.cuda.Event


class GpuBatches:
    """The encoder on a GPU."""

    def __init__(self, encoder: Encoder, feed: Feed | TileFeed, batch: int) -> None:
        self._encoder, self._feed, self._size = encoder, feed, batch
        self._copies = torch.cuda.Stream(encoder.device)
        self._unpin = pinned(feed.ring.memory)
        self._spare: list[Tensor] = []
        self._batch: _Batch | None = None
        self._sent: deque[_Sent] = deque()

    def add(self, filled: Filled) -> Iterator[EncodedRows]:
        """Copy a part to the GPU; whenever a batch is full, it is encoded."""
        assert filled.pixels is not None  # noqa: S101  # parts that failed do not get here
        pixels, rows = _tensor(filled.pixels), filled.part.rows
        if self._batch is not None and self._batch.pixels.shape[1:] != pixels.shape[1:]:
            yield from self._encode()
        start = 0
        while start < len(rows):
            batch = self._batch = self._batch or _Batch(self._buffer(pixels))
            some = slice(start, start + self._size - batch.used)
            copied = pixels[some]
            with torch.cuda.stream(self._copies):
                batch.pixels[batch.used : batch.used + len(copied)].copy_(copied, non_blocking=True)
            self._copies.synchronize()
            batch.owners.append((filled.part.slide, rows[some]))
            batch.used += len(copied)
            start += len(copied)
            if start == len(rows):
                self._feed.release(filled.slot)
            if batch.used == self._size:
                yield from self._encode()

    def flush(self) -> Iterator[EncodedRows]:
        """Encode what is left, and wait for all vectors."""
        yield from self._encode()
        while self._sent:
            yield from self._arrived()

    def close(self) -> None:
        """Let the pinned memory go."""
        torch.cuda.synchronize(self._encoder.device)
        self._unpin()

    def _buffer(self, like: Tensor) -> Tensor:
        shape = (self._size, *like.shape[1:])
        while self._spare:
            found = self._spare.pop()
            if found.shape == shape:
                return found
        with torch.cuda.stream(self._copies):  # cleared before pixels are copied into it
            return torch.zeros(shape, dtype=torch.uint8, device=self._encoder.device)

    def _encode(self) -> Iterator[EncodedRows]:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        found = encoded(self._encoder, batch.pixels.permute(0, 3, 1, 2))
        values = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        values.copy_(found, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(found.device))
        self._sent.append(_Sent(values, batch, done))
        while len(self._sent) > IN_FLIGHT:
            yield from self._arrived()

    def _arrived(self) -> Iterator[EncodedRows]:
        sent = self._sent.popleft()
        sent.done.synchronize()
        self._spare.append(sent.batch.pixels)  # they may be overwritten now
        values, start = sent.values.numpy(), 0
        for slide, rows in sent.batch.owners:
            yield EncodedRows(slide, rows, values[start : start + len(rows)])
            start += len(rows)


def _tensor(pixels: npt.NDArray[np.uint8] | Tensor) -> Tensor:
    return pixels if isinstance(pixels, Tensor) else torch.from_numpy(pixels)


def encoded(encoder: Encoder, batch: Tensor) -> Tensor:
    """The vectors of a batch; a batch that the GPU cannot hold ends the run, as the next one would."""
    try:
        return encoder(batch)
    except torch.cuda.OutOfMemoryError:
        raise StopError(f"The GPU's memory is too small for {len(batch)} patches; lower --batch.") from None


def pinned(memory: npt.NDArray[np.uint8]) -> Callable[[], Any]:
    """Pin memory for copies that nobody waits for; gives what undoes it."""
    runtime: Any = torch.cuda.cudart()
    address = memory.ctypes.data
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)) != 0:
        return lambda: None  # not allowed here: copies are slower, and right
    return lambda: runtime.cudaHostUnregister(address)
