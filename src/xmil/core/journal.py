"""The journal of a run's files: path, size and digest of each, noted before the file gets its name.

A run's folder has a `manifest.jsonl`. Its first line says how many files the sorted list below it has, and
the digest of that list; lines after the list are the journal, to which whoever writes a file in the folder
appends: workers, other machines, the viewer. A line comes before the rename and one without a path after
it, so that after a kill a file is as its last line says, or as the one before. `by` tells writers apart: only
the last line of each may be of a file that did not get its name. `xmil.storage.manifest` reads the journal
and folds it into the list.
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
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from xmil.core.errors import WriteError, bad_parameter

SYNC = "XMIL_SYNC"
UNABLE = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)  # file systems that sync nothing
RUN, MANIFEST = "run.json", "manifest.jsonl"
MARK = b'{"xmil": "manifest"'  # begins a manifest; a file of the user's under its name does not
LEVELS = 8  # folders above a file in which its run is looked for
Entry = dict[str, Any]


def owning_run(path: Path) -> Path | None:
    """The run's folder that a path lies in, the innermost; refused where a link leads to it from there.

    Runs may come from anyone: a link in one would have results written, and files replaced, elsewhere.
    """
    place, linked, innermost = Path(os.path.abspath(path)), None, None
    for folder in islice((place, *place.parents), LEVELS):
        owns = folder != place and is_run(folder)
        if owns and linked is not None:
            raise WriteError(
                f"{linked}: a link inside the run {folder}; results are not written through links. Remove "
                "it, or choose another out=."
            )
        innermost = innermost or (folder if owns else None)
        if os.path.islink(folder) and folder != place:
            linked = folder
    return innermost


def note_file(run: Path | None, target: Path, written: Path) -> None:
    """Note in the run's journal that the file, store or run `written` is about to be called `target`."""
    _note(run, target, lambda: {"run": True} if is_run(written) else describe(written))


def note_removal(run: Path | None, target: Path) -> None:
    """Note in the run's journal that a file is about to be removed."""
    _note(run, target, lambda: {"removed": True})


def note_failure(run: Path | None, target: Path) -> None:
    """Note that what this writer noted last, of `target`, did not take place."""
    with suppress(OSError):  # a full disk: then the writer's last line stays in doubt
        _note(run, target, lambda: {"failed": True})


def note_done(run: Path | None, target: Path) -> None:
    """Note that what this writer noted last, of `target`, has taken place."""
    if run is not None and target.name != MANIFEST and is_manifest(run / MANIFEST):
        append(run, {}, lasting=False)


def _note(run: Path | None, target: Path, entry: Callable[[], Entry]) -> None:
    if run is not None and target.name != MANIFEST and is_manifest(run / MANIFEST):
        path, about = Path(os.path.abspath(target)).relative_to(run).as_posix(), entry()
        append(run, {"run": path} if "run" in about else {"path": path, **about})


def is_run(folder: Path) -> bool:
    """Whether a folder inside a run is a run of its own."""
    return os.path.lexists(folder / RUN) or is_manifest(folder / MANIFEST)


def describe(path: Path) -> Entry:
    """The size and SHA-256 of a file; of a store that is a folder those of its files, and their number."""
    if not path.is_dir():
        return {"size": path.stat().st_size, "sha256": _digest(path)}
    files = store_files(path)
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(f"{name}|{file.stat().st_size}|{_digest(file)}\n".encode("utf-8", "surrogateescape"))
    size = sum(file.stat().st_size for _, file in files)
    return {"size": size, "files": len(files), "sha256": digest.hexdigest()}


def store_files(folder: Path) -> list[tuple[str, Path]]:
    """The files of a store by their paths from it, hidden ones and links to folders too."""
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


def is_manifest(path: Path) -> bool:
    """Whether a file is a manifest of ours; a link, a pipe or a user's file of that name is not."""
    try:
        with opened(path, os.O_RDONLY) as handle:
            return os.read(handle, len(MARK)) == MARK
    except OSError:
        return False


def append(run: Path, line: Mapping[str, Any], *, lasting: bool = True) -> None:
    """Append a line to the run's journal, whole, whoever else appends; synced where files are."""
    text = json.dumps({**line, "by": _writer(os.getpid(), threading.get_ident())}).encode() + b"\n"
    with suppress(PermissionError):  # another user's run: what is added to it is not its own
        while not _append(run / MANIFEST, text, lasting=lasting):
            pass


def _append(path: Path, text: bytes, *, lasting: bool) -> bool:
    """Append a line; False if the manifest was replaced while we waited for it."""
    with opened(path, os.O_RDWR | os.O_APPEND) as handle:
        lock(handle)
        if not os.path.samestat(os.fstat(handle), os.stat(path)):
            return False
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":  # half a line, of a writer that died
            text = b"\n" + text
        if os.write(handle, text) < len(text):
            os.ftruncate(handle, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if lasting:
            sync_handle(handle)
        return True


@cache
def _writer(process: int, thread: int) -> str:  # noqa: ARG001 - what tells writers apart
    """A name for this thread of this process, on whatever machine."""
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
    """Wait until no other has the open file locked, and lock it until it is closed, where systems can."""
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
    """Make the content of an open file last; nothing where it is not asked for or the system cannot."""
    if syncs():
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in UNABLE:
                raise
