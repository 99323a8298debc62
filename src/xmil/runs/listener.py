"""Who hears of a run while it goes on: the command line prints, Python stays quiet."""

from __future__ import annotations

import re
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


NAMED = 3  # slides that a line on several names


def grouped(notes: Mapping[str, str]) -> list[str]:
    """One line for all slides that the same is said of.

    >>> grouped({"a": "a.svs: blank", "b": "b.svs: blank", "c": "mpp given"})
    ['a, b: a.svs: blank', 'c: mpp given']
    """
    held: dict[str, list[str]] = {}
    for name, note in notes.items():
        own = rf"(?<!\w){re.escape(name)}(?!\w)"  # a name inside a word is not the name
        held.setdefault(re.sub(own, "\0", note), []).append(name)
    return [_line(names, notes[names[0]]) for names in held.values()]


def _line(names: list[str], note: str) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}: {note}"
