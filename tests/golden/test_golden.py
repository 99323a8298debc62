"""The golden runs and snapshots are as committed; `python -m tests.golden --write` makes them again."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.golden.__main__ import EXPECTED, MNIST
from tests.golden.records import differences, read_record
from tests.golden.runs import RUNS, Workspace, mnist_bags
from tests.golden.snapshots import SNAPSHOTS

pytest.importorskip("tifffile", reason="the extra 'slides' is not installed")
NEEDED = {"insight": "lifelines"}  # survival curves are part of it
SHOWN = 20
ADVICE = "If this is meant: python -m tests.golden --write, and give the reason in the commit."


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("golden"))


def error_line(lines: list[str]) -> str:
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join(["", *lines[:SHOWN], *more, ADVICE])


@pytest.mark.parametrize("name", RUNS)
def test_values_are_as_committed(name: str, workspace: Workspace) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    run = RUNS[name]
    lines = differences(read_record(EXPECTED / f"{name}.json"), run.record(workspace), relative=run.relative)
    assert not lines, error_line(lines)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_signatures_and_help_are_as_committed(name: str) -> None:
    expected = (EXPECTED / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    lines = list(
        difflib.unified_diff(expected, SNAPSHOTS[name]().splitlines(), "committed", "now", n=0, lineterm="")
    )
    assert not lines, error_line(lines)


def test_bags_of_real_digits_are_as_committed(data_dir: Path, workspace: Workspace) -> None:
    if not (data_dir / "mnist").is_dir():
        pytest.skip(f"no digits at {data_dir / 'mnist'}")
    record = mnist_bags(workspace, data_dir / "mnist")
    lines = differences(read_record(EXPECTED / f"{MNIST}.json"), record)
    assert not lines, error_line(lines)


def test_expectations_stay_small() -> None:
    assert sum(path.stat().st_size for path in EXPECTED.iterdir()) < 1_000_000
