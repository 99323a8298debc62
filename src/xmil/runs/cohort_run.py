"""What every run over a cohort shares: folder, settings, resuming, tables and warnings."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from xmil.core.errors import FileError, InputError, XmilError
from xmil.core.task import TASKS, Task, with_reference
from xmil.core.text import is_utf8
from xmil.data.bags import Case
from xmil.runs.requests import Listener, RunRequest
from xmil.runs.workers.pool import MakeWorker, Outcome, process
from xmil.storage import SLIDES, RunFolder, read_rows, read_run

NOT_UTF8 = "the name of its file is not in UTF-8; rename the file"
LOOKING = 16  # threads that look for finished slides: they wait for the disk
AT_A_TIME = 10_000  # slides per round of these threads: a million pending results would fill memory
RESTING = 20  # pause between writing the tables, in multiples of the time that writing took
Item = TypeVar("Item")
Result = TypeVar("Result")
TableRow = dict[str, Any]


@dataclass
class Tally(Generic[Result]):
    """The outcome of a run: slides done now, already done, and failed with the reason.

    `results` are by the first slide of an item, `rows` by slide.
    """

    done: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    rows: dict[str, TableRow] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{len(self.found)} already done, {len(self.failed)} failed"


@dataclass(frozen=True)
class CohortRun(ABC, Generic[Item, Result]):
    """A folder of results for a request, written item by item (one slide or several), that can be resumed.

    A subclass defines its settings, which items are done, the worker for the others, and the rows of an
    item; `finish` writes what needs all results.
    """

    out: Path
    request: RunRequest
    kind: ClassVar[str]
    folders: ClassVar[tuple[str, ...]] = ()
    verb: ClassVar[str] = "done"
    doing: ClassVar[str] = ""  # label of the progress bar
    tabled: ClassVar[bool] = True  # whether it writes slides.csv
    adds: ClassVar[bool] = False  # whether rows of earlier runs stay in it
    grows: ClassVar[tuple[str, ...]] = ()  # settings that a later run may extend
    marks: ClassVar[tuple[str, ...]] = ()  # files of earlier versions, which wrote no run.json

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """Settings that decide the results: a later run in the folder must have the same.

        Options of the request declared with `decides=True` that are not among them are compared as well.
        """

    def slides_of(self, item: Item) -> Sequence[str]:
        """The slides of an item: by default its name, or the first element of a tuple."""
        name: Any = item
        return (name,) if isinstance(name, str) else (name[0],)

    @abstractmethod
    def make_worker(self) -> MakeWorker[Item, Result]:
        """Return a function that makes the worker of a process."""

    def outcomes(self, items: Sequence[Item]) -> Iterator[Outcome[Item, Result]]:
        """Work on items and yield their outcomes as they finish."""
        return process(items, self.make_worker(), self.request.pool)

    def about(self) -> Mapping[str, Any]:
        """Further entries of run.json besides the settings."""
        return {}

    def find_result(self, item: Item) -> Result | None:  # noqa: ARG002 - for subclasses
        """Find the result of a finished item; None for an item to work on."""
        return None

    def earlier_rows(self, item: Item) -> list[TableRow]:  # noqa: ARG002 - for subclasses
        """Rows from earlier runs that stay valid until the item is done again."""
        return []

    def rows_of(self, item: Item, result: Result) -> list[TableRow]:  # noqa: ARG002 - for subclasses
        """The rows of an item in slides.csv."""
        return []

    def header(self, rows: Sequence[TableRow]) -> list[str]:
        """The columns of slides.csv."""
        return list(dict.fromkeys(key for row in rows for key in row)) or ["slide_id"]

    def outputs(self, items: Sequence[Item]) -> Iterable[Path] | None:  # noqa: ARG002 - for subclasses
        """The files a restart removes; None for all that the earlier run wrote."""
        return None

    def warnings(self, items: Sequence[Item], tally: Tally[Result]) -> list[str]:  # noqa: ARG002
        """Sentences on what makes the results doubtful."""
        return []

    def begin(self, *, again: bool) -> None:
        """Prepare the folder; `again` means that it holds an earlier run with these settings."""

    @cached_property
    def before(self) -> Mapping[str, TableRow]:
        """The rows of earlier runs in slides.csv."""
        return read_rows(self.out / SLIDES)

    def finish(
        self,
        items: Sequence[Item],  # noqa: ARG002 - for subclasses
        tally: Tally[Result],  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Write the files that need all results; return entries for run.json, also `warnings`."""
        return {}

    @property
    def folder(self) -> RunFolder:
        """The folder, identified by the settings and by further options that decide results."""
        own, request = self.settings(), self.request
        covered = {*own, *own.get("reading", ())}  # options for reading files are in a group of their own
        fields = type(request).model_fields
        more = {  # without defaults, so that a new option does not change the folders of earlier versions
            name: value
            for name, value in request.settings().items()
            if name not in covered and getattr(request, name) != fields[name].default
        }
        return RunFolder(self.out, self.kind, {**own, **more}, self.marks, grows=self.grows)

    @cached_property
    def fingerprint(self) -> str:
        return self.folder.fingerprint

    def execute(
        self,
        items: Sequence[Item],
        listener: Listener | None = None,
        *,
        refused: Mapping[str, str] | None = None,
    ) -> Tally[Result]:
        """Work on the items that are not done; record each failure and continue with the rest.

        `refused` are slides that failed before the run, with the reason.
        """
        listener, folder, restart = listener or Listener(), self.folder, self.request.restart
        about, again = self.about(), read_run(self.out) is not None
        unit = "cases" if getattr(self.request, "by", "slide") == "case" else "slides"
        unnamed = {slide for item in items for slide in self.slides_of(item) if not is_utf8(slide)}
        items = [item for item in items if unnamed.isdisjoint(self.slides_of(item))] if unnamed else items
        refused = {**(refused or {}), **{ascii(slide): NOT_UTF8 for slide in unnamed}}
        with folder.open(about, folders=self.folders, restart=restart, outputs=self.outputs(items)):
            self.begin(again=again)
            tally: Tally[Result] = Tally(failed=dict(refused), rows=self._rows_before(items))
            counting = listener.counting(f"{self.doing} {unit}".strip(), len(items))
            with self._tables(folder, items, tally) as save, counting as advance:
                waiting = list(self._waiting(items, tally, advance))
                for outcome in self.outcomes(waiting):
                    self._note(outcome, tally)
                    advance()
                    save()
            listener.failures(tally.failed)
            if not tally.results and (tally.failed or not items):
                raise InputError(f"No slide could be {self.verb}; {self.out / 'failures.csv'} says why.")
            tally.warnings += self.warnings(items, tally)
            for warning in tally.warnings:
                listener.warn(warning)
            summary = self.finish(items, tally)
            for warning in (later := list(summary.get("warnings", ()))):
                listener.warn(warning)
            folder.write({**about, **summary, "warnings": [*tally.warnings, *later]})
        return tally

    def _waiting(
        self, items: Sequence[Item], tally: Tally[Result], advance: Callable[[], None]
    ) -> Iterator[Item]:
        """Yield the items that are not done; add results of the others to the tally."""
        with ThreadPoolExecutor(LOOKING) as threads:
            for start in range(0, len(items), AT_A_TIME):
                chunk = items[start : start + AT_A_TIME]
                for item, (result, rows) in zip(chunk, threads.map(self._look, chunk), strict=True):
                    if result is None:
                        for slide in self.slides_of(item):
                            tally.rows.pop(slide, None)
                        tally.rows |= {row["slide_id"]: row for row in rows}
                        yield item
                        continue
                    tally.found += self.slides_of(item)
                    self._take(item, result, tally)
                    advance()

    def _look(self, item: Item) -> tuple[Result | None, list[TableRow]]:
        """Find the result of an item, or the rows that stay valid until it is done again."""
        result = self.find_result(item)
        return result, self.earlier_rows(item) if result is None else []

    def _rows_before(self, items: Sequence[Item]) -> dict[str, TableRow]:
        """Rows of these items in slides.csv, to keep them if a run is interrupted before it checks them."""
        try:
            before = self.before
        except FileError:  # damaged: it is written again
            return {}
        return {slide: before[slide] for item in items for slide in self.slides_of(item) if slide in before}

    def _note(self, outcome: Outcome[Item, Result], tally: Tally[Result]) -> None:
        slides = self.slides_of(outcome.item)
        if outcome.error is not None or outcome.result is None:
            tally.failed |= dict.fromkeys(slides, outcome.error or "no result")
            return
        tally.done += slides
        self._take(outcome.item, outcome.result, tally)

    def _take(self, item: Item, result: Result, tally: Tally[Result]) -> None:
        tally.results[self.slides_of(item)[0]] = result
        tally.rows |= {row["slide_id"]: row for row in self.rows_of(item, result)}

    @contextmanager
    def _tables(
        self, folder: RunFolder, items: Sequence[Item], tally: Tally[Result]
    ) -> Iterator[Callable[[], None]]:
        """Write the run's tables from time to time, and at the end even after an error."""
        due = time.monotonic() + 5.0

        def save(*, now: bool = False) -> None:
            nonlocal due
            if now or time.monotonic() >= due:
                start = time.monotonic()
                self._write_tables(folder, items, tally)
                due = time.monotonic() + max(5.0, RESTING * (time.monotonic() - start))

        try:
            yield save
        except BaseException:  # a full disk, an interruption: record what is done, if the disk allows it
            with suppress(XmilError):
                save(now=True)
            raise
        save(now=True)

    def _write_tables(self, folder: RunFolder, items: Sequence[Item], tally: Tally[Result]) -> None:
        slides = [slide for item in items for slide in self.slides_of(item)]
        if self.tabled:
            before = self.before if self.adds else {}
            rows_of_slides = {**before, **tally.rows}
            known = [slide for slide in dict.fromkeys(slides) if slide in rows_of_slides]
            if not before.keys() >= {*known}:  # a killed run may have left only the first rows
                written = {*known}
                before = {slide: row for slide, row in before.items() if slide not in written}
            rows = [rows_of_slides[slide] for slide in dict.fromkeys([*before, *known])]
            folder.write_slides(self.header(rows), rows)
        folder.write_failures(dict(sorted(tally.failed.items())))


