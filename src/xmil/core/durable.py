"""Files that are whole or absent, also after a power loss: written aside, synced, renamed, folder synced.

`XMIL_SYNC=0` leaves the syncing out, for disks where it is slow and results can be made again: a killed
process still leaves whole files or none, a power loss may not.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from pathlib import Path

from xmil.core.errors import FileError, WriteError, bad_parameter

SYNC = "XMIL_SYNC"
OPEN_FILES = (errno.EMFILE, errno.ENFILE)  # too many of them
_UNABLE = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)  # file systems that sync nothing


def write_atomically(path: str | PathLike[str], write: Callable[[str], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename: the file is whole or absent."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    except OSError as error:
        raise _not_written(target, error) from None
    os.close(handle)
    try:
        write(temporary)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        if syncs():
            _sync(temporary, os.O_RDWR)
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        raise _not_written(target, error) from None
    finally:
        with suppress(OSError):  # a disk that went read-only keeps it; it never passes for a result
            Path(temporary).unlink(missing_ok=True)


def write_folder(path: str | PathLike[str], write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder beside `path`, then rename: stores such as Zarr's, whole or absent.

    An older folder gives way only once the new one is complete.
    """
    target = Path(path)
    try:
        aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part"))
    except OSError as error:
        raise _not_written(target, error) from None
    try:
        write(aside / "new")
        for inner, _, names in os.walk(aside / "new"):
            for name in names if syncs() else ():
                _sync(os.path.join(inner, name), os.O_RDWR)
            sync_folder(Path(inner))
        if target.exists():
            os.replace(target, aside / "old")
        os.replace(aside / "new", target)
        sync_folder(target.parent)
    except OSError as error:
        raise _not_written(target, error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write a text file, whole or not at all."""

    def write(temporary: str) -> None:
        Path(temporary).write_text(text, encoding="utf-8")

    write_atomically(path, write)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last; nothing where the system cannot."""
    if syncs() and os.name == "posix":
        try:
            _sync(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno not in _UNABLE:
                raise


def syncs() -> bool:
    """Whether files are synced before they count as written."""
    choice = os.environ.get(SYNC, "1")
    if choice not in ("0", "1"):
        raise bad_parameter(SYNC, "the environment", "0 or 1", choice)
    return choice == "1"


def _sync(path: str | Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise
    finally:
        os.close(handle)


def _not_written(target: Path, error: OSError) -> FileError:
    if error.errno in (errno.ENAMETOOLONG, errno.EILSEQ):
        return FileError(f"{target.name[:80]}: cannot be the name of a file; rename the slide.")
    reason = os.strerror(error.errno) if error.errno else " ".join(str(error).split())
    way = "raise `ulimit -n`" if error.errno in OPEN_FILES else "make room, or choose another place"
    return WriteError(f"{target}: cannot be written ({reason}); {way}.")
