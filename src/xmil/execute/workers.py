"""A function over many items: in this process, in worker processes, or as tasks of a Ray cluster.

All kinds of workers yield the same outcomes, in the order in which items finish. An item's exception becomes
the text of its outcome. A worker that dies is replaced and its item tried again. `StopError` ends the run.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any, Generic, TypeVar

from xmil.core.errors import (
    OPEN_FILES,
    InputError,
    StopError,
    WriteError,
    XmilError,
    bad_parameter,
    check_names,
    refused,
)
from xmil.core.interpreter import safe_path

KINDS = ("local", "ray")
TOO_MANY_FILES = (
    "Too many files are open at once; raise the limit (`ulimit -n`) or use fewer `workers=`, and repeat the "
    "command to continue."
)
# Errors of a system that cannot make the semaphores of a process pool in /dev/shm.
NO_SHARED_MEMORY = (errno.ENOSPC, errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOSYS)
WRITING = 4  # items whose results are written at the same time: each waits for the disk
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Workers:
    """How many workers to run, and where.

    `workers` is the number of worker processes; one local worker is this process itself. For Ray, 0 means as
    many as the cluster has room for. `gpus` is the number per worker; a fraction lets several share one.
    `retries` counts how often an item is tried again when its worker dies.
    """

    kind: str = "local"
    workers: int = 1
    address: str | None = None
    gpus: float = 0.0
    retries: int = 2

    def __post_init__(self) -> None:
        check_names("engine", [self.kind], KINDS)
        least = 0 if self.kind == "ray" else 1
        if self.workers < least:
            raise bad_parameter("workers", "Workers", f"an int in the range [{least}, inf)", self.workers)
        for name in ("gpus", "retries"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise bad_parameter(name, "Workers", "a number in the range [0, inf)", getattr(self, name))
        if self.address is not None and self.kind != "ray":
            raise InputError("An address is for `engine=ray:ADDRESS`; local workers have none.")

    @property
    def in_process(self) -> bool:
        """Whether the work runs in this process."""
        return self.kind == "local" and self.workers == 1


@dataclass(frozen=True)
class Outcome(Generic[Item, Result]):
    """An item with its result or its error."""

    item: Item
    result: Result | None = None
    error: str | None = None


@dataclass(frozen=True)
class Stages(Generic[Item, Result]):
    """A worker in stages: `read` runs ahead in a thread for the next item, then `work`.

    `write`, if set, turns the return value of `work` into the result, in a thread of its own
    while `work` goes on with the next items; a few may wait for the disk at once.
    """

    read: Callable[[Item], Any]
    work: Callable[[Item, Any], Any]
    write: Callable[[Any], Result] | None = None


Worker = Callable[[Item], Result] | Stages[Item, Result]
MakeWorker = Callable[[], Worker[Item, Result]]


def process(
    items: Iterable[Item], make_worker: MakeWorker[Item, Result], workers: Workers | None = None
) -> Iterator[Outcome[Item, Result]]:
    """Run a worker over the items and yield the outcomes in order of completion.

    `make_worker` is called once in each worker process and returns the function from item to result, or
    `Stages`. It must be picklable: a `functools.partial` of a function of a module.

    >>> from functools import partial
    >>> [(o.item, o.result) for o in process(["a", "bb"], partial(partial, len))]
    [('a', 1), ('bb', 2)]
    """
    workers, source = workers or Workers(), iter(items)
    first = list(islice(source, 1))
    if not first:
        return iter(())  # nothing to do: no worker is made, no Ray is started
    items = chain(first, source)
    if workers.kind == "ray":
        from xmil.execute.cluster import process_on_ray

        return process_on_ray(items, make_worker, workers)
    if workers.workers > 1:
        return process_in_processes(items, make_worker, workers)
    return _process_here(items, make_worker)


def _process_here(
    items: Iterable[Item], make_worker: MakeWorker[Item, Result]
) -> Iterator[Outcome[Item, Result]]:
    with Line(make_worker()) as line:
        before: list[tuple[Item, Future[Reply]]] = []  # whose result is being written
        for item, upcoming in with_next(items):
            before.append((item, line.begin(item, upcoming)))
            while before and (len(before) > WRITING or before[0][1].done()):
                done, reply = before.pop(0)
                yield outcome_of(done, reply.result())
        for done, reply in before:
            yield outcome_of(done, reply.result())


def with_next(items: Iterable[Item]) -> Iterator[tuple[Item, list[Item]]]:
    """Pair each item with a list of the next one, empty at the end.

    >>> list(with_next("ab"))
    [('a', ['b']), ('b', [])]
    """
    waiting: list[Item] = []
    for item in items:
        if waiting:
            yield waiting[0], [item]
        waiting = [item]
    if waiting:
        yield waiting[0], []


@dataclass(frozen=True)
class Reply:
    """A worker's reply for an item; `stop` means that the run must end."""

    result: Any = None
    error: str | None = None
    stop: bool = False


