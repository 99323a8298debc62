"""The ledger of a run's folder: read it, fold it, and compare it with the files.

A ledger names the run's files with size and digest, its items (a slide, a case, a model to train) with what
came of them, and the runs inside it. `xmil.core.ledger` describes how writers append to it. A folder of xmil
0.2 has a manifest instead, which only names files: the ledger is made from it when a command goes on there.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from xmil.core.durable import remove_file, write_text
from xmil.core.errors import FileError, InputError, XmilError
from xmil.core.ledger import (
    LEDGER,
    MANIFEST,
    MANIFEST_MARK,
    MARK,
    RUN,
    Entry,
    append,
    describe,
    find_list,
    is_ledger,
    is_manifest,
    is_run,
    lock,
    opened,
    owning_run,
    plain_number,
    store_files,
)
from xmil.core.text import counted, parse_json
from xmil.storage.explanations import is_as_written, read_provenance
from xmil.storage.tables import read_rows

LAYOUT = 1
STORE = ".zarr"  # suffix of a folder that is one result
WHOLE_RUN = "/"  # the item of files that sum up a run; no slide has this name
ANNOTATIONS = "annotations"  # of readers, which no restart removes
TABLES = (RUN, "slides.csv", "failures.csv")
THREADS = 4  # for reading files, which waits for the disk
LONGEST = 4096  # bytes of a path
FOREIGN = "move it elsewhere if it is not of this run, or keep it if its entry was lost"
ENTRY = {"size": int, "files": int, "sha256": str, "of": str}  # what the ledger says of a file
RECORD = {"rows": list, "facts": dict, "parts": list, "sources": list, "decides": dict, "error": str}


@dataclass(frozen=True)
class Record:
    """What came of an item: the rows of its slides in the run's table, or the error.

    Values are plain, as JSON has them; a row names its `slide_id`. `facts` are for what sums up the run.
    `sources` identify the item's input files as they were read,
    `decides` has what else decides its result, and `parts` names what was done, such as methods. `extra` is
    passed to what sums up the run in the same call, and not stored.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    decides: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    extra: Any = None

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Record:
        """Make from entries of a line; refuse values of another type, and rows that name no slide."""
        record = cls(**_checked(line, RECORD))
        names = [row.get("slide_id") if isinstance(row, dict) else None for row in record.rows]
        sources = [source for source in record.sources if source is not None]
        if not all(isinstance(text, str) for text in (*names, *record.parts, *sources)):
            raise ValueError("not a record")
        return record

    def as_dict(self) -> dict[str, Any]:
        """Convert to entries of a line, without empty ones."""
        every = {name: getattr(self, name) for name in RECORD}
        return {name: value for name, value in every.items() if value}


@dataclass
class Ledger:
    """The content of a run's ledger.

    `doubtful` has files whose writer ended before it recorded the rename, with the entry before, if there was
    one. `begun` is the command of a run that has not ended; `clearing` are items that a restart was removing.
    `unread` counts damaged lines. `is_manifest` marks the list of a run of xmil 0.2.
    """

    files: dict[str, Entry] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)
    doubtful: dict[str, Entry | None] = field(default_factory=dict)
    begun: str | None = None
    clearing: list[str] = field(default_factory=list)
    unread: int = 0
    is_folded: bool = True
    is_manifest: bool = False

    @property
    def sized(self) -> int:
        """The number of files of which only the size is known."""
        return sum("sha256" not in entry for entry in self.files.values())

    def files_by_item(self) -> dict[str, dict[str, Entry]]:
        """The files that belong to each item."""
        files: dict[str, dict[str, Entry]] = {}
        for path, entry in self.files.items():
            if "of" in entry:
                files.setdefault(entry["of"], {})[path] = entry
        return files


def read_ledger(folder: Path) -> Ledger | None:
    """Read the ledger of a folder, or the manifest of a run of xmil 0.2; None if it has neither.

    A damaged list is refused.
    """
    for name in (LEDGER, MANIFEST):
        content = _read_bytes(folder / name)
        if content is not None:
            return _parse(content, folder / name)
    return None


def read_what_is_done(folder: Path) -> Ledger:
    """Read the ledger of a folder to go on in; it is empty if it is missing or damaged: all is made again."""
    try:
        return read_ledger(folder) or Ledger()
    except FileError:
        return Ledger()


def _read_bytes(path: Path) -> bytes | None:
    try:
        with opened(path, os.O_RDONLY) as handle:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise FileError(f"{path}: not a file; remove it.")
            with open(handle, "rb", closefd=False) as stream:
                return stream.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}); copy the run again.") from None


