"""Items as tasks of a Ray cluster: Ray places them, counts CPUs and GPUs, and retries when a worker dies."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from xmil.core.errors import InputError, StopError
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
from xmil.runs.workers.processes import died

STORE_BYTES = 80_000_000  # of a local Ray's object store: only names and small results pass through it
QUEUED = 2  # tasks for each place, so that a worker which is done finds the next one waiting

_lines: dict[bytes, Line] = {}  # of this worker process: the last one made


def process_on_ray(
    items: Iterable[Item], make_worker: MakeWorker[Item, Result], workers: Workers
) -> Iterator[Outcome[Item, Result]]:
    """Outcomes from tasks on the cluster at the workers' address, or on a Ray started for this run."""
    ray = _import_ray()
    with _connected(ray, workers):
        task = ray.remote(_run).options(
            num_cpus=workers.cpus, num_gpus=workers.gpus, max_retries=workers.retries, name="xmil"
        )
        made = _pickled(make_worker)
        running: dict[Any, Item] = {}
        try:
            for item in items:
                while len(running) >= _places(ray, workers):
                    yield from _finished(ray, running, workers)
                running[task.remote(made, item)] = item
            while running:
                yield from _finished(ray, running, workers)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


def _finished(ray: Any, running: dict[Any, Item], workers: Workers) -> Iterator[Outcome[Item, Any]]:
    done, _ = ray.wait(list(running), num_returns=1)
    for reference in done:
        item = running.pop(reference)
        try:
            reply = ray.get(reference)
        except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError):
            reply = Reply(error=died(workers.retries + 1))
        except ray.exceptions.RayError as error:
            reply = Reply(error=f"Ray could not run it: {' '.join(str(error).split())[:300]}")
        yield outcome_of(item, reply)


def _places(ray: Any, workers: Workers) -> int:
    """Tasks to hand over at a time: twice what runs at once, as the cluster is now."""
    if workers.workers:
        return workers.workers if workers.address else QUEUED * workers.workers
    have = ray.cluster_resources()
    by_cpu = have.get("CPU", 1) / workers.cpus if workers.cpus else float("inf")
    by_gpu = have.get("GPU", 0) / workers.gpus if workers.gpus else float("inf")
    room = min(by_cpu, by_gpu)
    return QUEUED * max(1, int(room) if room < float("inf") else 1)


@contextmanager
def _connected(ray: Any, workers: Workers) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if workers.address is None:
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": STORE_BYTES}
        options |= {"num_cpus": max(1, round(workers.workers * workers.cpus))} if workers.workers else {}
    else:
        options |= {"address": workers.address}
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        where = workers.address or "a local Ray"
        raise InputError(f"{where}: no connection to Ray ({' '.join(str(error).split())[:300]}).") from None
    try:
        yield
    finally:
        ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise InputError("Ray is not installed; pip install 'xmil[ray]', or use --engine local.") from None
    return ray


def _pickled(make_worker: MakeWorker[Any, Any]) -> bytes:
    from ray import cloudpickle

    return bytes(cloudpickle.dumps(make_worker))  # type: ignore[no-untyped-call, unused-ignore]


def _run(made: bytes, item: Any) -> Reply:
    """One item in a worker process, with the worker of the items before it."""
    from ray import cloudpickle

    try:
        if made not in _lines:
            _lines.clear()  # a worker of another run holds a model: let it go
            _lines[made] = make_line(cloudpickle.loads(made))
    except StopError as error:
        return Reply(error=str(error), stop=True)
    return _lines[made].run(item, [])