def outcome_of(item: Item, reply: Reply) -> Outcome[Item, Any]:
    """Convert a reply to an outcome, or raise if it stops the run."""
    if reply.stop:
        raise StopError(reply.error or "The worker stopped the run.")
    return Outcome(item, reply.result, reply.error)


logger = logging.getLogger(__name__)


class Line(AbstractContextManager["Line"]):
    """A worker with a thread that reads ahead; an item's exception becomes its reply's text."""

    def __init__(self, worker: Worker[Any, Any]) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="xmil-read")
        self._writer = ThreadPoolExecutor(WRITING, thread_name_prefix="xmil-write")
        self._ahead: tuple[Any, Future[Any]] | None = None

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)

    def run(self, item: Any, upcoming: list[Any]) -> Reply:
        """Work on an item while the upcoming one is read."""
        return self.begin(item, upcoming).result()

    def begin(self, item: Any, upcoming: list[Any]) -> Future[Reply]:
        """Work on an item, and return the future of its reply, which waits for writing."""
        write = self._worker.write if isinstance(self._worker, Stages) else None
        reply = self._guarded(item, lambda: self._run(item, upcoming))
        if write is None or reply.error is not None:
            ready: Future[Reply] = Future()
            ready.set_result(reply)
            return ready
        return self._writer.submit(self._guarded, item, partial(write, reply.result))

    def _guarded(self, item: Any, work: Callable[[], Any]) -> Reply:
        try:
            return Reply(work())
        except Exception as error:  # no fault of one item may end the run
            if (stop := stop_of(error)) is not None:
                return Reply(error=str(stop), stop=True)
            logger.debug("%r", item, exc_info=True)
            return Reply(error=error_line(error))

    def _run(self, item: Any, upcoming: list[Any]) -> Any:
        if not isinstance(self._worker, Stages):
            return self._worker(item)
        if self._ahead is not None and self._ahead[0] == item:
            reading = self._ahead[1]
        else:
            reading = self._thread.submit(self._worker.read, item)
        self._ahead = None
        for other in upcoming:
            self._ahead = other, self._thread.submit(self._worker.read, other)
        return self._worker.work(item, reading.result())


def stop_of(error: Exception) -> StopError | None:
    """Convert an error that every other item would meet, too, into one that ends the run."""
    if isinstance(error, StopError):
        return error
    if isinstance(error, WriteError):
        return StopError(f"{error} Repeat the command to continue; finished slides stay.")
    sentence = error_line(error)
    if not any(os.strerror(number) in sentence for number in OPEN_FILES):
        return None
    return StopError(TOO_MANY_FILES)


def error_line(error: BaseException) -> str:
    """Format an error in one line, with its type unless it is one of xmil's."""
    words = " ".join(str(error).split())
    if isinstance(error, XmilError) and words:
        return words
    if isinstance(error, OSError) and (system := refused(error)) is not None:
        return system
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def make_line(make_worker: MakeWorker[Any, Any]) -> Line:
    """Make a worker and its line; failure to make one ends the run."""
    try:
        return Line(make_worker())
    except Exception as error:
        raise StopError(error_line(error)) from error


