"""A run on the screen: its messages, a bar, its failures and its exit code."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.core.text import merge_notes, text_table
from xmil.execute import Listener

if TYPE_CHECKING:
    from rich.progress import Progress

    from xmil.storage import Run

Words = Callable[[str], str]
FAILURES = 20  # on the screen; failures.csv has all
SAMPLING = ("xmil.methods.shapley", "xmil.methods.interactions")


class Screen(Listener):
    """Prints the messages of a run; with `as_json` it collects them for the report.

    `words` puts the parameters of a sentence into the words of the command line.
    """

    def __init__(self, words: Words, *, as_json: bool = False) -> None:
        self.words = words
        self.as_json = as_json
        self.lines: list[str] = []
        self._parts: ExitStack | None = None
        self._bars: Progress | None = None

    def say(self, sentence: str) -> None:
        self.lines.append(self.words(sentence))
        if not self.as_json:
            print(self.lines[-1])

    def warn(self, sentence: str) -> None:
        if not self.as_json:
            print(f"warning: {self.words(sentence)}")

    def failures(self, failed: Mapping[str, str]) -> None:
        """Print a line for each of the first reasons, with the slides that failed for it."""
        if self.as_json:
            return
        lines = merge_notes(failed)
        for line in lines[:FAILURES]:
            names, _, reason = line.partition(": ")
            print(f"{names}: failed: {self.words(reason)}")
        if len(lines) > FAILURES:
            print(f"... and {len(lines) - FAILURES} more reasons; see failures.csv.")

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a bar on the standard error."""
        with ExitStack() as alone:
            bars = self._bars or (self._parts or alone).enter_context(progress_bars(counts=True))
            self._bars = None if self._parts is None else bars
            bar = bars.add_task(what, total=total)
            yield lambda: bars.advance(bar)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Show the bars of a command's steps below each other within the block."""
        with ExitStack() as self._parts:
            try:
                yield
            finally:
                self._bars = self._parts = None


@contextmanager
def announce_costs() -> Iterator[None]:
    """Print once what the first slide costs, for each sampling method within the block."""
    seen: set[str] = set()

    def first(record: logging.LogRecord) -> bool:
        fresh = str(record.msg) not in seen
        seen.add(str(record.msg))
        return fresh

    quiet = [log for log in map(logging.getLogger, SAMPLING) if not log.isEnabledFor(logging.INFO)]
    for log in quiet:
        log.setLevel(logging.INFO)
        log.addFilter(first)
    try:
        yield
    finally:
        for log in quiet:
            log.setLevel(logging.NOTSET)
            log.removeFilter(first)


def progress_bars(*, counts: bool = False) -> Progress:
    """Make bars on the standard error with the remaining time, and the count or the elapsed time."""
    from rich import progress
    from rich.console import Console

    middle = progress.MofNCompleteColumn() if counts else progress.TimeElapsedColumn()
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), middle)
    last = progress.TimeRemainingColumn()
    is_screen = sys.stdout.isatty()
    return progress.Progress(*columns, last, console=Console(stderr=True), redirect_stdout=is_screen)


def finish_command(run: Run, screen: Screen, *, then: str = "") -> int:
    """End a command over slides: print its report as JSON or the next command, and return the exit code.

    The code is 0 if every slide has a result, 1 if some failed.
    """
    if screen.as_json:
        report = {"kind": run.kind, "out": str(run.path), "slides": list(run), "failed": run.failed}
        verdict = {} if run.verdict is None else {"verdict": run.verdict.as_dict()}
        print(json.dumps({**report, **verdict, "warnings": run.warnings, "said": screen.lines}, indent=2))
    elif then:
        print(f"Next: {then}")
    return 1 if run.failed else 0


def command_line(*words: object) -> str:
    """Quote words as a command line to paste.

    >>> command_line("xmil", "view", "my run")
    "xmil view 'my run'"
    """
    return shlex.join(map(str, words))


def view_command(run: object, *, slides: Path | None, mpp: float | None) -> str:
    """Write the command that shows a run with its slides.

    >>> view_command("run", slides=Path("wsi"), mpp=0.5)
    'xmil view run --slides wsi --mpp 0.5'
    """
    more = [] if slides is None else ["--slides", slides]
    more += [] if mpp is None else ["--mpp", mpp]
    return command_line("xmil", "view", run, *more)


_SHOWN = 200  # rows of a folder's table
_COLUMNS = ("file", "format", "instances", "width", "size", "stored as", "encoder", "patch edge", "mpp")


def as_text(report: dict[str, Any], words: Words) -> str:
    """Format a report in lines: kind, facts, what was inferred, what is missing, problems."""
    if "error" in report:
        return f"xmil: error: {words(' '.join(report['error'].split()))}"
    lines = [f"{report['path']}: {report['what']}"]
    if report["rows"]:
        lines += _table(list(report["rows"]), words)
    lines += [f"  {name:<16} {_value(value)}" for name, value in report["facts"].items() if value is not None]
    for title in ("inferred", "missing", "problems"):
        lines += [f"  {title.rstrip('s'):<16} {words(sentence)}" for sentence in report[title]]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]], words: Words) -> list[str]:
    names = [name for name in _COLUMNS if any(name in row for row in rows)]
    cells = [[_cell(row.get(name)) for name in names] for row in rows[:_SHOWN] if "error" not in row]
    lines = text_table([names, *cells], indent="  ").splitlines()
    lines += [f"  {_fault(row, words)}" for row in rows[:_SHOWN] if "error" in row]
    return lines + ([f"  ... and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else [])


def _fault(row: dict[str, Any], words: Words) -> str:
    """The error of a file that cannot be read, without its name."""
    fault = words(row["error"])
    return fault if row["file"] in fault else f"{row['file']}: {fault}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " x ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(
            " x ".join(map(_value, item)) if isinstance(item, list) else _value(item) for item in value
        )
    return str(value)
