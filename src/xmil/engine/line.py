"""One worker's line of items: the next one is read while this one is worked on."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from xmil.core.errors import StopError, XmilError
from xmil.engine.pool import MakeWorker, Reply, Stages, Worker

logger = logging.getLogger(__name__)


class Line(AbstractContextManager["Line"]):
    """A worker with a thread that reads ahead; whatever an item raises becomes its reply's text."""

    def __init__(self, worker: Worker[Any, Any]) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="xmil-read")
        self._ahead: tuple[Any, Future[Any]] | None = None

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def run(self, item: Any, upcoming: list[Any]) -> Reply:
        """The reply for an item, while the upcoming one is read."""
        try:
            return Reply(self._run(item, upcoming))
        except StopError as error:
            return Reply(error=str(error), stop=True)
        except Exception as error:  # an item must not end the run, whatever is wrong with it
            logger.debug("%r", item, exc_info=True)
            return Reply(error=told(error))

    def _run(self, item: Any, upcoming: list[Any]) -> Any:
        if not isinstance(self._worker, Stages):
            return self._worker(item)
        reading = self._reading(item, self._worker)
        self._ahead = None
        for other in upcoming:
            self._ahead = other, self._thread.submit(self._worker.read, other)
        return self._worker.work(item, reading.result())

    def _reading(self, item: Any, stages: Stages[Any, Any]) -> Future[Any]:
        if self._ahead is not None and self._ahead[0] == item:
            return self._ahead[1]
        return self._thread.submit(stages.read, item)


def told(error: BaseException) -> str:
    """An error in one line; with its type where it is not one of ours."""
    words = " ".join(str(error).split())
    if isinstance(error, XmilError) and words:
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def make_line(make_worker: MakeWorker[Any, Any]) -> Line:
    """The line of a new worker; what keeps a worker from being made ends the run."""
    try:
        return Line(make_worker())
    except Exception as error:
        raise StopError(told(error)) from error
