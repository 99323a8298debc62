"""The reading processes of a run, from the encoder's side: who reads what, and what is ready.

Neighbouring patches go to one process, which then decodes each tile they share once. A process owns a few
slots of the memory; it fills one while another is being emptied.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from xmil.runs.feed.reader import FillReply, FillRequest, PatchSource
from xmil.runs.feed.ring import Pixels, Ring

if TYPE_CHECKING:
    from torch import Tensor

SLOTS = 3  # for each process
TRIES = 2  # of a part whose process dies


@dataclass(eq=False)
class Part:
    """Some patches of a slide that are read together: their rows among the slide's patches."""

    slide: int
    source: PatchSource
    rows: npt.NDArray[np.int64]
    xy0: npt.NDArray[np.int64]
    tries: int = 0


class Filled(NamedTuple):
    """A part that is read, its pixels (n, h, w, 3) in shared memory or on the GPU; or why it could not be."""

    part: Part
    pixels: Pixels | Tensor | None
    slot: int
    error: str | None = None


@dataclass(eq=False)
class _Process:
    """A reading process, the slots it may fill, and what it was asked for, oldest first."""

    number: int
    program: subprocess.Popen[bytes]
    line: Connection
    free: list[int]
    asked: dict[int, Part] = field(default_factory=dict)
    block: deque[Part] = field(default_factory=deque)


class Feed(AbstractContextManager["Feed"]):
    """Reading processes and their memory; use it in a `with` statement."""

    def __init__(self, readers: int, slot_bytes: int) -> None:
        self.readers = readers
        self.ring = Ring.create(readers * SLOTS, slot_bytes)
        self.blocks: deque[deque[Part]] = deque()
        self._dropped: set[int] = set()
        self._processes: list[_Process] = []
        try:
            for number in range(readers):
                self._processes.append(self._started(number))
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, parts: Iterable[Part]) -> None:
        """Have a block of neighbouring patches read, by one process."""
        self.blocks.append(deque(parts))

    @property
    def queued(self) -> int:
        """Blocks that nobody works on yet."""
        return len(self.blocks)

    def drop(self, slide: int) -> None:
        """Read no more of a slide."""
        self._dropped.add(slide)

    @property
    def busy(self) -> bool:
        """Whether something is still to be read or taken."""
        return bool(self.blocks) or any(one.asked or one.block for one in self._processes)

    def next(self) -> Filled | None:
        """The next part that is ready, of whichever process is first; None where nothing is under way."""
        while True:
            self._hand_out()
            lines = {one.line: one for one in self._processes if one.asked}
            if not lines:
                return None
            for line in wait(list(lines)):
                found = self._taken(lines[line])  # type: ignore[index]
                if found is not None:
                    return found

    def release(self, slot: int) -> None:
        """Let a slot be filled again; its pixels are gone. What was never in a slot needs no release."""
        if slot < 0:
            return
        self._processes[slot // SLOTS].free.append(slot)

    def close(self) -> None:
        """End the processes and let the memory go."""
        for one in self._processes:
            one.line.close()
            one.program.kill()  # it only reads
        for one in self._processes:
            one.program.wait()
        self._processes.clear()
        self.ring.close()

    def _hand_out(self) -> None:
        for one in self._processes:
            while one.free and (part := self._upcoming(one)) is not None:
                slot = one.free.pop()
                one.asked[slot] = part
                with suppress(OSError):  # it has died: seen when its answer is waited for
                    one.line.send(FillRequest(slot, part.source, part.xy0))

    def _upcoming(self, one: _Process) -> Part | None:
        while True:
            while one.block:
                part = one.block.popleft()
                if part.slide not in self._dropped:
                    return part
            if not self.blocks:
                return None
            one.block = self.blocks.popleft()

    def _taken(self, one: _Process) -> Filled | None:
        """A process's answer; None where it died and its work is begun again, or is not wanted any more."""
        try:
            reply: FillReply = one.line.recv()
        except (EOFError, OSError):
            return self._replaced(one)
        part = one.asked.pop(reply.slot)
        if reply.error is not None or part.slide in self._dropped:
            self.release(reply.slot)
            return None if part.slide in self._dropped else Filled(part, None, -1, reply.error)
        return Filled(part, self.ring.view(reply.slot, (len(part.rows), *part.source.shape)), reply.slot)

    def _replaced(self, dead: _Process) -> Filled | None:
        """Start another process in place of one that died; the part it worked on is tried once more."""
        dead.line.close()
        code = _end(dead.program)
        waiting = list(dead.asked.values())
        held = [slot for slot in self._own(dead.number) if slot not in dead.free and slot not in dead.asked]
        new = self._started(dead.number)
        new.free = [slot for slot in new.free if slot not in held]  # those are still being emptied
        self._processes[dead.number] = new
        guilty = waiting[0]
        guilty.tries += 1
        lost = guilty.tries >= TRIES
        new.block = deque([*(waiting[1:] if lost else waiting), *dead.block])
        if not lost or guilty.slide in self._dropped:
            return None
        told = f"{guilty.source.path}: the process that read it died twice (exit {code}), as happens when "
        return Filled(guilty, None, -1, told + "memory runs out or the file is damaged.")

    def _own(self, number: int) -> range:
        return range(number * SLOTS, (number + 1) * SLOTS)

    def _started(self, number: int) -> _Process:
        ours, theirs = Pipe()
        handles = theirs.fileno(), self.ring.handle
        words = (*handles, self.ring.slots, self.ring.slot_bytes)
        code = "from xmil.runs.feed.reader import main; main()"
        path = os.pathsep.join(folder for folder in sys.path if folder)
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        program = subprocess.Popen(  # noqa: S603  # our own interpreter and program
            [sys.executable, "-P", "-c", code, *map(str, words)],
            pass_fds=handles,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        return _Process(number, program, ours, list(self._own(number)))


def _end(program: subprocess.Popen[bytes]) -> int:
    """The exit status of a process that hung up."""
    with suppress(subprocess.TimeoutExpired):
        return program.wait(timeout=1.0)
    program.kill()
    return program.wait()
