"""The encoder's side of the reading processes: which process reads what, and what is ready.

Neighbouring patches go to one process, so that it decodes a tile that they share once. A process owns a few
slots of the memory, and fills one while the encoder empties another.
"""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.core.errors import StopError
from xmil.core.interpreter import python_command, python_environment
from xmil.encoders import Encoder
from xmil.runs.feed.reader import FillReply, FillRequest, PatchSource, Pixels, Ring

SLOTS = 3  # for each process
TRIES = 2  # of a part if its process dies


@dataclass(eq=False)
class Part:
    """Patches of a slide that are read together, as rows among the slide's patches."""

    slide: int
    source: PatchSource
    rows: npt.NDArray[np.int64]
    xy0: npt.NDArray[np.int64]
    tries: int = 0


class Filled(NamedTuple):
    """A part with its pixels (n, h, w, 3) in a slot of shared memory, or with the error."""

    part: Part
    pixels: Pixels | None = None
    slot: int = -1
    error: str | None = None


@dataclass(eq=False)
class _Process:
    """A reading process, its free slots, and the parts it is reading, oldest first."""

    number: int
    program: subprocess.Popen[bytes]
    line: Connection
    free: list[int]
    pending: dict[int, Part] = field(default_factory=dict)
    block: deque[Part] = field(default_factory=deque)


