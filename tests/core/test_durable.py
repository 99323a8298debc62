"""Power loss: every state a disk may be in after a crash holds each file whole, or not at all.

The writes, renames and syncs of a run are recorded. What was synced is on the disk; of the rest any part may
be: the contents of a file that was not synced are lost, and names in a folder not synced since may be old or
new. Every prefix of the log is replayed with all that was not synced dropped, and with all names kept.
"""

from __future__ import annotations

import errno
import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xmil
from xmil.core import durable
from xmil.core.durable import write_atomically, write_folder, write_text
from xmil.core.errors import WriteError
from xmil.storage import open_folder

Names = dict[str, bytes]


@pytest.fixture(autouse=True)
def _syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XMIL_SYNC", "1")


class Recorder:
    """The log of what reached the system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[Any, ...]] = []
        self._calls = {"replace": os.replace, "fsync": os.fsync}
        monkeypatch.setattr(os, "replace", self.replace)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def replace(self, source: Any, target: Any) -> None:
        self.log.append(("rename", str(source), str(target), Path(source).read_bytes()))
        self._calls["replace"](source, target)

    def fsync(self, handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        content = None if os.path.isdir(path) else Path(path).read_bytes()
        self.log.append(("sync", path, content))
        self._calls["fsync"](handle)


def after_crash(log: list[tuple[Any, ...]], *, names_kept: bool) -> Names:
    """What the disk holds: names renamed to count once their folder is synced, or at once."""
    synced: Names = {}
    on_disk: Names = {}
    pending: list[tuple[str, bytes]] = []
    for entry in log:
        if entry[0] == "sync" and entry[2] is not None:
            synced[entry[1]] = entry[2]
        elif entry[0] == "rename":
            content = synced.get(entry[1], b"")  # a file that was never synced has a name and no content
            pending.append((entry[2], content))
            if names_kept:
                on_disk[entry[2]] = content
        else:
            lasting = [(name, content) for name, content in pending if str(Path(name).parent) == entry[1]]
            on_disk.update(lasting)
            pending = [item for item in pending if item not in lasting]
    return on_disk


def run_of_writes(folder: Path) -> dict[str, list[bytes]]:
    """A small run; for each name the contents it may have, in the order they were written."""
    with open_folder(folder / "run", "explain", {"a": 1}, about={"slides": 2}) as run:
        (run.path / "slides").mkdir()
        for i in range(3):
            write_text(run.path / "slides" / f"s{i}.txt", f"scores of {i}" * 50)
            run.write_table(["slide_id"], [{"slide_id": f"s{k}"} for k in range(i + 1)])
        run.write_failures({})
    return {str(path): [path.read_bytes()] for path in run.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("names_kept", [False, True])
def test_every_prefix_of_the_log_leaves_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names_kept: bool
) -> None:
    recorder = Recorder(monkeypatch)
    last = run_of_writes(tmp_path)
    written: dict[str, set[bytes]] = {}
    for entry in recorder.log:
        if entry[0] == "rename":
            written.setdefault(entry[2], set()).add(entry[3])
    for stop in range(len(recorder.log) + 1):
        for name, content in after_crash(recorder.log[:stop], names_kept=names_kept).items():
            assert content in written[name], (stop, name)
            assert content
    everything = after_crash(recorder.log, names_kept=names_kept)
    assert {name: [content] for name, content in everything.items()} == {
        name: contents for name, contents in last.items() if not name.endswith(".lock")
    }


def test_without_syncing_the_replay_finds_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay can tell: with the option for slow disks it finds empty files."""
    monkeypatch.setenv("XMIL_SYNC", "0")
    recorder = Recorder(monkeypatch)
    run_of_writes(tmp_path)
    assert [entry for entry in recorder.log if entry[0] == "sync"] == []
    assert b"" in after_crash(recorder.log, names_kept=True).values()
    monkeypatch.setenv("XMIL_SYNC", "often")
    with pytest.raises(xmil.XmilError, match="must be 0 or 1"):
        write_text(tmp_path / "x", "")


def test_a_sync_that_fails_is_told_and_one_that_cannot_be_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "kept", "old")

    def fail(number: int) -> Any:
        def fsync(_: int) -> None:
            raise OSError(number, "")

        return fsync

    monkeypatch.setattr(durable.os, "fsync", fail(5))
    with pytest.raises(xmil.XmilError, match="cannot be written"):
        write_atomically(tmp_path / "kept", lambda path: Path(path).write_text("new") and None)
    assert (tmp_path / "kept").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    monkeypatch.setattr(durable.os, "fsync", fail(22))
    write_text(tmp_path / "kept", "new")
    assert (tmp_path / "kept").read_text() == "new"


@pytest.mark.parametrize("room", range(0, 40_000, 2_000))
def test_a_full_disk_is_the_error_of_an_hdf5_file(room: int, tmp_path: Path) -> None:
    """HDF5 stumbles over the bytes that the disk refused; the disk's error must come out, not HDF5's."""

    def write() -> None:
        with durable.create_hdf5(str(tmp_path / "full.h5")) as (file, _):
            for k in range(20):
                values = file.create_dataset(f"group{k}/values", data=np.full(300, k))
                assert values[:].tolist() == [k] * 300

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))  # Python ignores the signal of this limit
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_store_that_gets_no_name_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(folder: Path, text: str) -> None:
        folder.mkdir()
        (folder / "0").write_text(text)

    write_folder(tmp_path / "a.zarr", partial(fill, text="old"))
    rename = os.replace

    def refuse(source: Any, target: Any) -> None:
        if Path(source).name == "new":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WriteError):
        write_folder(tmp_path / "a.zarr", partial(fill, text="new"))
    assert (tmp_path / "a.zarr" / "0").read_text() == "old"