Logits = Sequence[float] | Sequence[Sequence[float]]  # of one model, or of each of an ensemble


def slide_row(
    case: Case,
    place: int,
    *,
    logits: Logits,
    spec: Mapping[str, Any],
    n: int,
    seconds: float | None = None,
) -> TableRow:
    """Make the row of a case's slide number `place` from the outputs of one or several models."""
    task, outputs = TASKS[str(spec.get("task") or "classification")], np.atleast_2d(np.asarray(logits, float))
    names = task.names(outputs.shape[1], spec.get("class_names"), spec.get("time_bins"))
    columns = prediction(task, with_reference(outputs, spec), names)
    if task.truth == "time":  # as `xmil predict` writes them
        days, event = case.label if isinstance(case.label, tuple) else (None, None)
        columns |= {"time": days, "event": event}
    return {
        "slide_id": case.slides[place],
        "case_id": case.case_id or case.name,
        "label": task.label_text(case.label, names),
        "predicted": columns.pop("predicted", None),
        "correct": task.correct(outputs[None], [case.label])[0],
        **columns,
        "n": n,
        "features": str(case.paths[place].absolute()),
        "seconds": None if seconds is None else round(seconds, 4),
    }


def prediction(task: Task, outputs: Any, names: Sequence[str]) -> TableRow:
    """Convert the outputs (m, c) of one model or an ensemble to the columns of the task's tables.

    >>> prediction(TASKS["classification"], [[0.0, 1.0]], ["benign", "tumour"])
    {'predicted': 'tumour', 'p:benign': 0.268941, 'p:tumour': 0.731059}
    >>> prediction(TASKS["regression"], [[1.5]], ["value"])
    {'value': 1.5}
    """
    columns = task.describe(np.asarray(outputs)[None], names)
    return {
        key: value if isinstance(value, str) else float(f"{value:.6g}") for key, (value,) in columns.items()
    }
