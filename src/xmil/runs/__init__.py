"""Cohort runs: the same function over many slides, in process, in worker processes or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager


class Listener:
    """Hears what a run says; this one keeps it to itself."""

    def say(self, sentence: str) -> None:
        """A line on what was found, left out or inferred."""

    def warn(self, sentence: str) -> None:
        """A sentence on what is doubtful about the results."""

    def failures(self, failed: Mapping[str, str]) -> None:
        """The slides that have no result, and why."""

    def counting(self, what: str, total: int) -> AbstractContextManager[Callable[[], None]]:
        """A count of `total` things; what it gives is called for each that is done."""
        return _uncounted(what, total)


@contextmanager
def _uncounted(what: str, total: int) -> Iterator[Callable[[], None]]:  # noqa: ARG001 - the listener's
    yield lambda: None
