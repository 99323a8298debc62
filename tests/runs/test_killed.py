"""Commands killed at injected points of writing end as unbroken ones do, as in `benchmarks.killed`."""

from __future__ import annotations

from copy import copy
from pathlib import Path

import numpy as np
import pytest
from benchmarks.killed.__main__ import Ledger, Result, Study, Trial, plan
from PIL import Image

import xmil
from tests.training.cohorts import config_of, write_cohort
from xmil.core.durable import write_text
from xmil.runs.verify import verify_run
from xmil.storage import open_folder, open_run


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return Study(tmp_path_factory.mktemp("killed"), ["explain", "export", "view", "study"], ["1", "4"])


def test_the_points_of_a_run_are_counted(study: Study) -> None:
    assert study.left_out == {}
    for command, whole in ((name, study.whole[name, "1"]) for name in ("explain", "export")):
        assert study.points[command, "1"] >= 4 * len(whole), command  # made, half, whole, renamed


@pytest.mark.parametrize("command", ["explain", "export"])
def test_kills_change_nothing(study: Study, command: str) -> None:
    """At the first points, in the middle and at the end."""
    last = study.points[command, "1"]
    for at in (2, last // 2, last - 1):
        result = study.judge(Trial(command, "1", at, everyone=bool(at % 2)))
        assert (result.killed, result.faults) == (True, [])


@pytest.mark.full  # as the kills before it, by the ledger alone
def test_verify_finds_nothing_after_kills(tmp_path: Path) -> None:
    """At points all over each command, before and after it goes on."""
    names, checked = ["tile", "embed", "explain", "evaluate", "heatmap", "predict"], 0
    study = Study(tmp_path, names, ["1"])
    assert study.left_out == {}
    for name in names:
        last = study.points[name, "1"]
        for at in (3, last // 3, last // 2, 2 * last // 3, last - 2):
            out = tmp_path / f"{name}-{at}"
            assert study.attempt(Trial(name, "1", at, everyone=False), out) < 0
            if (out / "run.json").is_file():  # it had begun
                assert verify_run(open_run(out)) == [], (name, at)
                checked += 1
            assert study.attempt(Trial(name, "1", 0, everyone=False), out) == 0
            assert verify_run(open_run(out)) == [], (name, at)
            checked += 1
    assert checked > 50


def test_a_worker_that_dies_after_writing_costs_no_slide(study: Study) -> None:
    """At the end of its file: another worker finds the slide done, and the verdict counts it."""
    result = study.judge(Trial("explain", "4", 15, everyone=False))
    assert (result.killed, result.faults) == (True, [])


def test_a_table_that_was_left_with_some_rows_gets_its_order_back(tmp_path: Path) -> None:
    """The rows of the slides that were done first, when a run with several workers was killed."""
    (tmp_path / "slides").mkdir()
    for i in range(3):
        pixels = np.random.default_rng(i).integers(60, 200, size=(128, 128, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "slides" / f"s{i}.png")
    options = {"size": 64, "slide_mpp": 0.5, "min_tissue": 0.0}
    done = xmil.tile_slides(tmp_path / "slides", out=tmp_path / "out", **options)
    whole = (done.path / "slides.csv").read_text()
    head, *rows = whole.splitlines(keepends=True)
    write_text(done.path / "slides.csv", head + rows[2])
    xmil.tile_slides(tmp_path / "slides", out=tmp_path / "out", **options)
    assert (done.path / "slides.csv").read_text() == whole


@pytest.mark.parametrize("server", ["view", "study"])
def test_a_killed_server_keeps_what_it_acknowledged(study: Study, server: str) -> None:
    """A client draws or answers; the server dies while it writes, and is started again."""
    result = study.judge(Trial(server, "1", study.points[server, "1"] // 2, everyone=True))
    assert (result.killed, result.faults) == (True, [])
    assert len(study.acknowledged) > 10


@pytest.mark.full
@pytest.mark.parametrize("command", ["explain", "evaluate"])
def test_a_driver_on_ray_that_is_killed_leaves_no_process(tmp_path: Path, command: str) -> None:
    """The whole command, at one of its own points: Ray is gone with it, and the next call goes on."""
    pytest.importorskip("ray")
    study = Study(tmp_path, [command], ["ray"])
    result = study.judge(Trial(command, "ray", 5, everyone=False))
    assert (result.killed, result.faults) == (True, [])


def test_what_kills_leave_behind_is_swept(tmp_path: Path) -> None:
    """Half files lie in every folder of a run; the next run removes them, and nothing else."""
    out = tmp_path / "run"
    for folder in ("", "slides", "summary", "qupath"):
        (out / folder).mkdir(exist_ok=True)
        (out / folder / ".s1.csv.ab12.part").write_text("half")
        (out / folder / ".s1.zarr.ab12.part" / "new").mkdir(parents=True)  # a store that is a folder
        (out / folder / ".s1.zarr.ab12.part" / "new" / "0").write_text("half")
        (out / folder / ".s2.csv.ab12.part").write_text("half")
    with open_folder(out, "explain", {}):
        pass
    for folder in ("", "slides", "summary", "qupath"):
        (out / folder / "mine.part").write_text("whole")
        (out / folder / ".s3.csv.ab12.part").write_text("half")
    with open_folder(out, "explain", {}):
        pass
    assert sorted(path.name for path in out.rglob("*.part")) == ["mine.part"] * 4


def test_a_training_killed_before_its_log_writes_it_when_it_goes_on(tmp_path: Path) -> None:
    """The state is written first; a kill between the two must not cost the log's last row."""
    folder = write_cohort(tmp_path, n=20)
    config = config_of(folder, train={"epochs": 2})
    xmil.train(config)
    job = next(path for path in (folder / "out").rglob("log.csv"))
    whole = job.read_text()
    job.write_text(whole.rpartition("\n2,")[0] + "\n")
    (job.parent / "metrics.json").unlink()
    xmil.train(config)
    assert job.read_text() == whole


def test_a_lost_file_would_be_found(study: Study) -> None:
    """The comparison can fail: against an unbroken run of other content it does."""
    other = copy(study)
    other.whole = {**study.whole, ("export", "1"): {**study.whole["export", "1"], "more.txt": "0"}}
    assert other.judge(Trial("export", "1", 3, everyone=False)).faults
    assert {trial.command for trial in plan(study.points, 9)} == {"explain", "export", "view", "study"}


def test_slices_of_kills_add_up(study: Study, tmp_path: Path) -> None:
    first, ledger = plan(study.points, 4), Ledger(tmp_path / "ledger")
    for trial in first:
        ledger.note(Result(trial, True, []))
    assert not set(plan(study.points, 4, done=Ledger(tmp_path / "ledger").trials)) & set(first)
    assert ledger.summary()["kills"] == 4
    ledger.note(Result(first[0], True, ["half a file"]))
    assert len(ledger.summary()["faults"]) == 1
    assert first[0] in plan(study.points, 4, done=ledger.trials)  # until it is mended
    ledger.note(Result(first[0], True, []))
    assert (ledger.summary()["faults"], ledger.summary()["mended"]) == ([], 1)