_line: Line | None = None  # of this worker process
_make: MakeWorker[Any, Any] | None = None


def process_in_processes(
    items: Iterable[Item], make_worker: MakeWorker[Item, Result], workers: Workers
) -> Iterator[Outcome[Item, Result]]:
    """Yield outcomes from worker processes, which end if the caller stops early."""
    source = iter(items)
    desks = [_Desk(number, make_worker, workers) for number in range(workers.workers)]
    try:
        for desk in desks:
            desk.take(source)
        while busy := {desk.future: desk for desk in desks if desk.future is not None}:
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                yield from busy[future].finish(source)
    except BaseException:  # KeyboardInterrupt, StopError, and GeneratorExit
        for desk in desks:
            desk.abort()
        raise
    for desk in desks:
        desk.close()


@dataclass
class _Desk:
    """A process pool of one, so that a death is due to its item or the one it reads ahead."""

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
        """Yield the outcome of the item, unless it is tried again, and start the next."""
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
        """End the worker process now."""
        if self.stop is not None:
            self.stop.close()  # the worker watches the other end
            self.stop = None
        self.close()

    def _submit(self) -> None:
        try:
            if self.pool is None:
                self._start()
            else:
                self.future = self.pool.submit(_run, self.item, self.upcoming)
        except OSError as error:
            raise StopError(why_no_workers(error)) from error

    def _start(self) -> None:
        """Start the worker process with its first item; it ends once `stop` is closed."""
        context = get_context("spawn")
        watched, self.stop = context.Pipe(duplex=False)
        threads = max(1, (os.cpu_count() or 1) // self.workers.workers)
        settings = (self.make_worker, threads, visible_gpus(self.number, self.workers.gpus), watched)
        with safe_path():  # both lines start processes
            self.pool = ProcessPoolExecutor(1, context, initializer=_begin, initargs=settings)
            self.future = self.pool.submit(_run, self.item, self.upcoming)
        watched.close()


def why_no_workers(error: OSError) -> str:
    """Say why worker processes cannot start, and the way out.

    >>> why_no_workers(OSError(11, "Resource temporarily unavailable"))
    'Worker processes cannot start (Resource temporarily unavailable); use fewer `workers=`.'
    """
    if error.errno in OPEN_FILES:
        return TOO_MANY_FILES
    if error.errno in NO_SHARED_MEMORY:
        return (
            f"Worker processes cannot start: no room in /dev/shm ({error.strerror}); make room, or use "
            "`workers=1`."
        )
    return f"Worker processes cannot start ({error.strerror}); use fewer `workers=`."


def died(times: int) -> str:
    """Write the error of an item whose workers died."""
    return (
        f"The worker process died {times} times without an error message, as happens when memory runs out; "
        "use fewer `workers=` or a lower `memory=`."
    )


def visible_gpus(number: int, gpus: float) -> str | None:
    """Choose a worker's GPUs, in the format of CUDA_VISIBLE_DEVICES; None if it uses none.

    >>> [visible_gpus(number, 0.5) for number in range(4)], visible_gpus(1, 2)
    (['0', '0', '1', '1'], '2,3')
    """
    if gpus <= 0:
        return None
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    numbers = range(int(number * gpus), max(int(number * gpus) + 1, int((number + 1) * gpus)))
    return ",".join(visible[i % len(visible)] if visible else str(i) for i in numbers)


def _begin(make: MakeWorker[Any, Any], threads: int, gpus: str | None, watched: Connection) -> None:
    global _make
    _make = make
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interruptions
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    threading.Thread(target=_leave_with_parent, args=(watched,), daemon=True).start()


def _leave_with_parent(watched: Connection) -> None:
    """End this process after its parent, which cannot end its workers if it is killed."""
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
