"""The ledger of a run's folder: what every writer of a file appends to it.

A run's folder has a `ledger.jsonl`. Its first line has the number of lines in the sorted list below it, and
the digest of that list; the lines after the list were appended. Every writer of files in the folder appends
to it: workers, other machines, the viewer. One line with path, size and digest precedes the rename, and one
without a path follows it, so that after a kill a file matches its last line, or the one before. `by`
distinguishes writers: only the last line of each may name a file that did not get its name. `of` is the item,
such as a slide, that the file belongs to. `xmil.storage.ledger` reads the lines and folds them into the list.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from xmil.core.errors import WriteError, bad_parameter, unwritable

SYNC = "XMIL_SYNC"
UNABLE = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)  # errors of file systems without sync
RUN, LEDGER = "run.json", "ledger.jsonl"
MARK = b'{"xmil": "ledger"'  # start of a ledger; a user's file of the same name lacks it
MANIFEST = "manifest.jsonl"  # of xmil 0.2: a list of the files, without the items
MANIFEST_MARK = b'{"xmil": "manifest"'
LEVELS = 8  # folders above a file to search for its run
Entry = dict[str, Any]

_item: ContextVar[str | None] = ContextVar("item", default=None)


@contextmanager
def writing_for(item: str) -> Iterator[None]:
    """Record the files written within the block as those of an item."""
    token = _item.set(item)
    try:
        yield
    finally:
        _item.reset(token)


def owning_run(path: Path) -> Path | None:
    """Find the innermost run that a path is in; refuse paths that pass through a link inside the run.

    Runs may come from anyone: through a link, results would be written, and files replaced, elsewhere.
    """
    place, link, innermost = Path(os.path.abspath(path)), None, None
    for folder in islice((place, *place.parents), LEVELS):
        owns = folder != place and is_run(folder)
        if owns and link is not None:
            raise WriteError(
                f"{link}: a link inside the run {folder}; results are not written through links. Remove "
                "it, or choose another `out=`."
            )
        innermost = innermost or (folder if owns else None)
        if os.path.islink(folder) and folder != place:
            link = folder
    return innermost


def note_file(run: Path | None, target: Path, written: Path) -> None:
    """Record in the run's ledger that the file, store or run `written` will be renamed to `target`."""
    _note(run, target, lambda: {"run": True} if is_run(written) else describe(written))


def note_removal(run: Path | None, target: Path) -> None:
    """Record in the run's ledger that a file is about to be removed."""
    _note(run, target, lambda: {"removed": True})


def note_failure(run: Path | None, target: Path) -> None:
    """Record that this writer's last change, of `target`, failed."""
    with suppress(OSError, WriteError):  # on a full disk the writer's last line stays uncertain
        _note(run, target, lambda: {"failed": True})


def note_done(run: Path | None, target: Path) -> None:
    """Record that this writer's last change, of `target`, is complete."""
    path = _list_of(run, target)
    if path is not None:
        append_to(path, {}, lasting=False)


def _note(run: Path | None, target: Path, entry: Callable[[], Entry]) -> None:
    path = _list_of(run, target)
    if run is None or path is None:
        return
    name = Path(os.path.abspath(target)).relative_to(run).as_posix()
    facts = entry()
    if "run" in facts:
        append_to(path, {"run": name})
        return
    item = _item.get()
    owner = {} if item is None else {"of": item}
    append_to(path, {"path": name, **facts, **owner})


def _list_of(run: Path | None, target: Path) -> Path | None:
    """Find the list that a file of a run is recorded in; the ledger itself is in none."""
    return None if run is None or target.name == LEDGER else find_list(run)


def is_run(folder: Path) -> bool:
    """Whether a folder inside a run is a run of its own."""
    return os.path.lexists(folder / RUN) or is_ledger(folder / LEDGER)


