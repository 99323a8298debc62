"""`execute`: work on the items of a step and keep what came of each in the ledger of the run's folder.

A verb over slides describes its work as a `Step`: which items there are, what decides their results, who
works on them, and what sums up the run. `execute` opens the folder, skips items that are done, hands the
others to the workers, records each result or error, keeps slides.csv and failures.csv up to date, and lets
the step finish.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from xmil.core.durable import identity
from xmil.core.errors import InputError, XmilError
from xmil.core.ledger import plain_number, writing_for
from xmil.core.text import is_utf8
from xmil.execute.workers import MakeWorker, Outcome, Stages, Workers, process
from xmil.storage import FAILURES, WHOLE_RUN, Item, Record, RunWriter, open_folder

NOT_UTF8 = "the name of its file is not in UTF-8; rename the file"
LOOKING = 16  # threads that look for finished items: they wait for the disk
AT_A_TIME = 10_000  # items per round of these threads: a million pending results would fill memory
SECONDS_BETWEEN_TABLES = 5.0
RESTING = 20  # pause between writing the tables, in multiples of the time that writing took
T = TypeVar("T")
TableRow = dict[str, Any]


class Listener:
    """Gets the messages of a run; this base class ignores them."""

    def say(self, sentence: str) -> None:
        """Report what was found, left out or inferred."""

    def warn(self, sentence: str) -> None:
        """Report what makes the results doubtful."""

    def failures(self, failed: Mapping[str, str]) -> None:
        """Report the slides that have no result, with the reason."""

    def counting(self, what: str, total: int) -> AbstractContextManager[Callable[[], None]]:  # noqa: ARG002
        """Count `total` items; call the function that this yields for each item done."""
        return nullcontext(lambda: None)


@dataclass
class Tally:
    """What came of a run: slides done now, done before, and failed with the reason; the records by item."""

    done: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{len(self.before)} already done, {len(self.failed)} failed"

    @property
    def rows(self) -> dict[str, TableRow]:
        """The rows of the run's table by slide."""
        return {row["slide_id"]: row for record in self.records.values() for row in record.rows}


def every_column(rows: Sequence[TableRow]) -> list[str]:
    """The columns of a table: all that some row has."""
    return list(dict.fromkeys(key for row in rows for key in row)) or ["slide_id"]


def _no_worker() -> Any:
    """Stand in for the workers of a step with a schedule of its own."""
    raise NotImplementedError("a step needs `make_worker` or `schedule`")


@dataclass(frozen=True)
class Step(Generic[T]):
    """The work of a command: what to do, for which items, and what decides the results.

    `settings` decide all results: a folder with others is refused, apart from those in `grows`, which a later
    run may extend. `about` are further entries of run.json. `make_worker` makes a function from an item to
    its `Record`, or `Stages`, once in each process. `finish` sums up the run and returns entries of run.json,
    such as `warnings`. The rest is optional: `prepare` runs first; `adopt` makes the record of an item from
    its files, if the ledger has none; `schedule` replaces the workers; `refused` are slides that failed
    before, with the reason; `adds` keeps the rows of other slides; without `columns` there is no slides.csv;
    `of_slides` is False if items are no slides, so that there is no failures.csv either; `compared` is False
    if the folder takes items of other settings, too.
    """

    kind: str
    items: Sequence[Item[T]]
    settings: Mapping[str, Any]
    make_worker: MakeWorker[Item[T], Record] = _no_worker
    finish: Callable[[Tally], Mapping[str, Any]] = lambda _: {}
    about: Mapping[str, Any] = field(default_factory=dict)
    doing: str = "working on slides"
    verb: str = "used"
    columns: Callable[[Sequence[TableRow]], list[str]] | None = every_column
    prepare: Callable[[], None] = lambda: None
    adopt: Callable[[Item[T]], Record | None] = lambda _: None
    schedule: Callable[[Sequence[Item[T]]], Iterator[Outcome[Item[T], Record]]] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    grows: tuple[str, ...] = ()
    adds: bool = False
    of_slides: bool = True
    compared: bool = True


def execute(
    step: Step[T],
    out: Path,
    *,
    workers: Workers | None = None,
    listener: Listener | None = None,
    restart: bool = False,
) -> Tally:
    """Work on the items of a step that are not done; record each failure and continue with the rest."""
    if not step.items and not step.refused:
        raise InputError("There is nothing to do: no slide was found.")
    listener = listener or Listener()
    items = [item for item in step.items if all(map(is_utf8, item.names))]
    unnamed = {ascii(name): NOT_UTF8 for item in step.items for name in item.names if not is_utf8(name)}
    tally = Tally(failed={**step.refused, **unnamed})
    schedule = step.schedule or partial(work_on, make_worker=step.make_worker, workers=workers)
    with open_folder(
        out, step.kind, step.settings, about=step.about, compared=step.compared, grows=step.grows,
        restart=restart, only=[item.key for item in items] if step.adds else None,
    ) as folder:  # fmt: skip
        with writing_for(WHOLE_RUN):
            step.prepare()
        with (
            _tables(folder, step, items, tally) as save,
            listener.counting(step.doing, len(items)) as advance,
        ):
            missing = list(_missing(folder, step, items, tally, advance))
            for outcome in schedule(missing):
                _record(folder, outcome, tally)
                advance()
                save()
        listener.failures(tally.failed)
        if not tally.records and tally.failed:
            raise InputError(f"No slide could be {step.verb}; {out / FAILURES} says why.")
        with writing_for(WHOLE_RUN):
            summary = step.finish(tally)
        for key, record in tally.records.items():
            if record is not folder.records[key]:  # summing up added to its rows
                folder.record(key, record)
        _write_tables(folder, step, items, tally)
        for warning in summary.get("warnings", ()):
            listener.warn(warning)
        folder.describe({**step.about, "warnings": [], **summary})
    return tally


