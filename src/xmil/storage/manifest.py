"""The manifest of a run's folder: started, folded, read, and compared with the files that are there.

`xmil.core.journal` says what it looks like and appends to it. A folder of an earlier version gets one when a
command goes on in it: the files that are there are then known by their sizes alone.
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
from xmil.core.errors import FileError, InputError
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

LAYOUT = 1
STORE = ".zarr"  # ends the name of a folder that is one result
THREADS = 4  # that read files: they wait for the disk
LONGEST = 4096  # bytes of a path


@dataclass
class Manifest:
    """What a run consists of, by its manifest.

    `doubtful` are files whose writer ended before it said that the name was given, with the entry before, if
    there was one. `begun` is the command whose run did not end, `unread` counts lines that are damaged.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    doubtful: dict[str, Entry | None] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)
    begun: str | None = None
    unread: int = 0
    is_folded: bool = True

    @property
    def sized(self) -> int:
        """How many files are known by their sizes alone."""
        return sum("sha256" not in entry for entry in self.entries.values())


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a folder; None where there is none, an error where its list is damaged."""
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
            _take(manifest, parse_json(line))
    except (ValueError, LookupError, TypeError):
        raise FileError(
            f"{path}: damaged; copy the run again, or run its command again: files are then known by size."
        ) from None
    _replay(manifest, lines[count:])
    return manifest


def _list_digest(lines: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _take(manifest: Manifest, line: Any) -> None:
    """Put a line into what the manifest says."""
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
    """A path from the run's folder that stays in it, and that the system can have."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or parts[0] == "/" or "\0" in path or len(os.fsencode(path)) > LONGEST:
        raise ValueError("not a path in the folder")
    return str(path)


def _replay(manifest: Manifest, journal: list[bytes]) -> None:
    """Take in the lines that were appended, and find those whose file may not have got its name."""
    last: dict[str, tuple[str, Entry | None] | None] = {}  # by writer: the path and what it was before
    writer_of: dict[str, str] = {}
    for text in journal:
        try:
            line = parse_json(text)
            by, path = str(line["by"]), line.get("path")
            if line.get("failed"):
                manifest.entries.pop(path, None)
                noted, last[by] = last.get(by), None
                if noted is not None and noted[1] is not None:
                    manifest.entries[path] = noted[1]
                continue
            last[by] = None if path is None else (path, manifest.entries.get(path))
            if path is not None:
                writer_of[path] = by
            _take(manifest, line)
        except (ValueError, LookupError, TypeError, AttributeError):
            manifest.unread += 1
    manifest.is_folded = not journal
    for by, noted in last.items():
        if noted is not None and writer_of[noted[0]] == by:
            manifest.doubtful[noted[0]] = noted[1]


def start_manifest(folder: Path, kind: str) -> None:
    """Note that a run of a kind begins to write into a folder; the first gives it a manifest.

    A run inside another is noted in that one, too.
    """
    path = folder / MANIFEST
    try:
        manifest = read_manifest(folder)
    except FileError:
        if not (folder / RUN).is_file() and not is_manifest(path):
            raise InputError(f"{path}: not a file of a run; move it, or choose another out=.") from None
        manifest = None
    if manifest is None:
        _write(folder, _adopt(folder))
    elif not manifest.is_folded:
        fold_manifest(folder)
    append(folder, {"begin": kind})
    outer = owning_run(folder)
    if outer is not None and is_manifest(outer / MANIFEST):
        name = Path(os.path.abspath(folder)).relative_to(outer).as_posix()
        about = read_manifest(outer)
        if about is not None and name not in about.runs:
            append(outer, {"run": name})


