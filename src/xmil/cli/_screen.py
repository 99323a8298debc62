"""A run on the screen: what it says as it goes on, a bar, its failures; its exit code."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from xmil.cli._report import as_options, print_failures
from xmil.runs.listener import Listener

if TYPE_CHECKING:
    from xmil.core.run import Run


SAMPLING = ("xmil.methods.shapley", "xmil.methods.interactions")


class Screen(Listener):
    """Prints what a run says; with `as_json` it keeps it for the report at the end."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.said: list[str] = []

    def say(self, sentence: str) -> None:
        """A line."""
        self.said.append(sentence)
        if not self.as_json:
            print(sentence)

    def warn(self, sentence: str) -> None:
        """A line that says so."""
        if not self.as_json:
            print(f"warning: {as_options(sentence)}")

    def failures(self, failed: Mapping[str, str]) -> None:
        """A line for each of the first slides that failed."""
        if not self.as_json:
            print_failures(failed)

    def counting(self, what: str, total: int) -> AbstractContextManager[Callable[[], None]]:
        """A bar on the standard error."""
        return progress_bar(what, total)


@contextmanager
def costs_said() -> Iterator[None]:
    """Within the block, methods that sample say what the first slide costs, once each."""
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


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on the screen; call what it gives for each item done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda: progress.advance(bar)


def finished(run: Run, screen: Screen, *, then: str = "") -> int:
    """The end of a command over slides: its report as JSON, or the command that comes next; its exit code.

    The code is 0 where every slide has a result, 1 where some failed.
    """
    if screen.as_json:
        report = {"kind": run.kind, "out": str(run.path), "slides": list(run), "failed": run.failed}
        print(json.dumps({**report, "warnings": run.warnings, "said": screen.said}, indent=2))
    elif then:
        print(f"Next: {then}")
    return 1 if run.failed else 0


def command(*words: object) -> str:
    """A command line that can be pasted.

    >>> command("xmil", "view", "my run")
    "xmil view 'my run'"
    """
    return shlex.join(map(str, words))