class Feed(AbstractContextManager["Feed"]):
    """Reading processes and their memory; use it in a `with` statement."""

    def __init__(self, readers: int, slot_bytes: int) -> None:
        self.readers = readers
        self.ring = Ring.create(readers * SLOTS, slot_bytes)
        self.blocks: deque[deque[Part]] = deque()  # that no process works on yet
        self._dropped: set[int] = set()
        self._processes: list[_Process] = []
        try:
            for number in range(readers):
                self._processes.append(self._start(number))
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, parts: Iterable[Part]) -> None:
        """Queue a block of neighbouring patches for one process."""
        self.blocks.append(deque(parts))

    def drop(self, slide: int) -> None:
        """Skip the remaining patches of a slide."""
        self._dropped.add(slide)

    @property
    def busy(self) -> bool:
        """Whether there are parts still to read or to take."""
        return bool(self.blocks) or any(process.pending or process.block for process in self._processes)

    def next(self) -> Filled | None:
        """Wait for the next part from any process; None if all are read."""
        while True:
            self._hand_out()
            lines = {process.line: process for process in self._processes if process.pending}
            if not lines:
                return None
            for line in wait(list(lines)):
                filled = self._receive(lines[line])  # type: ignore[index]
                if filled is not None:
                    return filled

    def release(self, slot: int) -> None:
        """Free a slot, whose pixels become invalid."""
        self._processes[slot // SLOTS].free.append(slot)

    def close(self) -> None:
        """End the processes and free the memory."""
        for process in self._processes:
            process.line.close()
            process.program.kill()  # it only reads
        for process in self._processes:
            process.program.wait()
        self._processes.clear()
        self.ring.close()

    def _hand_out(self) -> None:
        for process in self._processes:
            while process.free and (part := self._upcoming(process)) is not None:
                slot = process.free.pop()
                process.pending[slot] = part
                with suppress(OSError):  # it has died, which `_receive` notices
                    process.line.send(FillRequest(slot, part.source, part.xy0))

    def _upcoming(self, process: _Process) -> Part | None:
        while True:
            while process.block:
                part = process.block.popleft()
                if part.slide not in self._dropped:
                    return part
            if not self.blocks:
                return None
            process.block = self.blocks.popleft()

    def _receive(self, process: _Process) -> Filled | None:
        """Receive a process's reply; None if it died and was replaced, or if the slide was dropped."""
        try:
            reply: FillReply = process.line.recv()
        except (EOFError, OSError):
            return self._replace(process)
        part = process.pending.pop(reply.slot)
        if reply.error is not None or part.slide in self._dropped:
            self.release(reply.slot)
            return None if part.slide in self._dropped else Filled(part, error=reply.error)
        return Filled(part, self.ring.view(reply.slot, (len(part.rows), *part.source.shape)), reply.slot)

    def _replace(self, dead: _Process) -> Filled | None:
        """Replace a process that died, and try its part once more."""
        dead.line.close()
        code = _end(dead.program)
        waiting = list(dead.pending.values())
        emptying = [
            slot for slot in self._own(dead.number) if slot not in dead.free and slot not in dead.pending
        ]
        new = self._start(dead.number)
        new.free = [slot for slot in new.free if slot not in emptying]
        self._processes[dead.number] = new
        guilty = waiting[0]
        guilty.tries += 1
        lost = guilty.tries >= TRIES
        new.block = deque([*(waiting[1:] if lost else waiting), *dead.block])
        if not lost or guilty.slide in self._dropped:
            return None
        sentence = (
            f"{guilty.source.path}: the process that read it died twice (exit {code}), as happens when "
        )
        return Filled(guilty, error=sentence + "memory runs out or the file is damaged.")

    def _own(self, number: int) -> range:
        return range(number * SLOTS, (number + 1) * SLOTS)

    def _start(self, number: int) -> _Process:
        ours, theirs = Pipe()
        handles = theirs.fileno(), self.ring.handle
        arguments = (*handles, self.ring.slots, self.ring.slot_bytes)
        code = "from xmil.runs.feed.reader import main; main()"
        program = subprocess.Popen(  # noqa: S603  # our own interpreter and program
            python_command("-c", code, *map(str, arguments)),
            pass_fds=handles,
            stdin=subprocess.DEVNULL,
            env=python_environment(OMP_NUM_THREADS="1"),
        )
        theirs.close()
        return _Process(number, program, ours, list(self._own(number)))


def _end(program: subprocess.Popen[bytes]) -> int:
    """Wait for a process that closed its connection; return its exit status."""
    with suppress(subprocess.TimeoutExpired):
        return program.wait(timeout=1.0)
    program.kill()
    return program.wait()


IN_FLIGHT = 2  # batches queued on the GPU before waiting for the oldest


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """Vectors of some patches of a slide."""

    slide: int
    rows: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class HostBatches:
    """The encoder on a CPU: a part is a batch."""

    def __init__(self, encoder: Encoder, feed: Feed) -> None:
        self._encoder, self._feed = encoder, feed

    def add(self, filled: Filled) -> Iterator[EncodedRows]:
        assert filled.pixels is not None  # noqa: S101  # parts that failed do not get here
        batch = torch.from_numpy(filled.pixels).permute(0, 3, 1, 2).contiguous()
        self._feed.release(filled.slot)
        values = encode_batch(self._encoder, batch).cpu().numpy()
        yield EncodedRows(filled.part.slide, filled.part.rows, values)

    def flush(self) -> Iterator[EncodedRows]:
        """Return nothing, since `add` encodes at once."""
        return iter(())

    def close(self) -> None:
        """Do nothing, since it holds no resources."""


@dataclass(eq=False)
class _Batch:
    """A batch of pixels being filled on the GPU, with the slide and rows of each part."""

    pixels: Tensor
    owners: list[tuple[int, npt.NDArray[np.int64]]] = field(default_factory=list)
    used: int = 0


@dataclass(eq=False)
class _Sent:
    """A batch that the GPU is encoding; its vectors arrive in pinned memory."""

    values: Tensor
    batch: _Batch
    done: torch.cuda.Event


class GpuBatches:
    """The encoder on a GPU."""

    def __init__(self, encoder: Encoder, feed: Feed, batch: int) -> None:
        self._encoder, self._feed, self._size = encoder, feed, batch
        self._copies = torch.cuda.Stream(encoder.device)
        self._unpin = pin_memory(feed.ring.memory)
        self._spare: list[Tensor] = []
        self._batch: _Batch | None = None
        self._sent: deque[_Sent] = deque()

    def add(self, filled: Filled) -> Iterator[EncodedRows]:
        """Copy a part to the GPU, and encode each batch that is full."""
        assert filled.pixels is not None  # noqa: S101  # parts that failed do not get here
        pixels, rows = torch.from_numpy(filled.pixels), filled.part.rows
        if self._batch is not None and self._batch.pixels.shape[1:] != pixels.shape[1:]:
            yield from self._encode()
        start = 0
        while start < len(rows):
            batch = self._batch = self._batch or _Batch(self._buffer(pixels))
            part = slice(start, start + self._size - batch.used)
            copied = pixels[part]
            with torch.cuda.stream(self._copies):
                batch.pixels[batch.used : batch.used + len(copied)].copy_(copied, non_blocking=True)
            self._copies.synchronize()
            batch.owners.append((filled.part.slide, rows[part]))
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
        """Release the pinned memory."""
        torch.cuda.synchronize(self._encoder.device)
        self._unpin()

    def _buffer(self, like: Tensor) -> Tensor:
        shape = (self._size, *like.shape[1:])
        while self._spare:
            spare = self._spare.pop()
            if spare.shape == shape:
                return spare
        with torch.cuda.stream(self._copies):  # cleared before pixels are copied into it
            return torch.zeros(shape, dtype=torch.uint8, device=self._encoder.device)

    def _encode(self) -> Iterator[EncodedRows]:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        vectors = encode_batch(self._encoder, batch.pixels.permute(0, 3, 1, 2))
        values = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
        values.copy_(vectors, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(vectors.device))
        self._sent.append(_Sent(values, batch, done))
        while len(self._sent) > IN_FLIGHT:
            yield from self._arrived()

    def _arrived(self) -> Iterator[EncodedRows]:
        sent = self._sent.popleft()
        sent.done.synchronize()
        self._spare.append(sent.batch.pixels)  # free for the next batch
        values, start = sent.values.numpy(), 0
        for slide, rows in sent.batch.owners:
            yield EncodedRows(slide, rows, values[start : start + len(rows)])
            start += len(rows)


def encode_batch(encoder: Encoder, batch: Tensor) -> Tensor:
    """Encode a batch; if the GPU's memory is too small, end the run, since all batches would fail."""
    try:
        return encoder(batch)
    except torch.cuda.OutOfMemoryError:
        raise StopError(f"The GPU's memory is too small for {len(batch)} patches; lower `batch=`.") from None


def pin_memory(memory: npt.NDArray[np.uint8]) -> Callable[[], Any]:
    """Pin memory for asynchronous copies; return a function that undoes it."""
    runtime: Any = torch.cuda.cudart()
    address = memory.ctypes.data
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)) != 0:
        return lambda: None  # not allowed: copies still work, but slower
    return lambda: runtime.cudaHostUnregister(address)
