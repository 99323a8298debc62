"""A run on the screen: what it says as it goes on, a bar, its failures; its exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from xmil.cli._report import print_failures
from xmil.runs.listener import Listener

if TYPE_CHECKING:
    from xmil.core.run import Run


class Screen(Listener):
    """Prints what a run says."""

    def say(self, sentence: str) -> None:
        """A line."""
        print(sentence)

    def warn(self, sentence: str) -> None:
        """A line that says so."""
        print(f"warning: {sentence}")

    def failures(self, failed: Mapping[str, str]) -> None:
        """A line for each of the first slides that failed."""
        print_failures(failed)

    def counting(self, what: str, total: int) -> AbstractContextManager[Callable[[], None]]:
        """A bar on the standard error."""
        return progress_bar(what, total)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on the screen; call what it gives for each item done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda: progress.advance(bar)


def exit_code(run: Run) -> int:
    """0 where every slide has a result, 1 where some failed."""
    return 1 if run.failed else 0
