"""The folder of a run while a command writes into it: claimed, locked, resumed, its tables kept up to date.

A file in the folder is whole or absent. A command only writes into a new or empty folder, or into a run of
its own kind with the same settings. Pipes are refused, links are not followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from xmil.core.durable import FULL, remove_file, sync_folder, unchanged
from xmil.core.errors import FileError, InputError, WriteError, XmilError, not_made
from xmil.core.ledger import LEDGER, MANIFEST, append, append_to, is_ledger, is_manifest, is_run, owning_run
from xmil.core.ledger import RUN as RUN
from xmil.storage.about import command_of, read_run, write_run
from xmil.storage.ledger import STORE, Ledger, Record, file_fault, fold_ledger, read_ledger, start_ledger
from xmil.storage.ledger import WHOLE_RUN as WHOLE_RUN
from xmil.storage.tables import read_rows, write_table

SLIDES, FAILURES = "slides.csv", "failures.csv"
T = TypeVar("T")


@dataclass(frozen=True)
class Item(Generic[T]):
    """One piece of a run's work: a slide, a case, a model to train.

    `what` is what the worker gets. The item is done if its record names the same `decides` and all `parts`,
    if its files are as they were written, and if the files `inputs` are those that were read, which `sources`
    identify. `by_time` also compares the times of large ones, which are not read in full; it is for features,
    and not for slides and files of runs, whose copies count as the same. `slides` are its rows in the run's
    table.
    """

    key: str
    what: T
    inputs: tuple[Path | None, ...] = ()
    decides: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    slides: tuple[str, ...] = ()
    by_time: bool = True
    sources: tuple[str | None, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The slides of the item, by default its key."""
        return self.slides or (self.key,)

    def is_done(self, record: Record) -> bool:
        """Whether a record has all parts of this item, made from the same inputs and settings."""
        is_complete = record.error is None or bool(record.parts)  # another part may have failed
        return is_complete and set(self.parts) <= set(record.parts) and self.is_same(record)

    def is_same(self, record: Record) -> bool:
        """Whether a record was made from the same inputs and settings."""
        if _plain(self.decides) != _plain(record.decides) or len(self.inputs) != len(record.sources):
            return False
        try:
            return all(
                stored is None if path is None else unchanged(path, stored, times=self.by_time)
                for path, stored in zip(self.inputs, record.sources, strict=True)
            )
        except FileError:
            return False


