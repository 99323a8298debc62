"""The ledger of a run's folder after its writers were killed."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.runs.cohorts import command, make_cohort
from xmil.cli._app import run
from xmil.core.durable import remove_file, write_text
from xmil.core.errors import WriteError
from xmil.core.ledger import LEDGER, MANIFEST, append, writing_for
from xmil.runs.verify import verify_run
from xmil.storage import Item, Record, compare_files, open_folder, open_run, read_ledger, start_ledger
from xmil.storage.ledger import fold_ledger

OLD = Path(__file__).parents[1] / "fixtures" / "runs_of_0.2"


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run whose command was killed half-way through a line of the ledger."""
    run = tmp_path / "run"
    with suppress(KeyboardInterrupt), open_folder(run, "explain", {"a": 1}):
        write_text(run / "slides.csv", "slide_id\ns0\n")
        append(run, {"item": "s0", "rows": [{"slide_id": "s0"}]})
        with (run / LEDGER).open("ab") as stream:
            stream.write(b'{"item": "s1", "rows": [{"slide_')
        raise KeyboardInterrupt
    return run


def test_half_a_line_at_the_end_is_no_damage(killed: Path) -> None:
    ledger = read_ledger(killed)
    assert ledger is not None
    assert ledger.unread == 0
    assert list(ledger.records) == ["s0"]
    assert list(compare_files(killed, ledger)) == []


def test_half_a_line_is_removed_by_the_next_writer(killed: Path) -> None:
    append(killed, {"item": "s2"})
    ledger = read_ledger(killed)
    assert ledger is not None
    assert ledger.unread == 0
    assert list(ledger.records) == ["s0", "s2"]


def test_half_a_line_costs_no_record_of_another_item(killed: Path) -> None:
    ledger = fold_ledger(killed)
    assert ledger is not None
    assert list(ledger.records) == ["s0"]


def test_a_damaged_line_is_still_named(killed: Path) -> None:
    """A line that ends as lines do, but cannot be read, was written whole."""
    with (killed / LEDGER).open("ab") as stream:
        stream.write(b"\n")
    ledger = read_ledger(killed)
    assert ledger is not None
    assert ledger.unread == 1
    assert [name for name, _ in compare_files(killed, ledger)] == [LEDGER]


def test_a_full_disk_is_named_by_whoever_writes_to_the_ledger(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only by those who write a file, whose errors are named on the way."""

    def refuse(handle: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(WriteError, match=LEDGER):
        append(killed, {"item": "s2"})
    with pytest.raises(WriteError, match=LEDGER):
        remove_file(killed / "slides.csv")
    assert (killed / "slides.csv").is_file()


def test_a_kill_while_a_run_of_0_2_gets_a_ledger_leaves_no_obsolete_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(OLD / "explain", run)
    assert (run / "summary" / "made_of.json").is_file()
    unlink = Path.unlink

    def stop(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        if path.name == MANIFEST:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "unlink", stop)
        start_ledger(run, "explain")
    assert start_ledger(run, "explain").files
    assert not (run / "summary" / "made_of.json").exists()


def test_a_killed_restart_is_completed_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even without `restart`: an item whose files are gone must not count as done."""
    run = tmp_path / "run"
    with open_folder(run, "explain", {"a": 1}) as folder:
        for name in ("s0", "s1"):
            with writing_for(name):
                write_text(run / f"{name}.txt", "scores")
            folder.record(name, Record([{"slide_id": name}]))
    unlink = Path.unlink

    def stop(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "unlink", stop)
        with open_folder(run, "explain", {"a": 1}, restart=True):
            pass
    assert [path.name for path in run.glob("*.txt")] == ["s1.txt"]
    with open_folder(run, "explain", {"a": 1}) as folder:
        done = [folder.find_record(Item(name, None), lambda _: None) for name in ("s0", "s1")]
    assert done == [None, None]
    assert list(run.glob("*.txt")) == []
    ledger = read_ledger(run)
    assert ledger is not None
    assert ledger.clearing == []


@pytest.mark.parametrize(
    "fields",
    [{"parts": [{}]}, {"parts": [1]}, {"rows": ["s1"]}, {"rows": [{"slide_id": []}]}, {"sources": [{}]}],
)
def test_a_record_of_other_types_is_not_read(killed: Path, fields: dict[str, Any]) -> None:
    append(killed, {"item": "s1", **fields})
    ledger = read_ledger(killed)
    assert ledger is not None
    assert ledger.unread == 1
    assert list(ledger.records) == ["s0"]


def test_a_restart_after_a_damaged_ledger_leaves_what_may_be_the_users(tmp_path: Path) -> None:
    cohort = make_cohort(tmp_path, 2)
    out = cohort / "run"
    assert run(command(cohort)) == 0
    (out / "s000.notes.txt").write_text("mine")
    (out / "slides" / "s001.notes.txt").write_text("mine")
    (out / LEDGER).write_text("damaged")
    assert run(command(cohort, "--restart")) == 0
    assert (out / "s000.notes.txt").read_text() == "mine"
    assert (out / "slides" / "s001.notes.txt").read_text() == "mine"


def test_a_command_goes_on_without_a_ledger_that_can_be_read(tmp_path: Path) -> None:
    cohort = make_cohort(tmp_path, 2)
    assert run(command(cohort)) == 0
    words = ["heatmap", str(cohort / "run"), "--to", "csv", "--out", str(tmp_path / "drawn")]
    assert run(words) == 0
    (tmp_path / "drawn" / LEDGER).write_bytes(b"\x00damaged")
    assert run(words) == 0
    assert verify_run(open_run(tmp_path / "drawn")) == []