def _parse(content: bytes, path: Path) -> Ledger:
    head, _, rest = content.partition(b"\n")
    is_old = path.name == MANIFEST
    try:
        header = parse_json(head)
        count = header["files" if is_old else "lines"]
        lines = rest.splitlines(keepends=True)
        listed = lines[:count]
        is_known = head.startswith(MANIFEST_MARK if is_old else MARK) and header["layout"] == LAYOUT
        if not is_known or _list_digest(listed) != header["sha256"]:
            raise ValueError
        ledger = Ledger(is_manifest=is_old)
        for line in listed:
            _apply(ledger, parse_json(line))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise FileError(
            f"{path}: damaged; copy the run again, or run its command again: files are then known by size."
        ) from None
    appended = lines[count:]
    if appended and not appended[-1].endswith(b"\n"):  # half a line from a writer that died
        del appended[-1]
        ledger.is_folded = False
    _replay(ledger, appended)
    return ledger


def _list_digest(lines: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _apply(ledger: Ledger, line: Any) -> None:
    """Apply a line to the ledger."""
    if "run" in line:
        ledger.runs.add(_inside(line["run"]))
    elif "begin" in line:
        ledger.begun = str(line["begin"])
    elif "clear" in line:
        ledger.clearing = [str(item) for item in line["clear"]]
    elif "item" in line:
        ledger.records[str(line["item"])] = Record.from_dict(line)
    elif "path" in line:
        path = _inside(line["path"])
        earlier = ledger.files.pop(path, {})
        if not line.get("removed"):
            entry = _checked(line, ENTRY)
            if "size" not in entry:
                raise ValueError("not an entry")
            owner = {"of": earlier["of"]} if "of" in earlier else {}
            ledger.files[path] = {**owner, **entry}


def _checked(line: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Select the known values of a line; refuse values of another type."""
    values = {name: line[name] for name in kinds if name in line}
    if any(not isinstance(value, kinds[name]) for name, value in values.items()):
        raise ValueError("not an entry")
    return values


def _inside(path: Any) -> str:
    """Check a relative path: it stays in the run's folder, and is valid for the system."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or parts[0] == "/" or "\0" in path or len(os.fsencode(path)) > LONGEST:
        raise ValueError("not a path in the folder")
    return str(path)


def _replay(ledger: Ledger, appended: list[bytes]) -> None:
    """Apply the appended lines, and find those whose file may not have got its name."""
    last: dict[str, tuple[str, Entry | None] | None] = {}  # by writer: the path and its entry before
    writer_of: dict[str, str] = {}
    for text in appended:
        try:
            line = parse_json(text)
            by, path = str(line["by"]), line.get("path")
            if line.get("failed"):
                ledger.files.pop(path, None)
                change, last[by] = last.get(by), None
                if change is not None and change[1] is not None:
                    ledger.files[path] = change[1]
                continue
            last[by] = None if path is None else (path, ledger.files.get(path))
            if path is not None:
                writer_of[path] = by
                ledger.records.pop(line.get("of"), None)  # its item is made again, until a later line
            _apply(ledger, line)
        except (ValueError, LookupError, TypeError, AttributeError):
            ledger.unread += 1
    ledger.is_folded = ledger.is_folded and not appended
    for by, change in last.items():
        if change is not None and writer_of[change[0]] == by:
            ledger.doubtful[change[0]] = change[1]


def start_ledger(folder: Path, kind: str) -> Ledger:
    """Record that a run of a kind begins to write into a folder, and return what the ledger holds.

    The ledger is made if there is none: from the manifest of xmil 0.2, or else from the files. A run inside
    another is also recorded there.
    """
    path = folder / LEDGER
    try:
        ledger = read_ledger(folder)
    except FileError:
        if not (folder / RUN).is_file() and not is_ledger(path):
            raise InputError(f"{path}: not a file of a run; move it, or choose another `out=`.") from None
        ledger = None
    if ledger is not None and not ledger.is_manifest:
        ledger = ledger if ledger.is_folded else fold_ledger(folder) or ledger
    else:
        ledger = _adopt(folder) if ledger is None else ledger
        _name_owners(folder, ledger)
        _write(folder, ledger)
    if is_manifest(folder / MANIFEST):
        for name in OBSOLETE:
            if name in ledger.files:
                remove_file(folder / name)
        (folder / MANIFEST).unlink()
    append(folder, {"begin": kind})
    outer = owning_run(folder)
    if outer is not None and find_list(outer) is not None:
        name = Path(os.path.abspath(folder)).relative_to(outer).as_posix()
        outer_ledger = read_ledger(outer)
        if outer_ledger is not None and name not in outer_ledger.runs:
            append(outer, {"run": name})
    return ledger


def _adopt(folder: Path) -> Ledger:
    """List the content of a folder without a list, by size, and the runs in it."""
    files: dict[str, Entry] = {}
    for name in list_files(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            sizes = [file.stat().st_size for _, file in store_files(path)]
            files[name] = {"size": sum(sizes), "files": len(sizes)}
        else:
            files[name] = {"size": path.lstat().st_size}
    return Ledger(files, runs=set(list_runs(folder)))


def _name_owners(folder: Path, ledger: Ledger) -> None:
    """Note the slide that each file of an earlier version belongs to, by its name, or else the whole run."""
    slides: set[str] = set()
    for table in ("slides.csv", "failures.csv"):
        with suppress(XmilError):
            slides |= read_rows(folder / table).keys()
    for path, entry in ledger.files.items():
        place, _, name = path.rpartition("/")
        if "sha256" not in entry:  # it may be the user's, unless its header says that this run wrote it
            item = owner_of_file(folder, path)
            if item is not None:
                entry["of"] = item
        elif place.partition("/")[0] != ANNOTATIONS and name not in TABLES:
            starts = [name[:i] for i, letter in enumerate(name) if letter in "._"]
            owners = [start for start in reversed(starts) if start in slides]
            entry["of"] = owners[0] if owners else WHOLE_RUN


def seal_folder(folder: Path) -> None:
    """Write the ledger of a complete folder, with the digests of all files."""
    _write(folder, Ledger({name: describe(folder / name) for name in list_files(folder)}))


def fold_ledger(folder: Path, *, ended: bool = False, without: Collection[str] = ()) -> Ledger | None:
    """Fold the appended lines into the list, without the records of cleared items; `ended` ends the run.

    Doubtful entries are decided by the files: a killed writer's file has its new or its old content, or is
    missing. A slide's file whose line was lost is listed again if its own header shows that it is whole. If
    lines cannot be read, no record is trusted: each item is looked at again.
    """
    with opened(folder / LEDGER, os.O_RDWR) as handle:
        lock(handle)
        ledger = read_ledger(folder)
        if ledger is None:
            return None
        for path, before in ledger.doubtful.items():
            entries = [entry for entry in (ledger.files.pop(path, None), before) if entry]
            fitting = [entry for entry in entries if not file_fault(folder / path, entry)]
            if entries and os.path.lexists(folder / path):
                ledger.files[path] = (fitting or entries)[0]
        for name in list_files(folder):
            if name not in ledger.files and (item := owner_of_file(folder, name)) is not None:
                ledger.files[name] = {**describe(folder / name), "of": item}
        ledger.begun = None if ended else ledger.begun
        ledger.clearing = [] if without else ledger.clearing
        dropped = list(ledger.records) if ledger.unread else without
        for item in dropped:
            ledger.records.pop(item, None)
        ledger.doubtful, ledger.unread = {}, 0
        _write(folder, ledger)
        return ledger


def _write(folder: Path, ledger: Ledger) -> None:
    lines: list[dict[str, Any]] = [{"run": name} for name in sorted(ledger.runs)]
    lines += [{"item": item, **record.as_dict()} for item, record in sorted(ledger.records.items())]
    lines += [{"path": path, **entry} for path, entry in sorted(ledger.files.items())]
    lines += [{"begin": ledger.begun}] if ledger.begun else []
    lines += [{"clear": ledger.clearing}] if ledger.clearing else []
    texts = [json.dumps(line, default=plain_number).encode() + b"\n" for line in lines]
    header = {"xmil": "ledger", "layout": LAYOUT, "lines": len(texts), "sha256": _list_digest(texts)}
    write_text(folder / LEDGER, b"".join([json.dumps(header).encode() + b"\n", *texts]).decode())


OBSOLETE = ("summary/made_of.json", "style.json")  # of xmil 0.2: the ledger has what they said
OWN = ((".", LEDGER), (".", MANIFEST))  # the lists themselves, which they do not name


def list_files(folder: Path) -> Iterator[str]:
    """List the files and stores of a run by relative path, without runs inside it.

    Hidden names and unfinished files do not count.
    """
    for place, folders, names in os.walk(folder):
        inner = Path(place)
        parent = inner.relative_to(folder).as_posix()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        ends = [name for name in folders if name.endswith(STORE) or (inner / name).is_symlink()]
        folders[:] = [name for name in folders if name not in ends and not is_run(inner / name)]
        for name in sorted([*names, *ends]):
            if not name.startswith(".") and (parent, name) not in OWN:
                yield name if parent == "." else f"{parent}/{name}"


def _is_begun(folder: Path) -> bool:
    """Whether a run in a folder has begun and not ended."""
    try:
        ledger = read_ledger(folder)
    except FileError:
        return False
    return ledger is not None and ledger.begun is not None


def list_runs(folder: Path) -> Iterator[str]:
    """List the outermost runs inside a run by relative path."""
    for place, folders, _ in os.walk(folder):
        inner = Path(place)
        names = sorted(n for n in folders if not n.startswith(".") and not (inner / n).is_symlink())
        runs = [name for name in names if is_run(inner / name)]
        yield from ((inner / name).relative_to(folder).as_posix() for name in runs)
        folders[:] = [name for name in names if name not in runs and not name.endswith(STORE)]


def compare_files(folder: Path, ledger: Ledger, *, quick: bool = False) -> Iterator[tuple[str, str]]:
    """Yield every path that is missing, changed or extra, and why; `quick` only compares sizes."""
    own = MANIFEST if ledger.is_manifest else LEDGER
    if ledger.unread:
        yield own, f"{counted(ledger.unread, 'line')} of it cannot be read; run the command again"
    check = partial(_check, folder, ledger, quick=quick)
    with ThreadPoolExecutor(THREADS) as threads:
        for path, fault in zip(ledger.files, threads.map(check, ledger.files), strict=True):
            if fault:
                yield path, fault
    for name in sorted(ledger.runs):
        if not is_run(folder / name):
            yield name, "is missing, with the run in it; run its command again"
    for name in set(list_runs(folder)) - ledger.runs if ledger.begun is None else ():
        if not _is_begun(folder / name):  # a killed command has not recorded it in the outer run yet
            yield name, f"is a run that {own} does not list; {FOREIGN}"
    present = set(list_files(folder))
    for name in sorted(present - {*ledger.files, *ledger.doubtful}):
        if (folder / name).is_symlink():
            yield name, "is a link, which is not followed; copy the file in"
        elif ledger.begun is None and owner_of_file(folder, name) is None:
            yield name, f"is not listed in {own}; {FOREIGN}"


def owner_of_file(folder: Path, name: str) -> str | None:
    """Find the item of a slide's file, if its header shows that this run wrote it, and that it is whole."""
    path = folder / name
    if Path(name).parent.as_posix() != "slides" or path.suffix != ".parquet" or path.is_symlink():
        return None
    try:
        about = parse_json((folder / RUN).read_bytes())
        header, _ = read_provenance(path)
        provenance = header["provenance"]
        is_ours = provenance["fingerprint"] == about["fingerprint"] and header["bag"] == path.stem
        if not is_ours or "digest" not in header or not is_as_written(path):
            return None
        return str(provenance["case"]["name"] if "case" in provenance else path.stem)
    except (XmilError, OSError, ValueError, LookupError, TypeError):
        return None


def _check(folder: Path, ledger: Ledger, path: str, *, quick: bool) -> str:
    fault = file_fault(folder / path, ledger.files[path], quick=quick)
    if not fault or path not in ledger.doubtful:
        return fault
    before = ledger.doubtful[path]
    if not os.path.lexists(folder / path) or (before and not file_fault(folder / path, before, quick=quick)):
        return ""  # its writer was killed before the file got its name
    return fault


def file_fault(path: Path, entry: Entry, *, quick: bool = False) -> str:
    """Compare a file or store with its entry; return what is wrong, or an empty text."""
    try:
        kind = path.lstat().st_mode
        if stat.S_ISLNK(kind):
            return "is a link, which is not followed; copy the file in"
        if not (stat.S_ISDIR(kind) if "files" in entry else stat.S_ISREG(kind)):
            return "is not a file; remove it and run the command again"
        if "files" in entry:
            files = store_files(path)
            size, count = sum(file.lstat().st_size for _, file in files), len(files)
        else:
            size, count = path.stat().st_size, None
        if count != entry.get("files"):
            return f"has changed since it was written ({count} files, not {entry['files']}); make it again"
        if size != entry["size"]:
            return f"has changed since it was written ({size:,} bytes, not {entry['size']:,}); make it again"
        if not quick and entry.get("sha256", "") not in ("", describe(path)["sha256"]):
            return "has changed since it was written; make it again"
    except FileNotFoundError:
        return "is missing; run the command again"
    except OSError as error:
        return f"cannot be read ({error.strerror}); run the command again"
    return ""
