"""Worker processes on this machine, each with a process pool of one, so that a death has one culprit."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

from xmil.core.errors import StopError
from xmil.runs.workers.pool import (
    Item,
    Line,
    MakeWorker,
    Outcome,
    Reply,
    Result,
    Workers,
    make_line,
    outcome_of,
)

_line: Line | None = None  # of this worker process
_make: MakeWorker[Any, Any] | None = None


def process_in_processes(
    items: Iterable[Item], make_worker: MakeWorker[Item, Result], workers: Workers
) -> Iterator[Outcome[Item, Result]]:
    """Outcomes from worker processes; those under way are ended when the caller leaves early."""
    source = iter(items)
    desks = [_Desk(number, make_worker, workers) for number in range(workers.workers)]
    try:
        for desk in desks:
            desk.take(source)
        while busy := {desk.future: desk for desk in desks if desk.future is not None}:
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                yield from busy[future].finish(source)
    except BaseException:  # KeyboardInterrupt, StopError, and a caller that stops asking
        for desk in desks:
            desk.abort()
        raise
    for desk in desks:
        desk.close()


@dataclass
class _Desk:
    """One worker process, the item it works on and the one it reads meanwhile."""

    number: int
    make_worker: MakeWorker[Any, Any]
    workers: Workers
    future: Future[Reply] | None = None
    item: Any = None
    upcoming: list[Any] = field(default_factory=list)
    deaths: int = 0
    pool: ProcessPoolExecutor | None = None
    stop: Connection | None = None

    def take(self, source: Iterator[Any]) -> None:
        """Start on the next item, if there is one, and choose the one to read ahead."""
        queued = self.upcoming or list(islice(source, 1))
        self.future, self.deaths = None, 0
        if queued:
            self.item, self.upcoming = queued[0], list(islice(source, 1))
            self._submit()

    def finish(self, source: Iterator[Any]) -> Iterator[Outcome[Any, Any]]:
        """The outcome of the item, unless it is tried again; then on with the next."""
        assert self.future is not None  # noqa: S101  # narrows the type for mypy
        try:
            reply = self.future.result()
        except BrokenProcessPool:
            self.close()
            self.deaths += 1
            if self.deaths <= self.workers.retries:
                self._submit()
                return
            reply = Reply(error=died(self.deaths))
        item = self.item
        self.take(source)
        yield outcome_of(item, reply)

    def close(self) -> None:
        """End the worker process once it is idle."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
        if self.stop is not None:
            self.stop.close()
        self.pool = self.stop = None

    def abort(self) -> None:
        """End the worker process now, whatever it does."""
        if self.stop is not None:
            self.stop.close()  # the worker watches the other end
            self.stop = None
        self.close()

    def _submit(self) -> None:
        if self.pool is None:
            context = get_context("spawn")
            watched, self.stop = context.Pipe(duplex=False)
            threads = max(1, (os.cpu_count() or 1) // self.workers.workers)
            settings = (self.make_worker, threads, visible_gpus(self.number, self.workers.gpus), watched)
            self.pool = ProcessPoolExecutor(1, context, initializer=_begin, initargs=settings)
            self.future = self.pool.submit(_run, self.item, self.upcoming)
            watched.close()
        else:
            self.future = self.pool.submit(_run, self.item, self.upcoming)


def died(times: int) -> str:
    """The reason of an item whose workers died."""
    return (
        f"The worker process died {times} times without an error message, as happens when memory runs out; "
        "use fewer workers= or a lower memory=."
    )


def visible_gpus(number: int, gpus: float) -> str | None:
    """The GPUs of a worker as CUDA_VISIBLE_DEVICES has them, None where it asks for none.

    >>> [visible_gpus(number, 0.5) for number in range(4)], visible_gpus(1, 2)
    (['0', '0', '1', '1'], '2,3')
    """
    if gpus <= 0:
        return None
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    wanted = range(int(number * gpus), max(int(number * gpus) + 1, int((number + 1) * gpus)))
    return ",".join(visible[i % len(visible)] if visible else str(i) for i in wanted)


def _begin(make: MakeWorker[Any, Any], threads: int, gpus: str | None, watched: Connection) -> None:
    global _make
    _make = make
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interruption means
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    threading.Thread(target=_leave_with_parent, args=(watched,), daemon=True).start()


def _leave_with_parent(watched: Connection) -> None:
    """A parent that was killed cannot end its workers: they end themselves."""
    parent = parent_process()
    wait_for([watched] if parent is None else [watched, parent.sentinel])
    os._exit(1)


def _run(item: Any, upcoming: list[Any]) -> Reply:
    global _line
    try:
        if _line is None:
            assert _make is not None  # noqa: S101  # narrows the type for mypy
            _line = make_line(_make)
    except StopError as error:
        return Reply(error=str(error), stop=True)
    return _line.run(item, upcoming)
