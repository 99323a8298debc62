"""Items as tasks of a Ray cluster: Ray places them, counts CPUs and GPUs, and retries when a worker dies."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from xmil.core.errors import InputError, StopError
from xmil.core.interpreter import safe_path, variable
from xmil.execute.workers import (
    Item,
    Line,
    MakeWorker,
    Outcome,
    Reply,
    Result,
    Workers,
    died,
    make_line,
    outcome_of,
)

STORE_BYTES = 80_000_000  # of a local Ray's object store: only names and small results pass through it
QUEUED = 2  # tasks per place, so that an idle worker has the next one ready

_lines: dict[bytes, Line] = {}  # at most one, of this worker process


def process_on_ray(
    items: Iterable[Item], make_worker: MakeWorker[Item, Result], workers: Workers
) -> Iterator[Outcome[Item, Result]]:
    """Yield outcomes of tasks on the cluster at the workers' address, or on a Ray started for this run."""
    try:
        import ray
        import ray.exceptions
        from ray import cloudpickle
    except ImportError:
        raise InputError("Ray is not installed; pip install 'xmil[ray]', or use `engine=local`.") from None
    with _connected(ray, workers):
        task = ray.remote(_run).options(
            num_cpus=1, num_gpus=workers.gpus, max_retries=workers.retries, name="xmil"
        )
        pickled: bytes = cloudpickle.dumps(make_worker)  # type: ignore[no-untyped-call, unused-ignore]
        driver, folder = this_process(), os.getcwd()
        tasks = _Tasks(ray, workers, lambda item: task.remote(pickled, item, driver, folder))
        try:
            for item in items:
                while len(tasks.running) >= _places(ray, workers):
                    yield from tasks.finished()
                tasks.submit(item, 0)
            while tasks.running:
                yield from tasks.finished()
        finally:
            tasks.cancel()


class _Tasks:
    """The running tasks, and how often Ray failed each item.

    If a worker dies, its item fails. If Ray itself fails (a raylet, an agent, a node), the item is submitted
    again; if that does not help, the run stops, and can be resumed later.
    """

    def __init__(self, ray: Any, workers: Workers, start: Callable[[Any], Any]) -> None:
        self.ray, self.workers, self.start = ray, workers, start
        self.running: dict[Any, tuple[Any, int]] = {}

    def submit(self, item: Any, failures: int) -> None:
        with self._stopping():
            self.running[self.start(item)] = (item, failures)

    def finished(self) -> Iterator[Outcome[Any, Any]]:
        with self._stopping():
            done, _ = self.ray.wait(list(self.running), num_returns=1)
        for reference in done:
            item, failures = self.running.pop(reference)
            reply = self._reply(reference, item, failures)
            if reply is not None:
                yield outcome_of(item, reply)

    def _reply(self, reference: Any, item: Any, failures: int) -> Reply | None:
        """Fetch the reply; None if the item is tried again."""
        errors = self.ray.exceptions
        try:
            reply: Reply = self.ray.get(reference)
            return reply
        except (errors.WorkerCrashedError, errors.OutOfMemoryError):
            return Reply(error=died(self.workers.retries + 1))
        except errors.RayError as error:
            if failures >= self.workers.retries or isinstance(error, errors.LocalRayletDiedError):
                raise _stopped(error) from None
            self.submit(item, failures + 1)
            return None

    def cancel(self) -> None:
        """Cancel running tasks, if Ray still runs."""
        for reference in self.running:
            with suppress(Exception):
                self.ray.cancel(reference, force=True)

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        try:
            yield
        except (self.ray.exceptions.RayError, ConnectionError) as error:
            raise _stopped(error) from None


def _stopped(error: BaseException) -> StopError:
    reason = " ".join(str(error).split())[:200]
    return StopError(f"Ray stopped working ({reason}); restart it and repeat the command to continue.")


def _places(ray: Any, workers: Workers) -> int:
    """Count the tasks to submit at a time: twice what the cluster can run now."""
    if workers.workers:
        return workers.workers if workers.address else QUEUED * workers.workers
    have = ray.cluster_resources()
    by_gpu = have.get("GPU", 0) / workers.gpus if workers.gpus else float("inf")
    return QUEUED * max(1, int(min(have.get("CPU", 1), by_gpu)))


@contextmanager
def _connected(ray: Any, workers: Workers) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not set(sys.path) & {"", os.getcwd()}:
        options |= {"job_config": _without_current_folder()}
    if workers.address is None:
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": STORE_BYTES}
        options |= {"num_cpus": workers.workers} if workers.workers else {}
    else:
        options |= {"address": workers.address}
    try:
        with safe_path(), nullcontext() if workers.address else _on_loopback():
            ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        address = workers.address or "a local Ray"
        token = "; if the cluster asks for a token, set RAY_AUTH_MODE=token" if workers.address else ""
        why = " ".join(str(error).split())[:300]
        raise InputError(f"{address}: no connection to Ray ({why}){token}.") from None
    try:
        yield
    finally:
        ray.shutdown()


def _without_current_folder() -> Any:
    """Settings of a Ray job whose workers do not import from the driver's current folder.

    Ray puts that folder first on their path, even before numpy is imported, except for jobs of its client.
    """
    from ray.job_config import JobConfig

    return JobConfig(_client_job=True)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let a Ray that starts within the block listen on this machine only, as on Windows and macOS.

    Ray has no option for this: it replaces an address of 127.0.0.1 by the one that others can reach.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with variable(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0"):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _run(pickled: bytes, item: Any, driver: Driver, folder: str) -> Reply:
    """Work on one item in a worker process, with the worker of earlier items."""
    from ray import cloudpickle

    leave_with(driver)
    with suppress(OSError):  # another machine may not have the driver's folder
        os.chdir(folder)
    try:
        if pickled not in _lines:
            _lines.clear()  # frees the model of another run
            _lines[pickled] = make_line(cloudpickle.loads(pickled))
    except StopError as error:
        return Reply(error=str(error), stop=True)
    return _lines[pickled].run(item, [])


INTERVAL = 0.5  # seconds between checks of the driver

_watched: set[Driver] = set()


class Driver(NamedTuple):
    """A process by machine, number and start time, since numbers are reused."""

    host: str
    pid: int
    begun: str


def this_process() -> Driver:
    return Driver(_machine(), os.getpid(), _begun(os.getpid()))


def leave_with(driver: Driver) -> None:
    """End this process once the driver has ended, if the driver is on this machine."""
    if driver in _watched or driver.host != _machine() or not driver.begun:
        return
    _watched.add(driver)
    threading.Thread(target=_watch, args=(driver,), name="xmil-driver", daemon=True).start()


def is_alive(driver: Driver) -> bool:
    """Whether the process of a driver on this machine still runs.

    >>> is_alive(this_process())
    True
    """
    return _begun(driver.pid) == driver.begun


def _watch(driver: Driver) -> None:
    while is_alive(driver):
        time.sleep(INTERVAL)
    os._exit(1)


def _machine() -> str:
    """Identify the machine and its namespace of process numbers."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _begun(pid: int) -> str:
    """Read a process's start in kernel ticks; empty if it has ended, is a zombie, or is unknown."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if words[0] in "ZX" else words[19]
