"""A run's folder: run.json, slides.csv, failures.csv and the lock; read and written here alone.

What is in the folder is whole, or not there. Layout 1 had no number, named its kind `command` in some runs
and kept settings under `inputs`; it is read as if it were of today.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmil._version import __version__
from xmil.core.absence import not_made
from xmil.core.budget import check_regular
from xmil.core.durable import sync_folder
from xmil.core.errors import FileError, InputError, XmilError
from xmil.core.parsing import parse_json
from xmil.core.provenance import provenance
from xmil.core.storage import read_provenance, write_text

RUN, SLIDES, FAILURES = "run.json", "slides.csv", "failures.csv"
LAYOUT = 2  # of run.json; later ones are refused, earlier ones keep being read
INTERACTIONS = "interactions"  # the folder of `xmil explain --interactions`
MADE_OF = "made_of.json"  # of a summary: the files it was made from, written last
SUMMARY = ("scales.csv", "scales.json", "top.csv", "bottom.csv", "slides.csv", "outliers.csv", MADE_OF)
Row = dict[str, str]


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
        self,
        about: Mapping[str, Any],
        *,
        folders: Sequence[str] = (),
        restart: bool = False,
        outputs: Iterable[Path] | None = None,
    ) -> Iterator[None]:
        """The prepared folder, kept for this run alone: a second one that would write into it is refused.

        Nothing is touched before the folder is ours. A folder with results of other settings is refused;
        `restart` first removes what the earlier run wrote, or the `outputs` alone where they are given.
        """
        make_folder(self.path)
        with locked(self.path):
            self._check(restart=restart)
            if restart:
                self._clear(outputs)
            for name in folders:
                make_folder(self.path / name)
            _sweep(self.path)
            self.write(about)
            yield
            _sweep(self.path)  # of workers that died while the run went on

    def write(self, about: Mapping[str, Any]) -> None:
        """run.json: the settings, and what else is known of the run."""
        known = {"fingerprint": self.fingerprint, **about, "settings": dict(self.settings)}
        write_run(self.path, self.kind, known)

    def write_failures(self, failed: Mapping[str, str]) -> None:
        """The slides that have no result, and why."""
        write_table(self.path / FAILURES, ("slide_id", "error"), failed.items())

    def write_slides(self, header: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """The table of slides."""
        write_table(self.path / SLIDES, header, ([row.get(name) for name in header] for row in rows))

    def _check(self, *, restart: bool) -> None:
        known = read_run(self.path)
        if known is None:
            return
        if known["kind"] != self.kind:
            raise InputError(f"{self.path}: holds a run of `xmil {known['kind']}`; choose another --out.")
        if known.get("fingerprint") != self.fingerprint and not restart and not self._is_empty():
            raise InputError(
                f"{self.path}: holds a run with {differences(known, self.settings)}; choose another --out, "
                "repeat the command with those settings, or redo it all with --restart."
            )

    def _is_empty(self) -> bool:
        """Whether nothing came of the earlier run: it ended before the first result."""
        own = (RUN, SLIDES, FAILURES, ".lock")
        files = [path for path in self.path.rglob("*") if path.is_file()]
        named = any(path.name == SLIDES and read_rows(path) for path in files)
        return not named and all(path.name in own or path.name.endswith(".part") for path in files)

    def _clear(self, outputs: Iterable[Path] | None) -> None:
        try:
            files = list(self._written()) if outputs is None else list(outputs)
            for path in (*files, self.path / SLIDES, self.path / FAILURES):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise FileError(
                f"{self.path}: cannot be cleared ({error.strerror}); choose another --out."
            ) from None

    def _written(self) -> Iterator[Path]:
        """The files that the earlier run wrote, by its mark or its table; all others are the user's."""
        known = read_run(self.path) or {}
        rows, mark = read_rows(self.path / SLIDES), known.get("fingerprint")
        pairs = pairs_by_slide(self.path / INTERACTIONS)
        for folder in ("slides", "results"):
            for path in (self.path / folder).glob("*.parquet"):
                if path.stem in rows or _bears(path, mark):
                    yield path
                    yield from pairs.get(path.stem, ())
                    for suffix in (".json", ".png"):
                        yield self.path / "certificates" / f"{path.stem}{suffix}"
        if known:
            yield from (self.path / "summary" / name for name in SUMMARY)


def write_run(folder: Path, kind: str, about: Mapping[str, Any]) -> None:
    """run.json of a run of a kind, with the layout, versions and the machine."""
    known = {"kind": kind, "layout": LAYOUT, "version": __version__}
    write_json(folder / RUN, {**known, **about, **provenance()})


