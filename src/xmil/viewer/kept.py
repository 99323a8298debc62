"""What is kept of files: read once, read again when the file on disk has changed, the oldest let go."""

from __future__ import annotations

import json
import math
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

from xmil.core.errors import FileError, XmilError
from xmil.core.parsing import parse_json
from xmil.data.siblings import inside

T = TypeVar("T")
Stamp = tuple[int, int, int]


def stamp(path: Path) -> Stamp | None:
    """What changes when a file does; None where there is no file."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Kept(Generic[T]):
    """The last few results by key, up to a total weight; safe to share between threads."""

    def __init__(self, limit: int, weigh: Callable[[T], int] = lambda _: 1) -> None:
        self._limit, self._weigh, self._weight = limit, weigh, 0
        self._found: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable) -> T | None:
        """The result kept under a key."""
        with self._lock:
            if key not in self._found:
                return None
            self._found.move_to_end(key)
            return self._found[key]

    def put(self, key: Hashable, value: T) -> T:
        """Keep a result; the least used ones go where it gets too much."""
        with self._lock:
            if key in self._found:
                self._weight -= self._weigh(self._found.pop(key))
            self._found[key] = value
            self._weight += self._weigh(value)
            while self._weight > self._limit and len(self._found) > 1:
                self._weight -= self._weigh(self._found.popitem(last=False)[1])
        return value

    @property
    def weight(self) -> int:
        """What the kept results weigh together."""
        return self._weight


class Files(Generic[T]):
    """Files through a reader, each read once until it changes. Errors are kept as well.

    With `patience` a file is looked at again only after so many seconds.
    """

    def __init__(self, read: Callable[[Path], T], limit: int, *, patience: float = 0.0) -> None:
        self._read, self._patience = read, patience
        self._checked: dict[Path, float] = {}
        self._kept: Kept[tuple[Stamp, T | None, XmilError | None]] = Kept(limit)

    def get(self, path: Path) -> T:
        """What the file holds now."""
        known = self._kept.get(path)
        if known is None or not self._is_fresh(path):
            now = stamp(path)
            if now is None:
                raise FileError(f"{path.name}: no such file.")
            if known is None or known[0] != now:
                known = self._kept.put(path, (now, *self._try(path)))
        if known[2] is not None:
            raise FileError(str(known[2]))
        return known[1]  # type: ignore[return-value]  # there is a value where there is no error

    def _is_fresh(self, path: Path) -> bool:
        """Whether the file was looked at a moment ago; only for the few files that every slide asks for."""
        if not self._patience:
            return False
        now = time.monotonic()
        fresh = now - self._checked.get(path, float("-inf")) < self._patience
        if not fresh:
            self._checked[path] = now
        return fresh

    def _try(self, path: Path) -> tuple[T | None, XmilError | None]:
        try:
            return self._read(path), None
        except XmilError as error:
            return None, FileError(str(error).replace(str(path), path.name))
        except Exception as error:  # a damaged file must not end the server, whatever is wrong with it
            return None, FileError(f"{path.name}: cannot be read ({type(error).__name__}).")


def under(folder: Path, path: Path, *, follow_links: bool) -> Path | None:
    """The path where it is a file inside the folder, links followed only when asked."""
    try:
        plain = stat.S_ISREG(path.lstat().st_mode) and not path.parent.is_symlink()
    except (OSError, ValueError):
        return None
    if plain and path.parent.parent == folder:
        return path
    if not path.is_file():
        return None
    if not follow_links and not inside(path, folder):
        raise FileError(f"{path.name}: a link out of its folder, not followed; --follow-links follows it.")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise FileError(f"{path.name}: damaged; it is not JSON.") from None
    if not isinstance(found, dict):
        raise FileError(f"{path.name}: damaged; it is not a JSON object.")
    return found


def to_json(content: Any) -> bytes:
    """Strict JSON: numbers that JSON has no word for become null."""
    return json.dumps(_finite(content), allow_nan=False, default=str, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
