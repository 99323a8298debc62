"""Files that are whole or absent, even after a power loss, and digests that show whether a file changed.

A file is written under a temporary name, synced and renamed; then its folder is synced.

`XMIL_SYNC=0` turns syncing off, for slow disks and results that can be made again: a killed process still
leaves whole files or none, but a power loss may not.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from xmil.core.errors import FileError, StrPath, WriteError, absent, unreadable, unwritable
from xmil.core.ledger import (
    UNABLE,
    note_done,
    note_failure,
    note_file,
    note_removal,
    owning_run,
    sync_handle,
    syncs,
)

# Errors of a disk that accepts no more data.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
UNSYNCED = 64 << 20  # bytes after which to sync a large file


def write_atomically(path: StrPath, write: Callable[[str], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename: the file is whole or absent.

    A file in a run's folder is recorded in the run's ledger first.
    """
    target = Path(path)
    run = owning_run(target)
    with _naming(target):
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        os.close(handle)
        try:
            write(temporary)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            if syncs():
                _sync(temporary, os.O_RDWR)
            note_file(run, target, Path(temporary))
            _replace(run, temporary, target)
            sync_folder(target.parent)
            note_done(run, target)
        finally:
            with suppress(OSError):  # it stays on a disk that became read-only, but never counts as a result
                Path(temporary).unlink(missing_ok=True)


def write_folder(path: StrPath, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder beside `path`, then rename: stores such as Zarr's, whole or absent.

    An existing folder is only replaced once the new one is complete.
    """
    target = Path(path)
    run = owning_run(target)
    with _naming(target):
        aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part"))
        try:
            write(aside / "new")
            for inner, _, names in os.walk(aside / "new"):
                for name in names if syncs() else ():
                    _sync(os.path.join(inner, name), os.O_RDWR)
                sync_folder(Path(inner))
            note_file(run, target, aside / "new")
            had_one = target.exists()
            if had_one:
                _replace(run, target, aside / "old")
            try:
                _replace(run, aside / "new", target)
            except OSError:
                if had_one:
                    os.replace(aside / "old", target)
                raise
            sync_folder(target.parent)
            note_done(run, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _replace(run: Path | None, source: str | Path, target: Path) -> None:
    try:
        os.replace(source, target)
    except OSError:
        note_failure(run, target)
        raise


def write_text(path: StrPath, text: str) -> None:
    """Write a text file, whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: StrPath, content: bytes | memoryview) -> None:
    """Write bytes, whole or not at all."""
    write_atomically(path, lambda temporary: Path(temporary).write_bytes(content))


@contextmanager
def create_hdf5(path: str) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Create an HDF5 file to fill, with a function that raises the first error of the disk.

    If HDF5 itself fails to write, the process crashes when the file is closed. So Python writes the file, and
    a full disk is an OSError when the file is closed, or when the function is called.
    """
    import h5py

    with _Target(path) as target:
        try:
            with h5py.File(target, "w") as file:
                yield file, target.check
        finally:
            target.check()  # what HDF5 raises when it reads back what a full disk refused says less


class _Target(FileIO):
    """A file that stores its first error for `check`, and ignores everything written after it."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "w+")
        self.error: OSError | None = None
        self.unsynced = 0

    def write(self, content: Any) -> int:
        """Write all of the content, in as many calls as the system needs."""
        view = memoryview(content).cast("B")
        done = 0
        with self._storing_error():
            while self.error is None and done < len(view):
                done += super().write(view[done:])
            self.unsynced += done
            if self.unsynced > UNSYNCED:  # so that closing the file does not sync all of it
                sync_handle(self.fileno())
                self.unsynced = 0
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        with self._storing_error():
            super().truncate(size)
        return size or 0

    @contextmanager
    def _storing_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error

    def check(self) -> None:
        """Raise the first error."""
        if self.error is not None:
            raise self.error


def remove_file(path: StrPath) -> None:
    """Remove a file or a store if it exists, and record that in the ledger of its run."""
    target = Path(path)
    run = owning_run(target)
    if os.path.lexists(target):
        note_removal(run, target)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        note_done(run, target)


