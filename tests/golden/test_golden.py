"""The golden runs and signatures are as committed; `python -m tests.golden --write` makes them again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.__main__ import EXPECTED, MNIST, compare_signatures
from tests.golden.records import differences, read_record, record_folder
from tests.golden.runs import RUNS, Workspace, mnist_bags

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


def test_signatures_are_as_committed() -> None:
    lines = compare_signatures(write=False)
    assert not lines, error_line(lines)


def test_bags_of_real_digits_are_as_committed(data_dir: Path, workspace: Workspace) -> None:
    if not (data_dir / "mnist").is_dir():
        pytest.skip(f"no digits at {data_dir / 'mnist'}")
    record = mnist_bags(workspace, data_dir / "mnist")
    lines = differences(read_record(EXPECTED / f"{MNIST}.json"), record)
    assert not lines, error_line(lines)


def test_records_hold_no_words(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(
        '{"verdict": {"kind": "better", "sentence": "It is."}, "warnings": []}'
    )
    (tmp_path / "slides.csv").write_text("slide_id,measured,warnings\ns00,against nothing,Beware.\n")
    (tmp_path / "summary.txt").write_text("The first is better.\n")
    assert record_folder(tmp_path, root=tmp_path) == {
        "files": ["run.json", "slides.csv", "summary.txt"],
        "run.json | verdict | kind": "better",
        "slides.csv | columns": ["slide_id", "measured", "warnings"],
        "slides.csv | slide_id": ["s00"],
    }


def test_expectations_stay_small() -> None:
    assert sum(path.stat().st_size for path in EXPECTED.iterdir()) < 1_000_000
