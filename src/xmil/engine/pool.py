"""A function over many items: in this process, in worker processes, or as tasks of a Ray cluster.

Every engine gives the same outcomes; they come as the items are finished. What an item raises becomes the
text of its outcome. A worker that dies is replaced and its item tried again. `StopError` ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from xmil.core.errors import InputError, StopError, bad_parameter, unknown_name

KINDS = ("local", "ray")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Engine:
    """Where and how wide to run.

    `workers` is the number of worker processes; one local worker is this process itself. For Ray, 0 means as
    many as the cluster has room for. `cpus` and `gpus` are what one worker takes; a fraction of a GPU lets
    several share it. `retries` counts how often an item is tried again when its worker dies.
    """

    kind: str = "local"
    workers: int = 1
    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    retries: int = 2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("engine", self.kind, KINDS)
        least = 0 if self.kind == "ray" else 1
        if self.workers < least:
            raise bad_parameter("workers", "Engine", f"an int in the range [{least}, inf)", self.workers)
        for name in ("cpus", "gpus", "retries"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise bad_parameter(name, "Engine", "a number in the range [0, inf)", getattr(self, name))
        if self.address is not None and self.kind != "ray":
            raise InputError("An address is for --engine ray; the local engine has none.")


@dataclass(frozen=True)
class Outcome(Generic[Item, Result]):
    """An item with its result, or with the reason it has none."""

    item: Item
    result: Result | None = None
    error: str | None = None


@dataclass(frozen=True)
class Stages(Generic[Item, Result]):
    """A worker in two stages: `read` runs ahead in a thread for the item that comes next, `work` follows."""

    read: Callable[[Item], Any]
    work: Callable[[Item, Any], Result]


Worker = Callable[[Item], Result] | Stages[Item, Result]
MakeWorker = Callable[[], Worker[Item, Result]]


def process(
    items: Iterable[Item], make_worker: MakeWorker[Item, Result], engine: Engine | None = None
) -> Iterator[Outcome[Item, Result]]:
    """Run a worker over the items and give the outcomes in order of completion.

    `make_worker` is called once in each worker process and returns the function from item to result, or
    `Stages`. It must be picklable: a `functools.partial` of a function of a module.

    >>> from functools import partial
    >>> [(o.item, o.result) for o in process(["a", "bb"], partial(partial, len))]
    [('a', 1), ('bb', 2)]
    """
    engine, source = engine or Engine(), iter(items)
    first = list(islice(source, 1))
    if not first:
        return iter(())  # nothing to do: no worker is made, no Ray is started
    items = chain(first, source)
    if engine.kind == "ray":
        from xmil.engine.cluster import process_on_ray

        return process_on_ray(items, make_worker, engine)
    if engine.workers > 1:
        from xmil.engine.processes import process_in_processes

        return process_in_processes(items, make_worker, engine)
    return _process_here(items, make_worker)


def _process_here(
    items: Iterable[Item], make_worker: MakeWorker[Item, Result]
) -> Iterator[Outcome[Item, Result]]:
    from xmil.engine.line import Line

    with Line(make_worker()) as line:
        for item, upcoming in with_next(items):
            yield outcome_of(item, line.run(item, upcoming))


def with_next(items: Iterable[Item]) -> Iterator[tuple[Item, list[Item]]]:
    """Each item with a list of the one after it, empty at the end.

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
    """What a worker sends back for an item; `stop` says that the run must end."""

    result: Any = None
    error: str | None = None
    stop: bool = False


def outcome_of(item: Item, reply: Reply) -> Outcome[Item, Any]:
    """The outcome of a reply; a reply that stops the run is raised."""
    if reply.stop:
        raise StopError(reply.error or "The worker stopped the run.")
    return Outcome(item, reply.result, reply.error)


__all__ = ["Engine", "Outcome", "Stages", "process"]
