"""Methods added to a run that is finished, or was killed halfway."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.runs.cohorts import (
    arm,
    bytes_of,
    command,
    environment,
    make_cohort,
    make_trap,
    scores,
    script,
    table,
    trap_command,
)
from xmil.cli._app import run
from xmil.runs.verify import verify_run
from xmil.storage import Run


def added(cohort: Path, *more: str, models: int = 1) -> None:
    """Explain by lrp, add ig, and compare with a run of both."""
    both = ["--methods", "lrp,ig", "--target", "all", *more]
    assert run(command(cohort, *both, out="both", models=models)) == 0
    first = scores(cohort / "run") if (cohort / "run").exists() else {}
    assert run(command(cohort, "--methods", "ig", "--target", "all", *more, models=models)) == 0
    whole, filled = scores(cohort / "both"), scores(cohort / "run")
    assert whole.keys() == filled.keys()
    for key, values in {**whole, **first}.items():
        np.testing.assert_array_equal(filled[key], values)
    names = [table(cohort / out / "summary" / "scales.csv") for out in ("both", "run")]
    assert names[0] == names[1]
    about = json.loads((cohort / "run" / "run.json").read_text())
    assert (about["methods"], about["settings"]["methods"]) == (["lrp", "ig"], ["lrp", "ig"])
    assert verify_run(Run(cohort / "run")) == []


@pytest.mark.parametrize("more", [[], ["--config", "by=case"], ["--param", "ig.steps=7"]])
def test_methods_are_added_to_a_finished_run(more: list[str], tmp_path: Path) -> None:
    cohort = make_cohort(tmp_path, 4)
    first = [word for word in more if not word.startswith("ig.") and word != "--param"]
    assert run(command(cohort, "--target", "all", *first)) == 0
    added(cohort, *more)
    before = bytes_of(cohort / "run")
    assert run(command(cohort, "--methods", "lrp", "--target", "all", *first)) == 0
    assert bytes_of(cohort / "run") == before
    assert json.loads((cohort / "run" / "run.json").read_text())["methods"] == ["lrp", "ig"]


def test_an_ensemble_gets_methods_too(tmp_path: Path) -> None:
    cohort = make_cohort(tmp_path, 3, models=2)
    assert run(command(cohort, "--target", "all", models=2)) == 0
    added(cohort, models=2)


def test_methods_are_added_to_a_run_killed_halfway(tmp_path: Path) -> None:
    """Slides without a file get the new method; the first command goes on and fills in its own."""
    cohort = make_cohort(tmp_path, 4)
    assert run(command(cohort, "--target", "all")) == 0
    for name in ("s001", "s003"):  # as a kill leaves it
        (cohort / "run" / "slides" / f"{name}.parquet").unlink()
    assert run(command(cohort, "--methods", "ig", "--target", "all")) == 0
    columns = {(name, column.split(":")[0]) for name, column in scores(cohort / "run")}
    assert ("s001.parquet", "lrp") not in columns
    assert ("s001.parquet", "ig") in columns
    assert run(command(cohort, "--target", "all")) == 0
    added(cohort)


def test_adding_a_method_is_killed_and_goes_on(tmp_path: Path) -> None:
    cohort = make_trap(tmp_path, 4, slide=2)
    assert run(trap_command(cohort)) == 0
    first = scores(cohort / "run")
    arm(cohort, "SIGKILL", "self")
    add = trap_command(cohort, "--methods", "gxi")
    killed = subprocess.run(script(add), env=environment(), capture_output=True, check=False)
    assert killed.returncode == -9
    halfway = {name for name, column in scores(cohort / "run") if column.startswith("gxi:")}
    assert len(halfway) < 4  # results are written beside the computing: how many were, chance decides
    assert run(add) == 0
    whole = scores(cohort / "run")
    assert len(whole) == 2 * len(first)
    for key, values in first.items():
        np.testing.assert_array_equal(whole[key], values)
    assert verify_run(Run(cohort / "run")) == []


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--methods", "ig", "--config", "seed=1"], "seed 0, not 1"),
        (["--methods", "ig", "--target", "neg"], 'targets ["all"], not ["neg"]'),
        (
            ["--methods", "lrp,ig", "--param", "lrp.preset=exact"],
            'params {"lrp": {}}, not {"lrp": {"preset": "exact"}}',
        ),
    ],
)
def test_other_settings_are_refused(
    more: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cohort = make_cohort(tmp_path, 2)
    assert run(command(cohort, "--target", "all")) == 0
    words = more if "--target" in more else ["--target", "all", *more]
    before = bytes_of(cohort / "run")
    assert run(command(cohort, *words)) == 2
    error = capsys.readouterr().err
    assert named in error
    assert "--restart" in error
    assert bytes_of(cohort / "run") == before


def test_a_method_that_fails_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    cohort = make_cohort(tmp_path, 4)
    assert run(command(cohort)) == 0
    rows, first = table(cohort / "run" / "slides.csv"), scores(cohort / "run")
    assert run(command(cohort, "--methods", "gxi", "--param", "gxi.contexts=3")) != 0  # four are the least
    assert len(table(cohort / "run" / "failures.csv")) == 4
    assert table(cohort / "run" / "slides.csv") == rows
    assert verify_run(Run(cohort / "run")) == []
    assert run(command(cohort, "--methods", "gxi")) == 0  # the parameters that failed bind nobody
    assert table(cohort / "run" / "failures.csv") == []
    assert len(scores(cohort / "run")) == 2 * len(first)
    assert run(command(cohort, "--methods", "gxi", "--param", "gxi.contexts=4")) == 2  # those of the files do
    assert verify_run(Run(cohort / "run")) == []


def test_a_method_that_no_file_has_is_not_of_the_run(tmp_path: Path) -> None:
    cohort = make_cohort(tmp_path, 2)
    assert run(command(cohort)) == 0
    assert run(command(cohort, "--methods", "gxi", "--param", "gxi.contexts=3")) != 0
    assert run(command(cohort)) == 0
    about = json.loads((cohort / "run" / "run.json").read_text())
    assert (about["settings"]["methods"], about["settings"]["params"]) == (["lrp"], {})


def test_a_slide_that_a_method_fails_on_keeps_its_row(tmp_path: Path) -> None:
    cohort = make_trap(tmp_path, 4, slide=2)
    assert run(trap_command(cohort)) == 0
    arm(cohort, "no_signal", "self")  # so that the model raises
    run(trap_command(cohort, "--methods", "gxi"))
    assert [row["slide_id"] for row in table(cohort / "run" / "failures.csv")] == ["s002"]
    assert len(table(cohort / "run" / "slides.csv")) == 4
    assert verify_run(Run(cohort / "run")) == []
    (cohort / "features" / "s002.h5").write_bytes(b"")  # now its file is of features that are gone
    run(trap_command(cohort, "--methods", "gxi"))
    left = [row["slide_id"] for row in table(cohort / "run" / "slides.csv")]
    assert left == ["s000", "s001", "s003"]


@pytest.mark.parametrize("slide", [0, pytest.param(2, marks=pytest.mark.full)])
def test_an_interrupted_addition_keeps_the_rows(slide: int, tmp_path: Path) -> None:
    cohort = make_trap(tmp_path, 4, slide=slide)
    assert run(trap_command(cohort)) == 0
    rows = table(cohort / "run" / "slides.csv")
    arm(cohort, "SIGINT", "self")
    add = script(trap_command(cohort, "--methods", "gxi"))
    assert subprocess.run(add, env=environment(), capture_output=True, check=False).returncode != 0
    left = table(cohort / "run" / "slides.csv")
    assert [row["slide_id"] for row in left] == [row["slide_id"] for row in rows]
    assert verify_run(Run(cohort / "run")) == []
