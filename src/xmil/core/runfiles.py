"""A run's folder: its settings, its lock, its tables. What is in it is whole, or not there."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmil._version import __version__
from xmil.core.errors import FileError, InputError
from xmil.core.provenance import provenance
from xmil.core.storage import write_text

RUN, SLIDES, FAILURES = "run.json", "slides.csv", "failures.csv"
_MADE = {  # what a run may write into each of its folders; whatever else lies there is the user's
    "slides": (".parquet",),
    "results": (".parquet",),
    "certificates": (".json", ".png"),
    "summary": (".json", ".csv", ".png"),
}


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run of one kind ("explain", "evaluate"); `settings` decide what its results are."""

    path: Path
    kind: str
    settings: Mapping[str, Any]

    @property
    def fingerprint(self) -> str:
        """A name for the settings; results under another one are not mixed in."""
        text = json.dumps({"kind": self.kind, **self.settings}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @contextmanager
    def opened(
        self, about: Mapping[str, Any], *, folders: Sequence[str], restart: bool = False
    ) -> Iterator[None]:
        """The prepared folder, kept for this run alone: a second one that would write into it is refused."""
        make_folder(self.path)
        with _locked(self.path):
            self.prepare(about, folders=folders, restart=restart)
            yield

    def prepare(self, about: Mapping[str, Any], *, folders: Sequence[str], restart: bool = False) -> None:
        """Make the folders and write run.json.

        A folder with results of other settings is refused; `restart` clears it of the earlier run first.
        """
        make_folder(self.path)
        self._check(restart=restart)
        if restart:
            self._clear()
        for name in folders:
            make_folder(self.path / name)
            _sweep(self.path / name)
        _sweep(self.path)
        known = {"kind": self.kind, "version": __version__, "fingerprint": self.fingerprint}
        write_json(self.path / RUN, {**known, **about, "settings": dict(self.settings), **provenance()})

    def write_failures(self, failed: Mapping[str, str]) -> None:
        """The slides that have no result, and why."""
        write_table(self.path / FAILURES, ("slide_id", "error"), failed.items())

    def _check(self, *, restart: bool) -> None:
        known = read_run(self.path / RUN)
        if known is None:
            return
        kind = known.get("kind", known.get("command"))
        if kind != self.kind:
            raise InputError(f"{self.path}: holds a run of `xmil {kind}`; choose another --out.")
        if known.get("fingerprint") != self.fingerprint and not restart and not self._is_empty():
            raise InputError(
                f"{self.path}: holds a run with {differences(known, self.settings)}; choose another --out, "
                "repeat the command with those settings, or redo it all with --restart."
            )

    def _is_empty(self) -> bool:
        """Whether nothing came of the earlier run: it ended before the first result."""
        own = (RUN, FAILURES, ".lock")
        files = (path for path in self.path.rglob("*") if path.is_file())
        return all(path.name in own or path.name.endswith(".part") for path in files)

    def _clear(self) -> None:
        try:
            for name, suffixes in _MADE.items():
                for file in (self.path / name).glob("*"):
                    if file.name.endswith(suffixes) and file.is_file():
                        file.unlink()
            for name in (SLIDES, FAILURES):
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise FileError(
                f"{self.path}: cannot be cleared ({error.strerror}); choose another --out."
            ) from None


def read_run(path: Path) -> dict[str, Any] | None:
    """What a run.json says; None where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise InputError(f"{path}: damaged; remove it, or choose another --out.") from None
    return found if isinstance(found, dict) else {}


def differences(known: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The settings of a run that differ from those asked for, with both values."""
    old = {**known.get("inputs", {}), **known.get("settings", {})}
    changed = [
        f"{key} {_short(old.get(key))}, not {_short(settings.get(key))}"
        for key in dict.fromkeys([*settings, *old])
        if _plain(old.get(key)) != _plain(settings.get(key))
    ]
    return "other settings (" + "; ".join(changed) + ")" if changed else "other settings"


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, or of a folder's files by name."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if not files:
        raise FileError(f"{path}: no such file.")
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file, whole or not at all."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def write_table(path: Path, header: Sequence[str], rows: Any) -> None:
    """A CSV file, whole or not at all; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_text(path, text.getvalue())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second run out of the folder; the system lets go when the process ends, however it ends."""
    try:
        import fcntl

        stream = (folder / ".lock").open("w")
    except (ImportError, OSError):
        yield  # no locks on this system, or nothing can be written: the first file says so
        return
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder}: another run is writing there; wait for it or choose another --out."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


def make_folder(folder: Path) -> None:
    """Make a folder that results go into."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror}); choose another --out.") from None


def _sweep(folder: Path) -> None:
    """Remove the unfinished files of a run that was killed."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") and entry.name.endswith(".part"):
                Path(entry.path).unlink(missing_ok=True)


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(value: Any) -> str:
    text = value[:12] if isinstance(value, str) and len(value) == 64 else _plain(value)
    return text if len(text) <= 80 else text[:77] + "..."