class RunWriter:
    """A run's folder while a command writes into it."""

    def __init__(
        self, path: Path, kind: str, settings: Mapping[str, Any], mark: str | None, ledger: Ledger
    ) -> None:
        self.path = path
        self.kind = kind
        self.settings = settings
        self.fingerprint = mark
        self.records = dict(ledger.records)
        self._files = ledger.files_by_item()

    def find_record(self, item: Item[T], adopt: Callable[[Item[T]], Record | None]) -> Record | None:
        """Find the record of an item that is done.

        If the ledger has none, such as after a kill or of a run of xmil 0.2, `adopt` makes one from the
        files.
        """
        record = self.records.get(item.key)
        if record is None:
            record = adopt(item)
            if record is None or not item.is_same(record):
                return None
            self.record(item.key, record)
        if not item.is_done(record):
            return None
        files = self._files.get(item.key, {})
        return None if any(file_fault(self.path / path, entry) for path, entry in files.items()) else record

    def record(self, key: str, record: Record) -> None:
        """Note what came of an item."""
        self.records[key] = record
        append_to(self.path / LEDGER, {"item": key, **record.as_dict()}, lasting=False)

    def write_table(self, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Write slides.csv."""
        write_table(self.path / SLIDES, columns, ([row.get(name) for name in columns] for row in rows))

    def write_failures(self, failed: Mapping[str, str]) -> None:
        """Write failures.csv."""
        write_table(self.path / FAILURES, ("slide_id", "error"), sorted(failed.items()))

    def describe(self, about: Mapping[str, Any]) -> None:
        """Write run.json: the settings, and other facts about the run."""
        mark = {} if self.fingerprint is None else {"fingerprint": self.fingerprint}
        write_run(self.path, self.kind, {**mark, **about, "settings": dict(self.settings)})


def fingerprint(kind: str, settings: Mapping[str, Any], grows: Collection[str] = ()) -> str:
    """A digest of a run's settings, without those that may grow: results with others are not mixed in."""
    decisive = {key: value for key, value in settings.items() if key not in grows}
    text = json.dumps({"kind": kind, **decisive}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def open_folder(
    folder: Path,
    kind: str,
    settings: Mapping[str, Any] | None = None,
    *,
    about: Mapping[str, Any] | None = None,
    compared: bool = True,
    grows: Collection[str] = (),
    restart: bool = False,
    only: Collection[str] | None = None,
) -> Iterator[RunWriter]:
    """Open the folder of a run for writing: claim it, write run.json, and read what is done.

    A folder with results of other `settings` is refused, except for those in `grows`, such as methods, and
    unless each result stores its own (`compared=False`). `restart` first removes the files of the earlier
    run; with `only`, just those of these items, if the settings are the same.
    """
    is_new = not folder.exists()
    settings = settings or {}
    mark = fingerprint(kind, settings, grows) if compared else None
    with claim_folder(folder, kind):
        before = read_run(folder)
        is_same = before is None or not compared or _has_settings(before, settings, mark, grows)
        if not restart and before is not None:
            _check_finished(folder)
            if not is_same and not _is_empty(folder):
                raise other_settings(folder, before["settings"], settings, leave_out=grows)
        sweep_folder(folder)
        ledger = start_ledger(folder, kind)
        items = _items_to_clear(ledger, restart, only if is_same else None)
        if items:
            ledger = _clear(folder, ledger, items)
        writer = RunWriter(folder, kind, settings, mark, ledger)
        writer.describe(about or {})
        try:
            yield writer
        except XmilError:  # without results, such as an encoder that does not load, remove the folder
            if is_new and _is_empty(folder) and not read_rows(folder / FAILURES):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        sweep_folder(folder)  # unfinished files of workers that died


def _has_settings(
    about: Mapping[str, Any], settings: Mapping[str, Any], mark: str | None, grows: Collection[str]
) -> bool:
    """Whether a run has these settings, apart from those that may grow."""
    if about.get("fingerprint") == mark:
        return True
    stored = {key: value for key, value in about["settings"].items() if key not in grows}
    return _plain(stored) == _plain({key: value for key, value in settings.items() if key not in grows})


def _check_finished(folder: Path) -> None:
    """Refuse to go on in an unfinished run of xmil 0.2, whose lists of what is done were other ones."""
    with suppress(FileError):
        ledger = read_ledger(folder)
        if ledger is not None and ledger.is_manifest and ledger.begun is not None:
            raise InputError(
                f"{folder}: holds an unfinished run of xmil 0.2; start it again with `restart=True`, or "
                "choose another `out=`."
            )


def _items_to_clear(ledger: Ledger, restart: bool, only: Collection[str] | None) -> set[str]:
    """The items that a restart removes, or that a killed one has begun to remove."""
    items = set(ledger.clearing)
    if not restart:
        return items
    if only is not None:
        return {*items, *only, WHOLE_RUN}
    owners = {entry["of"] for entry in ledger.files.values() if "of" in entry}
    return {*items, *ledger.records, *owners, WHOLE_RUN}


def _clear(folder: Path, ledger: Ledger, items: Collection[str]) -> Ledger:
    """Remove the files and records of some items of an earlier run; all other files stay.

    The ledger first says which items: after a kill on the way, the next command removes the rest.
    """
    append(folder, {"clear": sorted(items)})
    files = [path for path, entry in ledger.files.items() if entry.get("of") in items]
    try:
        for path in (*files, SLIDES, FAILURES):
            remove_file(folder / path)
    except OSError as error:
        raise FileError(f"{folder}: cannot be cleared ({error.strerror}); choose another `out=`.") from None
    return fold_ledger(folder, without=items) or ledger


def _is_empty(folder: Path) -> bool:
    """Whether an earlier run has no results, because it ended before the first one."""
    own = (RUN, SLIDES, FAILURES, LEDGER, MANIFEST, ".lock")
    files = [path for path in folder.rglob("*") if path.is_file()]
    has_rows = any(path.name == SLIDES and read_rows(path) for path in files)
    return not has_rows and all(path.name in own or path.name.endswith(".part") for path in files)


@contextmanager
def claim_folder(folder: Path, kind: str) -> Iterator[None]:
    """Make a folder and lock it against other writers; refuse a folder of another kind.

    Nothing is changed before the kind of the folder is known. If the work succeeds, the ledger says that the
    run has ended.
    """
    check_folder(folder, kind)
    make_folder(folder)
    with lock_folder(folder):
        check_folder(folder, kind)
        yield
        if is_ledger(folder / LEDGER):
            fold_ledger(folder, ended=True)


def other_settings(
    path: Path, old: Mapping[str, Any], new: Mapping[str, Any], leave_out: Collection[str] = ()
) -> InputError:
    """Make the error for a folder with a run of other settings; name those that differ, with both values."""
    changed = [
        f"{key} {_short(old.get(key))}, not {_short(new.get(key))}"
        for key in dict.fromkeys([*new, *old])
        if key not in leave_out and _plain(old.get(key)) != _plain(new.get(key))
    ]
    which = f" ({'; '.join(changed)})" if changed else ""
    return InputError(
        f"{path}: holds a run with other settings{which}; choose another `out=`, repeat the command with "
        "those settings, or redo it all with `restart=True`."
    )


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(value: Any) -> str:
    text = value[:12] if isinstance(value, str) and len(value) == 64 else _plain(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_folder(folder: Path, kind: str) -> None:
    """Refuse a folder with anything but a run of this kind, so that no file of the user is replaced.

    Hidden files, empty folders, a ledger and runs inside do not count: a run killed before its run.json
    leaves only these.
    """
    about = read_run(folder)
    if about is not None and about["kind"] != kind:
        holds = (
            f"a run of {command_of(about['kind'])}"
            if about["kind"]
            else f"a {RUN} that does not describe a run"
        )
        raise InputError(f"{folder}: holds {holds}; choose another `out=`.")
    if about is not None:
        return
    if (other := _first_file(folder)) is not None:
        raise InputError(
            f"{folder}: holds {other}, which is not of a run of {command_of(kind)}; choose a new or empty "
            "`out=`."
        )


def _first_file(folder: Path) -> Path | None:
    """Find a file, store or link in or below a folder; skip hidden names and the ledger."""
    for inner, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and not is_run(Path(inner) / name)
        )
        ends = [name for name in folders if name.endswith(STORE) or (Path(inner) / name).is_symlink()]
        for name in sorted([*names, *ends]):
            path = Path(inner) / name
            is_list = (name == LEDGER and is_ledger(path)) or (name == MANIFEST and is_manifest(path))
            if not name.startswith(".") and not is_list:
                return path.relative_to(folder)
    return None


def make_folder(folder: Path) -> None:
    """Make a folder for results; refuse a link inside a run."""
    owning_run(folder / RUN)
    try:
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for place in missing:
            sync_folder(place.parent)
    except OSError as error:
        kind = WriteError if error.errno in FULL else InputError
        raise kind(not_made(folder, error)) from None


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder against a second run; the system releases the lock when the process ends."""
    try:
        import fcntl

        handle = _lock_file(folder / ".lock")
    except (ImportError, OSError):
        yield  # no locks on this system, or the folder is read-only, which the first file reports
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder}: another run is writing there; wait for it or choose another `out=`."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def _lock_file(path: Path) -> int:
    """Open the lock file; another user's can only be read, which is enough to lock it.

    This never truncates it, follows links or waits for a pipe's other end.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InputError(f"{path}: a link, pipe or folder where runs keep a file; remove it.")
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | careful, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | careful)


def sweep_folder(folder: Path, *, below: bool = False) -> None:
    """Remove the unfinished files of a killed run from its folder and the folders in it.

    Stores that are folders are removed, too; files that cannot be removed are skipped.
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
