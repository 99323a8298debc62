"""The manifest of a run's folder: start it, fold it, read it, and compare it with the files.

`xmil.core.journal` describes its format and appends to it. A folder of an earlier version gets one when a
command continues in it; of the files that are already there, only the sizes are known.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from xmil.core.durable import write_text
from xmil.core.errors import FileError, InputError, XmilError
from xmil.core.journal import (
    MANIFEST,
    MARK,
    RUN,
    Entry,
    append,
    describe,
    is_manifest,
    is_run,
    lock,
    opened,
    owning_run,
    store_files,
)
from xmil.core.text import counted, parse_json
from xmil.storage.explanations import is_as_written, read_provenance

LAYOUT = 1
STORE = ".zarr"  # suffix of a folder that is one result
THREADS = 4  # for reading files, which waits for the disk
LONGEST = 4096  # bytes of a path
FOREIGN = "move it elsewhere if it is not of this run, or keep it if its entry was lost"


@dataclass
class Manifest:
    """The content of a run, by its manifest.

    `doubtful` has files whose writer ended before it recorded the rename, with the entry before, if there was
    one. `begun` is the command of a run that has not ended; `unread` counts damaged lines.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    doubtful: dict[str, Entry | None] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)
    begun: str | None = None
    unread: int = 0
    is_folded: bool = True

    @property
    def sized(self) -> int:
        """The number of files of which only the size is known."""
        return sum("sha256" not in entry for entry in self.entries.values())


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a folder; None if there is none; refuse a damaged list."""
    path = folder / MANIFEST
    try:
        with opened(path, os.O_RDONLY) as handle:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise FileError(f"{path}: not a file; remove it.")
            with open(handle, "rb", closefd=False) as stream:
                content = stream.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}); copy the run again.") from None
    return _parse(content, path)


def _parse(content: bytes, path: Path) -> Manifest:
    head, _, rest = content.partition(b"\n")
    try:
        header = parse_json(head)
        count, digest, layout = header["files"], header["sha256"], header["layout"]
        lines = rest.splitlines(keepends=True)
        listed = lines[:count]
        if not head.startswith(MARK) or layout != LAYOUT or _list_digest(listed) != digest:
            raise ValueError
        manifest = Manifest()
        for line in listed:
            _apply(manifest, parse_json(line))
    except (ValueError, LookupError, TypeError):
        raise FileError(
            f"{path}: damaged; copy the run again, or run its command again: files are then known by size."
        ) from None
    _replay(manifest, lines[count:])
    return manifest


def _list_digest(lines: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _apply(manifest: Manifest, line: Any) -> None:
    """Apply a line to the manifest."""
    if "run" in line:
        manifest.runs.add(_inside(line["run"]))
    elif "begin" in line:
        manifest.begun = str(line["begin"])
    elif "path" in line:
        path = _inside(line["path"])
        manifest.entries.pop(path, None)
        if not line.get("removed"):
            kinds = {"size": int, "files": int, "sha256": str}
            entry = {key: line[key] for key in kinds if key in line}
            if "size" not in entry or any(not isinstance(entry[key], kinds[key]) for key in entry):
                raise ValueError("not an entry")
            manifest.entries[path] = entry


def _inside(path: Any) -> str:
    """Check a relative path: it stays in the run's folder, and is valid for the system."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or parts[0] == "/" or "\0" in path or len(os.fsencode(path)) > LONGEST:
        raise ValueError("not a path in the folder")
    return str(path)


def _replay(manifest: Manifest, journal: list[bytes]) -> None:
    """Apply the appended lines, and find those whose file may not have got its name."""
    last: dict[str, tuple[str, Entry | None] | None] = {}  # by writer: the path and its entry before
    writer_of: dict[str, str] = {}
    for text in journal:
        try:
            line = parse_json(text)
            by, path = str(line["by"]), line.get("path")
            if line.get("failed"):
                manifest.entries.pop(path, None)
                change, last[by] = last.get(by), None
                if change is not None and change[1] is not None:
                    manifest.entries[path] = change[1]
                continue
            last[by] = None if path is None else (path, manifest.entries.get(path))
            if path is not None:
                writer_of[path] = by
            _apply(manifest, line)
        except (ValueError, LookupError, TypeError, AttributeError):
            manifest.unread += 1
    manifest.is_folded = not journal
    for by, change in last.items():
        if change is not None and writer_of[change[0]] == by:
            manifest.doubtful[change[0]] = change[1]


def start_manifest(folder: Path, kind: str) -> None:
    """Record that a run of a kind begins to write into a folder; make the manifest if it is the first.

    A run inside another is also recorded there.
    """
    path = folder / MANIFEST
    try:
        manifest = read_manifest(folder)
    except FileError:
        if not (folder / RUN).is_file() and not is_manifest(path):
            raise InputError(f"{path}: not a file of a run; move it, or choose another `out=`.") from None
        manifest = None
    if manifest is None:
        _write(folder, _adopt(folder))
    elif not manifest.is_folded:
        fold_manifest(folder)
    append(folder, {"begin": kind})
    outer = owning_run(folder)
    if outer is not None and is_manifest(outer / MANIFEST):
        name = Path(os.path.abspath(folder)).relative_to(outer).as_posix()
        outer_manifest = read_manifest(outer)
        if outer_manifest is not None and name not in outer_manifest.runs:
            append(outer, {"run": name})


