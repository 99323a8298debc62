"""Whether a file is the one it was: digests of what it holds, never its name or its time alone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from xmil.core.errors import FileError, absent, unreadable

WHOLE = 1 << 20  # bytes up to which a file is read whole
ENDS = 1 << 16  # bytes of its head and of its tail, of a longer one
BLOCK, BLOCKS = 1 << 12, 64  # between them, spread evenly
FILES = 64  # of a folder, whose bytes are looked at; of the others name and size

StrPath = str | PathLike[str]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, or of a folder's files by name."""
    digest = hashlib.sha256()
    try:
        for file in _files(path):
            _add(digest, file)
    except OSError as error:
        raise FileError(unreadable(path, error)) from None
    return digest.hexdigest()


def identity(path: StrPath, *, full: bool | None = None, times: bool = False) -> str:
    """What a file or folder holds, in one word: its size, and a digest of head, tail and samples between.

    A file up to 1 MiB is read whole. `full` reads every byte of every file, and says so in the word; by
    default it is what the environment variable XMIL_FULL_DIGESTS says. `times`
    counts the time of a file that is not read whole: a change between the samples is then seen, and a copy
    is taken for another file.
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
                _add(digest, file)
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
    """Whether a file holds what a stored word says; a sampled word does not do where a full one must."""
    if not isinstance(stored, str):
        return False
    full = reads_every_byte() if full is None else full
    return stored == identity(path, full=full or stored.startswith("full:"), times=times)


def reads_every_byte() -> bool:
    """Whether changed inputs are told from every byte, not from head, tail and samples."""
    return os.environ.get("XMIL_FULL_DIGESTS", "") not in ("", "0")


def _files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if not files:
        raise FileError(absent(path))
    return files


def _add(digest: hashlib._Hash, file: Path) -> None:
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)


def _parts(file: Path, size: int) -> Iterator[bytes]:
    """The whole of a short file; head, samples and tail of a long one."""
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
