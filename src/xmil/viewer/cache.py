"""Results and files in memory: changed files are read again, the least recently used results are dropped."""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

from xmil.core.errors import FileError, XmilError

T = TypeVar("T")
Stamp = tuple[int, int, int]


def stamp(path: Path) -> Stamp | None:
    """A value that changes when a file does; None if there is no file."""
    try:
        facts = path.stat()
    except (OSError, ValueError):
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


class Cache(Generic[T]):
    """The last few results by key, up to a total weight; safe to share between threads."""

    def __init__(self, limit: int, weigh: Callable[[T], int] = lambda _: 1) -> None:
        self._limit, self._weigh, self.weight = limit, weigh, 0
        self._results: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable) -> T | None:
        """Get the result stored under a key."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
            return self._results.get(key)

    def put(self, key: Hashable, value: T) -> T:
        """Store a result, and drop the least used ones beyond the limit."""
        with self._lock:
            if key in self._results:
                self.weight -= self._weigh(self._results.pop(key))
            self._results[key] = value
            self.weight += self._weigh(value)
            while self.weight > self._limit and len(self._results) > 1:
                self.weight -= self._weigh(self._results.popitem(last=False)[1])
        return value

    def fetch(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Get the result stored under a key, or compute and store it."""
        result = self.get(key)
        return self.put(key, compute()) if result is None else result


class Files(Generic[T]):
    """Parsed files, each read once until it changes. Errors are stored as well.

    With `patience` a file is only checked again after that many seconds.
    """

    def __init__(self, read: Callable[[Path], T], limit: int, *, patience: float = 0.0) -> None:
        self._read, self._patience = read, patience
        self._checked: dict[Path, float] = {}
        self._stored: Cache[tuple[Stamp, T | XmilError]] = Cache(limit)

    def get(self, path: Path) -> T:
        """Get the current content of a file."""
        stored, clock = self._stored.get(path), time.monotonic()
        is_fresh = clock - self._checked.get(path, float("-inf")) < self._patience
        if stored is None or not is_fresh:
            if stored is not None and self._patience:  # only for the few files that every slide needs
                self._checked[path] = clock
            now = stamp(path)
            if now is None:
                raise FileError(f"{path.name}: no such file.")
            if stored is None or stored[0] != now:
                stored = self._stored.put(path, (now, attempt(self._read, path, "read")))
        if isinstance(stored[1], XmilError):
            raise FileError(str(stored[1]))
        return stored[1]


def attempt(work: Callable[[Path], T], path: Path, verb: str) -> T | XmilError:
    """Run work on a file; return an error without its folder, since damage must not end the server."""
    try:
        return work(path)
    except XmilError as error:
        return FileError(str(error).replace(str(path), path.name))
    except Exception as error:  # damaged files raise almost any type
        return FileError(f"{path.name}: cannot be {verb} ({type(error).__name__}).")


def to_json(content: Any) -> bytes:
    """Convert to strict JSON, with null for numbers that JSON cannot express."""
    return json.dumps(_finite(content), allow_nan=False, default=str, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