def work_on(
    items: Sequence[Item[T]], make_worker: MakeWorker[Item[T], Record], workers: Workers | None = None
) -> Iterator[Outcome[Item[T], Record]]:
    """Let workers work on items, and yield their outcomes as they finish."""
    return process(items, partial(_make_recorder, make_worker), workers)


def work_in_turn(
    items: Iterable[Item[T]], work: Callable[[Item[T]], Record]
) -> Iterator[Outcome[Item[T], Record]]:
    """Work on items one after another in this process; an error ends the run."""
    for item in items:
        with writing_for(item.key):
            record = work(item)
        yield Outcome(item, complete_record(record, item))


def _make_recorder(make_worker: MakeWorker[Item[T], Record]) -> Stages[Item[T], Record]:
    """Make a worker whose records say which input files were read, and whose files are its item's."""
    worker = make_worker()
    stages: Stages[Item[T], Record]
    stages = worker if isinstance(worker, Stages) else Stages(lambda _: None, lambda item, _: worker(item))

    def read(item: Item[T]) -> tuple[Item[T], Any]:
        item = identify_inputs(item)
        return item, stages.read(item)

    def work(_: Item[T], ready: tuple[Item[T], Any]) -> tuple[Item[T], Any]:
        item, content = ready
        with writing_for(item.key):
            return item, stages.work(item, content)

    def write(worked: tuple[Item[T], Any]) -> Record:
        item, result = worked
        with writing_for(item.key):
            record = result if stages.write is None else stages.write(result)
        return complete_record(record, item)

    if stages.write is None:
        return Stages(read, lambda item, ready: write(work(item, ready)))
    return Stages(read, work, write)


def identify_inputs(item: Item[T]) -> Item[T]:
    """Note which input files an item has, before they are read."""
    return replace(item, sources=tuple(_identify(path, item.by_time) for path in item.inputs))


def _identify(path: Path | None, by_time: bool) -> str | None:
    """Identify an input file; None if there is none, or if it cannot be read, which the worker reports."""
    with suppress(XmilError):
        return None if path is None else identity(path, times=by_time)
    return None


def complete_record(record: Record, item: Item[Any]) -> Record:
    """Add to a record what decided it, and convert it to what the ledger will read back."""
    plain = Record.from_dict(json.loads(json.dumps(record.as_dict(), default=plain_number)))
    parts = plain.parts or list(item.parts)
    return replace(
        plain, sources=list(item.sources), decides=dict(item.decides), parts=parts, extra=record.extra
    )


def _missing(
    folder: RunWriter,
    step: Step[T],
    items: Sequence[Item[T]],
    tally: Tally,
    advance: Callable[[], None],
) -> Iterator[Item[T]]:
    """Yield the items that are not done; add the records of the others to the tally."""

    find = partial(folder.find_record, adopt=step.adopt)
    with ThreadPoolExecutor(LOOKING) as threads:
        for start in range(0, len(items), AT_A_TIME):
            chunk = items[start : start + AT_A_TIME]
            for item, record in zip(chunk, threads.map(find, chunk), strict=True):
                if record is None:
                    yield item
                    continue
                tally.before += item.names
                tally.records[item.key] = record
                advance()


def _record(folder: RunWriter, outcome: Outcome[Item[T], Record], tally: Tally) -> None:
    """Note the outcome of an item in the ledger and the tally."""
    item, record = outcome.item, outcome.result
    if outcome.error is None and record is not None:
        tally.done += item.names
        tally.records[item.key] = record
        folder.record(item.key, record)
        return
    error = outcome.error or "no result"
    tally.failed |= dict.fromkeys(item.names, error)
    earlier = folder.records.get(item.key)
    if (
        earlier is not None and earlier.parts and item.is_same(earlier)
    ):  # it has the methods of an earlier run
        folder.record(item.key, replace(earlier, error=error))
    else:
        folder.record(item.key, Record(error=error))


@contextmanager
def _tables(
    folder: RunWriter, step: Step[T], items: Sequence[Item[T]], tally: Tally
) -> Iterator[Callable[[], None]]:
    """Write the run's tables from time to time, and at the end even after an error."""
    due = time.monotonic() + SECONDS_BETWEEN_TABLES

    def save() -> None:
        nonlocal due
        start = time.monotonic()
        if start >= due:
            _write_tables(folder, step, items, tally)
            took = time.monotonic() - start
            due = time.monotonic() + max(SECONDS_BETWEEN_TABLES, RESTING * took)

    try:
        yield save
    except BaseException:  # a full disk, an interruption: record what is done, if the disk allows it
        with suppress(XmilError):
            _write_tables(folder, step, items, tally)
        raise
    _write_tables(folder, step, items, tally)


def _write_tables(folder: RunWriter, step: Step[T], items: Sequence[Item[T]], tally: Tally) -> None:
    """Write slides.csv and failures.csv from the records."""
    if not step.of_slides:
        return
    folder.write_failures(tally.failed)
    if step.columns is None:
        return
    keys = [item.key for item in items]
    others = sorted(folder.records.keys() - {*keys}) if step.adds else []
    records = [folder.records[key] for key in (*others, *keys) if key in folder.records]
    rows = [row for record in records for row in record.rows]
    folder.write_table(step.columns(rows), rows)