def _adopt(folder: Path) -> Manifest:
    """What a folder from before manifests holds, by size."""
    entries: dict[str, Entry] = {}
    for name in list_files(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            sizes = [file.stat().st_size for _, file in store_files(path)]
            entries[name] = {"size": sum(sizes), "files": len(sizes)}
        else:
            entries[name] = {"size": path.lstat().st_size}
    return Manifest(entries)


def seal_folder(folder: Path) -> None:
    """Give a folder that is complete its manifest, with the digests of all files."""
    _write(folder, Manifest({name: describe(folder / name) for name in list_files(folder)}))


def fold_manifest(folder: Path, *, ended: bool = False) -> None:
    """Fold the journal into the list; `ended` says that the run that began has come to its end.

    Doubtful entries become what the files are: a killed writer's file with its new or its old content, or
    none.
    """
    with opened(folder / MANIFEST, os.O_RDWR) as handle:
        lock(handle)
        manifest = read_manifest(folder)
        if manifest is None:
            return
        for path, before in manifest.doubtful.items():
            entries = [one for one in (manifest.entries.pop(path, None), before) if one]
            fitting = [one for one in entries if not _fault(folder / path, one)]
            if entries and os.path.lexists(folder / path):
                manifest.entries[path] = (fitting or entries)[0]
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
    """The files and stores of a run, by their paths from its folder; a run inside it is left out.

    Hidden names and unfinished files do not count.
    """
    for place, folders, names in os.walk(folder):
        inner = Path(place)
        before = inner.relative_to(folder).as_posix()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        ends = [name for name in folders if name.endswith(STORE) or (inner / name).is_symlink()]
        folders[:] = [name for name in folders if name not in ends and not is_run(inner / name)]
        for name in sorted([*names, *ends]):
            if not name.startswith(".") and (before, name) != (".", MANIFEST):
                yield name if before == "." else f"{before}/{name}"


def _is_begun(folder: Path) -> bool:
    """Whether a command has begun a run in a folder and not ended it."""
    try:
        manifest = read_manifest(folder)
    except FileError:
        return False
    return manifest is not None and manifest.begun is not None


def list_runs(folder: Path) -> Iterator[str]:
    """The runs inside a run, the outermost of each, by their paths from its folder."""
    for place, folders, _ in os.walk(folder):
        inner = Path(place)
        names = sorted(n for n in folders if not n.startswith(".") and not (inner / n).is_symlink())
        runs = [name for name in names if is_run(inner / name)]
        yield from ((inner / name).relative_to(folder).as_posix() for name in runs)
        folders[:] = [name for name in names if name not in runs and not name.endswith(STORE)]


def compare_files(folder: Path, manifest: Manifest, *, quick: bool = False) -> Iterator[tuple[str, str]]:
    """Every path that is missing, changed or extra, and why; `quick` compares sizes only."""
    if manifest.unread:
        yield MANIFEST, f"{counted(manifest.unread, 'line')} of it cannot be read; run the command again"
    check = partial(_check, folder, manifest, quick=quick)
    with ThreadPoolExecutor(THREADS) as threads:
        for path, why in zip(manifest.entries, threads.map(check, manifest.entries), strict=True):
            if why:
                yield path, why
    for name in sorted(manifest.runs):
        if not is_run(folder / name):
            yield name, "is missing, with the run in it; run its command again"
    for name in set(list_runs(folder)) - manifest.runs if manifest.begun is None else ():
        if not _is_begun(folder / name):  # a command that is killed has not told the outer run yet
            yield name, "does not belong to the run: no xmil command made this run in it; move it elsewhere"
    present = set(list_files(folder))
    for name in sorted(present - {*manifest.entries, *manifest.doubtful}):
        if (folder / name).is_symlink():
            yield name, "is a link, which is not followed; copy the file in"
        elif manifest.begun is None:
            yield name, "does not belong to the run: no xmil command wrote it; move it elsewhere"


def _check(folder: Path, manifest: Manifest, path: str, *, quick: bool) -> str:
    why = _fault(folder / path, manifest.entries[path], quick=quick)
    if not why or path not in manifest.doubtful:
        return why
    before = manifest.doubtful[path]
    if not os.path.lexists(folder / path) or (before and not _fault(folder / path, before, quick=quick)):
        return ""  # its writer was killed before the file got its name
    return why


def _fault(path: Path, entry: Entry, *, quick: bool = False) -> str:
    """What is wrong with a file or store, by what its entry says of it."""
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
