"""Points at which a process may die or the disk be full: every file and folder made, half written, renamed.

Lines of a run's ledger are points, too: half written, and written.

Used by `benchmarks.killed` and its tests only, in processes of their own: the calls of the system are
wrapped. Points are counted over all processes of a command through a shared file.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

LEDGER = "ledger.jsonl"
AT, COUNTER, ALL = "KILL_AT", "KILL_COUNTER", "KILL_ALL"
FULL = 300  # bytes that a file may still have once the disk is full


def install(at: int, counter: Path, *, everyone: bool, full: bool = False) -> None:
    """Die at the point of that number, alone or with every process of the group; 0 only counts.

    `full`: from that point on nothing can be written, by no library: names are refused, and files end early.
    """
    points = (_FullDisk if full else _Points)(at, counter, everyone)
    os.register_at_fork(after_in_child=points.open)
    os.environ.update({AT: str(at), COUNTER: str(counter), ALL: str(int(everyone))})
    replace, mkstemp, mkdir, write = os.replace, tempfile.mkstemp, os.mkdir, os.write

    def dying_replace(source: Any, target: Any, **more: Any) -> None:
        points.reach(lambda: os.truncate(source, os.path.getsize(source) // 2))  # half written
        points.reach()
        replace(source, target, **more)
        points.follow()

    def dying_mkstemp(*args: Any, **more: Any) -> tuple[int, str]:
        points.refuse()
        made = mkstemp(*args, **more)
        points.reach()
        return made

    def dying_mkdir(*args: Any, **more: Any) -> None:
        points.refuse()
        mkdir(*args, **more)
        points.reach()

    def dying_write(handle: int, content: Any) -> int:
        if not _is_ledger(handle):
            return write(handle, content)
        points.reach(lambda: write(handle, content[: len(content) // 2]))  # half a line
        written = write(handle, content)
        points.follow()
        return written

    os.replace, os.mkdir, os.write = dying_replace, dying_mkdir, dying_write
    tempfile.mkstemp = dying_mkstemp  # type: ignore[assignment]


def _is_ledger(handle: int) -> bool:
    """Whether an open file is the ledger of a run."""
    try:
        return os.readlink(f"/proc/self/fd/{handle}").endswith(f"/{LEDGER}")
    except OSError:
        return False


def struck(counter: Path) -> Path:
    """The mark of a kill that took place."""
    return counter.with_name(counter.name + ".struck")


class _Points:
    """Counts the points of all processes by the length of a file they append to."""

    def __init__(self, at: int, counter: Path, everyone: bool) -> None:
        self.at, self.counter, self.everyone = at, counter, everyone
        self.open()

    def open(self) -> None:
        """An opening of its own for each process: the place in the file is then its own too."""
        self.lock = Lock()
        self.handle = os.open(self.counter, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def reach(self, first: Callable[[], None] | None = None) -> None:
        with self.lock:
            os.write(self.handle, b".")
            here = os.lseek(self.handle, 0, os.SEEK_CUR)
        if here == self.at:
            struck(self.counter).touch()
            self.strike(first)

    def follow(self) -> None:
        """Reach a point after something was written."""
        self.reach()

    def refuse(self) -> None:
        """Where the disk is full, no name can be made."""

    def strike(self, first: Callable[[], None] | None) -> None:
        if first is not None:
            first()
        if self.everyone:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class _FullDisk(_Points):
    """Lets the process live, on a disk that is full."""

    def reach(self, first: Callable[[], None] | None = None) -> None:
        self.refuse()
        super().reach(first)

    def follow(self) -> None:
        """What was written stays written: only what comes next is refused."""
        super().reach()

    def refuse(self) -> None:
        if self.at and self.counter.stat().st_size >= self.at:
            self._limit()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def strike(self, first: Callable[[], None] | None) -> None:  # noqa: ARG002
        self._limit()

    def _limit(self) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))
