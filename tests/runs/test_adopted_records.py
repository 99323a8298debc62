"""Results whose lines in the ledger were lost, as by a kill, get the same lines again and are not redone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.killed.commands import COMMANDS, prepare, run

from xmil.storage import read_ledger
from xmil.storage.ledger import fold_ledger


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare(folder)
    return folder


def records_of(out: Path) -> dict[str, dict[str, Any]]:
    """What the ledger says of each item, without clocks."""
    ledger = read_ledger(out)
    assert ledger is not None
    records = {item: record.as_dict() for item, record in ledger.records.items()}
    for record in records.values():
        for row in record["rows"]:
            row.pop("seconds", None)
    return records


def times_of(out: Path) -> dict[str, int]:
    """When each file of a slide was written."""
    ledger = read_ledger(out)
    assert ledger is not None
    files = [name for name, entry in ledger.files.items() if entry.get("of", "/") != "/"]
    return {name: (out / name).stat().st_mtime_ns for name in files}


@pytest.mark.parametrize("command", ["tile", "embed", "explain", "evaluate"])
def test_lost_records_are_made_again_from_the_files(data: Path, tmp_path: Path, command: str) -> None:
    words = [*COMMANDS[command](data), "--out", str(tmp_path / "out")]
    assert run(words) == 0
    records, times = records_of(tmp_path / "out"), times_of(tmp_path / "out")
    fold_ledger(tmp_path / "out", without=list(records))
    assert run(words) == 0
    assert len(records) == 4
    assert records_of(tmp_path / "out") == records
    assert times_of(tmp_path / "out") == times
