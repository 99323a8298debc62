"""The writer of run folders: who may write into a folder, run.json, tables, the lock.

A file in the folder is whole, or not there. A command writes only into a new or empty folder, or into a run
of its own kind.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from xmil._version import __version__
from xmil.core.durable import sync_folder, write_text
from xmil.core.errors import FileError, InputError, XmilError, not_made
from xmil.core.text import csv_text
from xmil.storage.explanations import read_provenance
from xmil.storage.run import FAILURES, LAYOUT, RUN, SLIDES, list_interactions, read_rows, read_run

MADE_OF = "made_of.json"  # of a summary: the files it was made from, written last
SUMMARY = ("scales.csv", "scales.json", "top.csv", "bottom.csv", "slides.csv", "outliers.csv", MADE_OF)


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run of one kind ("explain", "bench"), to be written.

    `settings` decide what its results are: a folder of other settings is refused, unless `mixed` says that
    each result carries its own. Those that `grows` names may be added to, as methods are. `marks` are files
    by which runs from before run.json are known.
    """

    path: Path
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    mixed: bool = False
    grows: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """A name for the settings; results under another one are not mixed in."""
        decisive = {key: value for key, value in self.settings.items() if key not in self.grows}
        text = json.dumps({"kind": self.kind, **decisive}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Make the folder and keep every other writer out of it; refuse one that is not of this kind.

        Nothing is touched before it is known whose the folder is.
        """
        check_folder(self.path, self.kind, marks=self.marks)
        make_folder(self.path)
        with lock_folder(self.path):
            check_folder(self.path, self.kind, marks=self.marks)
            yield

    @contextmanager
    def open(
        self,
        about: Mapping[str, Any],
        *,
        folders: Sequence[str] = (),
        restart: bool = False,
        outputs: Iterable[Path] | None = None,
    ) -> Iterator[None]:
        """Claim the folder, write run.json and make the `folders` in it.

        A folder with results of other settings is refused; `restart` first removes what the earlier run
        wrote, or the `outputs` alone if they are given. Unfinished files of killed runs are swept.
        """
        with self.claim():
            self._check_settings(restart=restart)
            if restart:
                self._clear(outputs)
            for name in folders:
                make_folder(self.path / name)
            sweep_folder(self.path)
            self.write(about)
            yield
            sweep_folder(self.path)  # of workers that died while the run went on

    def write(self, about: Mapping[str, Any]) -> None:
        """Write run.json: the settings, and what else is known of the run."""
        mark = {} if self.mixed else {"fingerprint": self.fingerprint}
        write_run(self.path, self.kind, {**mark, **about, "settings": dict(self.settings)})

    def write_failures(self, failed: Mapping[str, str]) -> None:
        """Write the slides that have no result, and why."""
        write_table(self.path / FAILURES, ("slide_id", "error"), failed.items())

    def write_slides(self, header: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the table of slides."""
        write_table(self.path / SLIDES, header, ([row.get(name) for name in header] for row in rows))

    def _check_settings(self, *, restart: bool) -> None:
        about = read_run(self.path)
        if about is None or self.mixed or restart or about.get("fingerprint") == self.fingerprint:
            return
        if not self._is_empty():
            raise other_settings(self.path, about["settings"], self.settings, leave_out=self.grows)

    def _is_empty(self) -> bool:
        """Whether nothing came of the earlier run: it ended before the first result."""
        own = (RUN, SLIDES, FAILURES, ".lock")
        files = [path for path in self.path.rglob("*") if path.is_file()]
        has_rows = any(path.name == SLIDES and read_rows(path) for path in files)
        return not has_rows and all(path.name in own or path.name.endswith(".part") for path in files)

    def _clear(self, outputs: Iterable[Path] | None) -> None:
        try:
            files = list(self._list_written()) if outputs is None else list(outputs)
            for path in (*files, self.path / SLIDES, self.path / FAILURES):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise FileError(
                f"{self.path}: cannot be cleared ({error.strerror}); choose another out=."
            ) from None

    def _list_written(self) -> Iterator[Path]:
        """The files that the earlier run wrote, by its mark or its table; all others are the user's."""
        about = read_run(self.path) or {}
        rows, mark = read_rows(self.path / SLIDES), about.get("fingerprint")
        pairs = list_interactions(self.path)
        for folder in ("slides", "results"):
            for path in (self.path / folder).glob("*.parquet"):
                if path.stem in rows or _bears(path, mark):
                    yield path
                    yield from pairs.get(path.stem, ())
                    for suffix in (".json", ".png"):
                        yield self.path / "certificates" / f"{path.stem}{suffix}"
        if about:
            yield from (self.path / "summary" / name for name in SUMMARY)


def _bears(path: Path, mark: Any) -> bool:
    """Whether a Parquet file was written by the run of this mark."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not mark:
        return False
    with suppress(XmilError):
        return bool(read_provenance(path)[0].get("provenance", {}).get("fingerprint") == mark)
    with suppress(OSError, pa.ArrowException):
        return str(mark).encode() in (pq.read_schema(path).metadata or {}).values()
    return False


def other_settings(
    path: Path, old: Mapping[str, Any], new: Mapping[str, Any], leave_out: Sequence[str] = ()
) -> InputError:
    """The error for a folder with a run of other settings; it names those that differ, with both values."""
    changed = [
        f"{key} {_short(old.get(key))}, not {_short(new.get(key))}"
        for key in dict.fromkeys([*new, *old])
        if key not in leave_out and _plain(old.get(key)) != _plain(new.get(key))
    ]
    which = f" ({'; '.join(changed)})" if changed else ""
    return InputError(
        f"{path}: holds a run with other settings{which}; choose another out=, repeat the command with those "
        "settings, or redo it all with restart=True."
    )


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(value: Any) -> str:
    text = value[:12] if isinstance(value, str) and len(value) == 64 else _plain(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_folder(folder: Path, kind: str, *, marks: Sequence[str] = ()) -> None:
    """Refuse a folder that holds anything but a run of this kind, so that no file of the user's is replaced.

    Hidden files and empty folders do not count: a run that was killed before its run.json leaves no more.
    """
    about = read_run(folder)
    if about is not None and about["kind"] != kind:
        holds = f"a run of `xmil {about['kind']}`" if about["kind"] else f"a {RUN} that is not of a run"
        raise InputError(f"{folder}: holds {holds}; choose another out=.")
    if about is not None or any((folder / mark).is_file() for mark in marks):
        return
    if (other := _first_file(folder)) is not None:
        raise InputError(
            f"{folder}: holds {other}, which is not of a run of `xmil {kind}`; choose a new or empty out=."
        )


def _first_file(folder: Path) -> Path | None:
    """A file or link in a folder or below it, by its path from there; hidden ones are passed over."""
    for inner, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if (Path(inner) / name).is_symlink()]
        for name in sorted([*names, *links]):
            if not name.startswith("."):
                return (Path(inner) / name).relative_to(folder)
    return None


def make_folder(folder: Path) -> None:
    """Make a folder that results go into."""
    try:
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for place in missing:
            sync_folder(place.parent)
    except OSError as error:
        raise InputError(not_made(folder, error)) from None


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep a second run out of the folder; the system lets go when the process ends, however it ends."""
    try:
        import fcntl

        handle = _lock_file(folder / ".lock")
    except (ImportError, OSError):
        yield  # no locks on this system, or nothing can be written: the first file says so
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder}: another run is writing there; wait for it or choose another out=."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def _lock_file(path: Path) -> int:
    """Open the file that is locked; another user's can be read at least, which is enough to lock it.

    It is opened without emptying it, following links or waiting for a pipe's other end.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InputError(f"{path}: a link, pipe or folder where runs keep a file; remove it.")
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | careful, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | careful)


def sweep_folder(folder: Path, *, below: bool = False) -> None:
    """Remove the unfinished files of a run that was killed, from its folder and those in it.

    A store that is a folder goes as a whole; what cannot be removed does not keep the others.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name.startswith(".") and entry.name.endswith(".part"):
                if is_folder:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    continue
                with suppress(OSError):
                    os.unlink(entry.path)
            elif is_folder and not below:
                sweep_folder(Path(entry.path), below=True)


def write_run(folder: Path, kind: str, about: Mapping[str, Any]) -> None:
    """Write run.json of a run of a kind, with the layout, versions and the machine."""
    first = {"kind": kind, "layout": LAYOUT, "version": __version__}
    write_json(folder / RUN, {**first, **about, **provenance()})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def write_table(path: Path, header: Sequence[str], rows: Any) -> None:
    """Write a CSV file, whole or not at all; None is an empty cell."""
    write_text(path, csv_text(header, rows))


def provenance() -> dict[str, Any]:
    """Versions, Python, system, and the commit of the code's checkout, where there is one.

    >>> sorted(provenance())
    ['commit', 'python', 'system', 'versions']
    """
    others = {name: number for name in ("torch", "numpy") if (number := _installed(name))}
    return {
        "versions": {"xmil": __version__, **others},
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": git_commit(),
    }


def git_commit() -> str | None:
    """The commit of the code's checkout, where there is one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)  # noqa: S603  # fixed words
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