def read_run(folder: Path) -> dict[str, Any] | None:
    """What a folder's run.json says, of whatever layout; None where there is none.

    `kind`, `layout` and `settings` are always there.
    """
    path = folder / RUN
    check_own(path)
    try:
        stored = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        if not folder.is_dir():  # a file, or a link in a circle, where results should go
            raise InputError(not_made(folder, error)) from None
        raise InputError(f"{path}: cannot be read ({error.strerror}); use another folder.") from None
    except ValueError:
        raise InputError(
            f"{path}: damaged; put back a copy of it, or make the run again in another folder."
        ) from None
    return _of_today(stored if isinstance(stored, dict) else {}, path)


def _of_today(stored: dict[str, Any], path: Path) -> dict[str, Any]:
    layout = stored.get("layout", 1)
    if not isinstance(layout, int) or layout > LAYOUT:
        raise InputError(f"{path}: of layout {layout}, which this version does not know; update xmil.")
    inputs, settings = stored.get("inputs"), stored.get("settings", stored.get("config"))
    merged = {
        **(inputs if isinstance(inputs, dict) else {}),
        **(settings if isinstance(settings, dict) else {}),
    }
    kind, said = stored.get("kind", stored.get("command")), stored.get("warnings")
    warnings = [str(text) for text in said] if isinstance(said, list) else []
    known = {"kind": kind if isinstance(kind, str) else None, "layout": layout, "settings": merged}
    return {**stored, **known, **({"warnings": warnings} if "warnings" in stored else {})}


def check_own(path: Path) -> None:
    """Refuse what is no file of the run: a pipe, or a link that leads out of the folder."""
    check_regular(path)
    if path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve()):
        raise FileError(f"{path}: a link out of the run's folder, which is not followed; copy the file in.")


def read_rows(path: Path, key: str = "slide_id") -> dict[str, Row]:
    """The rows of a table by slide; none where there is no table."""
    check_own(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = [
                {k: v or "" for k, v in row.items() if isinstance(k, str)} for row in csv.DictReader(stream)
            ]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, csv.Error) as error:
        if isinstance(error, OSError) and not path.parent.is_dir():
            raise InputError(not_made(path.parent, error)) from None
        raise FileError(f"{path.name}: not a readable table ({error}).") from None
    return {row[key]: row for row in rows if row.get(key)}


def read_failures(folder: Path) -> dict[str, str]:
    """The slides of a run that have no result, and why."""
    return {name: row.get("error", "") for name, row in read_rows(folder / FAILURES).items()}


def pairs_by_slide(folder: Path) -> dict[str, list[Path]]:
    """The files of interactions in a folder by slide, one for each target; links are passed over."""
    stem, found = re.compile(r"(.+)\.\d+(-vs-\d+)?\.parquet"), dict[str, list[Path]]()
    for path in sorted(folder.glob("*.parquet")):
        if (named := stem.fullmatch(path.name)) and not path.is_symlink():
            found.setdefault(named[1], []).append(path)
    return found


def differences(known: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The settings of a run that differ from those asked for, with both values."""
    old = known["settings"]
    changed = [
        f"{key} {_short(old.get(key))}, not {_short(settings.get(key))}"
        for key in dict.fromkeys([*settings, *old])
        if _plain(old.get(key)) != _plain(settings.get(key))
    ]
    return "other settings (" + "; ".join(changed) + ")" if changed else "other settings"


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
def locked(folder: Path) -> Iterator[None]:
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
                f"{folder}: another run is writing there; wait for it or choose another --out."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def _lock_file(path: Path) -> int:
    """The file that is locked; another user's can be read at least, which is enough to lock it.

    It is opened without emptying it, following links or waiting for a pipe's other end.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InputError(f"{path}: a link, pipe or folder where runs keep a file; remove it.")
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | careful, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | careful)


def make_folder(folder: Path) -> None:
    """Make a folder that results go into."""
    try:
        made = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for place in made:
            sync_folder(place.parent)
    except OSError as error:
        raise InputError(not_made(folder, error)) from None


def _sweep(folder: Path, *, below: bool = False) -> None:
    """Remove the unfinished files of a run that was killed, from its folder and those in it."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            folder_here = entry.is_dir(follow_symlinks=False)
            if entry.name.startswith(".") and entry.name.endswith(".part"):
                _remove(Path(entry.path), folder=folder_here)
            elif folder_here and not below:
                _sweep(Path(entry.path), below=True)


def _remove(path: Path, *, folder: bool) -> None:
    """Remove an unfinished file, or a store that is a folder; one that stays does not keep the others."""
    if folder:
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink(missing_ok=True)


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


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(value: Any) -> str:
    text = value[:12] if isinstance(value, str) and len(value) == 64 else _plain(value)
    return text if len(text) <= 80 else text[:77] + "..."