def describe(path: Path) -> Entry:
    """Describe a file by size and SHA-256; a store in a folder by those of its files, and their number."""
    if not path.is_dir():
        return {"size": path.stat().st_size, "sha256": _digest(path)}
    files = store_files(path)
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(f"{name}|{file.stat().st_size}|{_digest(file)}\n".encode("utf-8", "surrogateescape"))
    size = sum(file.stat().st_size for _, file in files)
    return {"size": size, "files": len(files), "sha256": digest.hexdigest()}


def store_files(folder: Path) -> list[tuple[str, Path]]:
    """List the files of a store by relative path, including hidden ones and links to folders."""
    walk = ((Path(place), folders, names) for place, folders, names in os.walk(folder))
    inner = (
        place / name
        for place, folders, names in walk
        for name in (*names, *(n for n in folders if (place / n).is_symlink()))
    )
    return sorted((path.relative_to(folder).as_posix(), path) for path in inner)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_ledger(path: Path) -> bool:
    """Whether a file is a ledger; a link, a pipe or a user's file of that name is not."""
    return _starts_with(path, MARK)


def is_manifest(path: Path) -> bool:
    """Whether a file is the manifest of a run of xmil 0.2."""
    return _starts_with(path, MANIFEST_MARK)


def find_list(run: Path) -> Path | None:
    """Find the file that lists a run's files: its ledger, or the manifest of a run of xmil 0.2."""
    if is_ledger(run / LEDGER):
        return run / LEDGER
    return run / MANIFEST if is_manifest(run / MANIFEST) else None


def _starts_with(path: Path, mark: bytes) -> bool:
    try:
        with opened(path, os.O_RDONLY) as handle:
            return os.read(handle, len(mark)) == mark
    except OSError:
        return False


def plain_number(value: Any) -> Any:
    """Convert a NumPy number or array for JSON, and anything else to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def append(run: Path, line: Mapping[str, Any]) -> None:
    """Append a line to the list of a run's files, if it has one."""
    path = find_list(run)
    if path is not None:
        append_to(path, line)


def append_to(path: Path, line: Mapping[str, Any], *, lasting: bool = True) -> None:
    """Append a whole line to a ledger, safe with other writers; sync it if files are synced."""
    by = _writer(os.getpid(), threading.get_ident())
    text = json.dumps({**line, "by": by}, default=plain_number).encode() + b"\n"
    try:
        while not _append(path, text, lasting=lasting):
            pass
    except PermissionError:
        return  # another user's run, which need not record this file
    except FileNotFoundError:
        if path.name == MANIFEST:  # it has just become a ledger
            append_to(path.with_name(LEDGER), line, lasting=lasting)
    except OSError as error:
        raise WriteError(unwritable(path, error)) from None


def _append(path: Path, text: bytes, *, lasting: bool) -> bool:
    """Append a line; return False if the ledger was replaced while waiting for the lock."""
    with opened(path, os.O_RDWR | os.O_APPEND) as handle:
        lock(handle)
        if not os.path.samestat(os.fstat(handle), os.stat(path)):
            return False
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":  # half a line from a writer that died
            size = os.pread(handle, size, 0).rfind(b"\n") + 1
            os.ftruncate(handle, size)
        if os.write(handle, text) < len(text):
            os.ftruncate(handle, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if lasting:
            sync_handle(handle)
        return True


@cache
def _writer(process: int, thread: int) -> str:  # noqa: ARG001 - keys of the cache
    """Make a name for this thread of this process, unique across machines."""
    return secrets.token_hex(4)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file without following a link or waiting for a pipe's other end."""
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags | careful)
    try:
        yield handle
    finally:
        os.close(handle)


def lock(handle: int) -> None:
    """Wait for the lock on an open file, and hold it until the file is closed, if the system can."""
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX)


def syncs() -> bool:
    """Whether files are synced before they count as written."""
    choice = os.environ.get(SYNC, "1")
    if choice not in ("0", "1"):
        raise bad_parameter(SYNC, "the environment", "0 or 1", choice)
    return choice == "1"


def sync_handle(handle: int) -> None:
    """Sync an open file, if syncing is on and the system can."""
    if syncs():
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in UNABLE:
                raise