def note_as_it_is(path: StrPath) -> None:
    """Record a file that another library writes under its final name in the run's ledger."""
    target = Path(path)
    run = owning_run(target)
    note_file(run, target, target)
    note_done(run, target)


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path is in a folder after following links."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # links in a circle
        return False


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder, if the system can."""
    if syncs() and os.name == "posix":
        try:
            _sync(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno not in UNABLE:
                raise


def _sync(path: str | Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        sync_handle(handle)
    finally:
        os.close(handle)


def _refusal(error: BaseException) -> OSError | None:
    """Find the system's error: the error itself, or one that a library has wrapped in its own."""
    pending, visited = [error], set[int]()
    while pending:
        current = pending.pop()
        if isinstance(current, OSError) and (current is error or current.errno in FULL):
            return current
        visited.add(id(current))
        inner = [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
        pending += [e for e in inner if isinstance(e, BaseException) and id(e) not in visited]
    return None


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Name the file in errors of the system within the block."""
    try:
        yield
    except Exception as error:
        if (refusal := _refusal(error)) is None:
            raise
        number = refusal.errno
        if number in (errno.ENAMETOOLONG, errno.EILSEQ):
            raise FileError(f"{target.name[:80]}: cannot be the name of a file; rename the slide.") from None
        raise WriteError(unwritable(target, refusal)) from None


WHOLE = 1 << 20  # bytes of the largest file that is read completely
ENDS = 1 << 16  # bytes of head and tail of a longer file
BLOCK, BLOCKS = 1 << 12, 64  # samples between them, spread evenly
FILES = 64  # of a folder, to read; of the others only name and size count


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, or of a folder's files by name."""
    digest = hashlib.sha256()
    try:
        for file in _files(path):
            add_file(digest, file)
    except OSError as error:
        raise FileError(unreadable(path, error)) from None
    return digest.hexdigest()


def identity(path: StrPath, *, full: bool | None = None, times: bool = False) -> str:
    """Identify the content of a file or folder by its size and a digest of head, tail and samples between.

    A file up to 1 MiB is read completely. `full` reads every byte of every file, which the result states; its
    default is the environment variable XMIL_FULL_DIGESTS. `times` adds the time of files that are not read
    completely: this detects changes between the samples, but a copy counts as another file.
    """
    place = Path(path)
    full = reads_every_byte() if full is None else full
    digest = hashlib.sha256()
    try:
        files = _files(place)
        step = max(1, len(files) / FILES)
        sampled = {int(i * step) for i in range(min(FILES, len(files)))}
        for i, file in enumerate(files):
            name, stat = "" if file == place else file.relative_to(place).as_posix(), file.stat()
            if full:
                digest.update(f"{name}|{stat.st_size}|".encode())
                add_file(digest, file)
                continue
            is_read = i in sampled and stat.st_size <= WHOLE
            time = stat.st_mtime_ns if times and not is_read else ""
            digest.update(f"{name}|{stat.st_size}|{time}|".encode())
            if i in sampled:
                for part in _parts(file, stat.st_size):
                    digest.update(part)
    except OSError as error:
        raise FileError(unreadable(place, error)) from None
    return f"{'full' if full else 'sampled'}:{digest.hexdigest()[:32]}"


def unchanged(path: StrPath, stored: object, *, full: bool | None = None, times: bool = False) -> bool:
    """Whether a file still has a stored identity; if a full one is required, a sampled one does not count."""
    if not isinstance(stored, str):
        return False
    full = reads_every_byte() if full is None else full
    return stored == identity(path, full=full or stored.startswith("full:"), times=times)


def reads_every_byte() -> bool:
    """Whether to detect changed inputs by every byte, not by head, tail and samples."""
    return os.environ.get("XMIL_FULL_DIGESTS", "") not in ("", "0")


def _files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if not files:
        raise FileError(absent(path))
    return files


def add_file(digest: hashlib._Hash, file: Path) -> None:
    """Add every byte of a file to a digest."""
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)


def _parts(file: Path, size: int) -> Iterator[bytes]:
    """Read all of a short file; head, samples and tail of a long one."""
    with file.open("rb") as stream:
        if size <= WHOLE:
            yield stream.read()
            return
        yield stream.read(ENDS)
        span = size - 2 * ENDS - BLOCK
        for i in range(BLOCKS):
            stream.seek(ENDS + span * i // (BLOCKS - 1))
            yield stream.read(BLOCK)
        stream.seek(size - ENDS)
        yield stream.read(ENDS)