def _adopt(folder: Path) -> Manifest:
    """List the content of a folder from before its manifest, by size, and the runs in it."""
    entries: dict[str, Entry] = {}
    for name in list_files(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            sizes = [file.stat().st_size for _, file in store_files(path)]
            entries[name] = {"size": sum(sizes), "files": len(sizes)}
        else:
            entries[name] = {"size": path.lstat().st_size}
    return Manifest(entries, runs=set(list_runs(folder)))


def seal_folder(folder: Path) -> None:
    """Write the manifest of a complete folder, with the digests of all files."""
    _write(folder, Manifest({name: describe(folder / name) for name in list_files(folder)}))


def fold_manifest(folder: Path, *, ended: bool = False) -> None:
    """Fold the journal into the list; `ended` marks the end of the run.

    Doubtful entries are decided by the files: a killed writer's file has its new or its old content, or is
    missing. A slide's file whose line was lost is listed again if its own header shows that it is whole.
    """
    with opened(folder / MANIFEST, os.O_RDWR) as handle:
        lock(handle)
        manifest = read_manifest(folder)
        if manifest is None:
            return
        for path, before in manifest.doubtful.items():
            entries = [entry for entry in (manifest.entries.pop(path, None), before) if entry]
            fitting = [entry for entry in entries if not _fault(folder / path, entry)]
            if entries and os.path.lexists(folder / path):
                manifest.entries[path] = (fitting or entries)[0]
        for name in list_files(folder):
            if name not in manifest.entries and is_own_file(folder, name):
                manifest.entries[name] = describe(folder / name)
        manifest.begun = None if ended else manifest.begun
        _write(folder, manifest)


def _write(folder: Path, manifest: Manifest) -> None:
    lines: list[dict[str, Any]] = [{"run": name} for name in sorted(manifest.runs)]
    lines += [{"path": path, **entry} for path, entry in sorted(manifest.entries.items())]
    lines += [{"begin": manifest.begun}] if manifest.begun else []
    texts = [json.dumps(line).encode() + b"\n" for line in lines]
    header = {"xmil": "manifest", "layout": LAYOUT, "files": len(texts), "sha256": _list_digest(texts)}
    write_text(folder / MANIFEST, b"".join([json.dumps(header).encode() + b"\n", *texts]).decode())


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
            if not name.startswith(".") and (parent, name) != (".", MANIFEST):
                yield name if parent == "." else f"{parent}/{name}"


def _is_begun(folder: Path) -> bool:
    """Whether a run in a folder has begun and not ended."""
    try:
        manifest = read_manifest(folder)
    except FileError:
        return False
    return manifest is not None and manifest.begun is not None


def list_runs(folder: Path) -> Iterator[str]:
    """List the outermost runs inside a run by relative path."""
    for place, folders, _ in os.walk(folder):
        inner = Path(place)
        names = sorted(n for n in folders if not n.startswith(".") and not (inner / n).is_symlink())
        runs = [name for name in names if is_run(inner / name)]
        yield from ((inner / name).relative_to(folder).as_posix() for name in runs)
        folders[:] = [name for name in names if name not in runs and not name.endswith(STORE)]


def compare_files(folder: Path, manifest: Manifest, *, quick: bool = False) -> Iterator[tuple[str, str]]:
    """Yield every path that is missing, changed or extra, and why; `quick` only compares sizes."""
    if manifest.unread:
        yield MANIFEST, f"{counted(manifest.unread, 'line')} of it cannot be read; run the command again"
    check = partial(_check, folder, manifest, quick=quick)
    with ThreadPoolExecutor(THREADS) as threads:
        for path, fault in zip(manifest.entries, threads.map(check, manifest.entries), strict=True):
            if fault:
                yield path, fault
    for name in sorted(manifest.runs):
        if not is_run(folder / name):
            yield name, "is missing, with the run in it; run its command again"
    for name in set(list_runs(folder)) - manifest.runs if manifest.begun is None else ():
        if not _is_begun(folder / name):  # a killed command has not recorded it in the outer run yet
            yield name, f"is a run that {MANIFEST} does not list; {FOREIGN}"
    present = set(list_files(folder))
    for name in sorted(present - {*manifest.entries, *manifest.doubtful}):
        if (folder / name).is_symlink():
            yield name, "is a link, which is not followed; copy the file in"
        elif manifest.begun is None and not is_own_file(folder, name):
            yield name, f"is not listed in {MANIFEST}; {FOREIGN}"


def is_own_file(folder: Path, name: str) -> bool:
    """Whether the header of a slide's file shows that the run in a folder wrote it, and that it is whole."""
    path = folder / name
    if Path(name).parent.as_posix() != "slides" or path.suffix != ".parquet" or path.is_symlink():
        return False
    try:
        about = parse_json((folder / RUN).read_bytes())
        header, _ = read_provenance(path)
        mark, own = about["fingerprint"], header["provenance"]["fingerprint"]
        return mark == own and header["bag"] == path.stem and "digest" in header and is_as_written(path)
    except (XmilError, OSError, ValueError, LookupError, TypeError):
        return False


def _check(folder: Path, manifest: Manifest, path: str, *, quick: bool) -> str:
    fault = _fault(folder / path, manifest.entries[path], quick=quick)
    if not fault or path not in manifest.doubtful:
        return fault
    before = manifest.doubtful[path]
    if not os.path.lexists(folder / path) or (before and not _fault(folder / path, before, quick=quick)):
        return ""  # its writer was killed before the file got its name
    return fault


def _fault(path: Path, entry: Entry, *, quick: bool = False) -> str:
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
