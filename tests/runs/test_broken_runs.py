"""Runs that are killed or run out of disk: nothing half, nothing lost, the same results."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import xmil
from tests.runs.cohorts import (
    arm,
    bytes_of,
    command,
    environment,
    make_cohort,
    make_trap,
    script,
    table,
    trap_command,
)
from xmil.cli._app import run
from xmil.storage import read_explanations

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes the Linux way")
METHODS = ("--methods", "lrp,gxi", "--target", "all")


def done(out: Path) -> int:
    return len(list((out / "slides").glob("*.parquet"))) if (out / "slides").is_dir() else 0


@pytest.mark.parametrize("workers", ["2", pytest.param("1", marks=pytest.mark.full)])
def test_a_killed_run_ends_as_an_unbroken_one(tmp_path: Path, workers: str) -> None:
    folder = make_trap(tmp_path, 12, slide=6)
    assert run(trap_command(folder, *METHODS, out="unbroken")) == 0
    out = folder / "run"
    arm(folder, "SIGKILL", "parent" if workers == "2" else "self")
    killed = subprocess.run(
        script(trap_command(folder, *METHODS, "--workers", workers)), env=environment(), capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL
    assert 0 < done(out) < 12
    for path in (out / "slides").glob("*.parquet"):
        assert len(read_explanations(path)) == 4  # whole
    assert run(trap_command(folder, *METHODS)) == 0
    assert bytes_of(out) == bytes_of(folder / "unbroken")
    assert [row["slide_id"] for row in table(out / "slides.csv")] == [f"s{i:03}" for i in range(12)]
    assert not list(out.rglob("*.part"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place))
    yield place
    subprocess.run(["umount", str(place)], check=True)  # noqa: S607  # wherever the system has it


def _mount(*options: str) -> None:
    try:
        subprocess.run(["mount", *options], check=True, capture_output=True)  # noqa: S607
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting is refused here: {error}")


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    folder = make_cohort(tmp_path / "cohort", 30, instances=300)
    out = small_disk / "run"
    arguments = command(folder, *METHODS, "--workers", workers)
    arguments[arguments.index("--out") + 1] = str(out)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(880_000))
    assert run(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "No space left on device" in error
    assert str(out) in error
    assert 0 < done(out) < 30
    for path in (out / "slides").glob("*.parquet"):
        assert len(read_explanations(path)) == 4  # none is half
    ballast.unlink()
    before = done(out)
    assert run(arguments[:-2]) == 0  # in this process
    assert f"{30 - before} explained, {before} already done, 0 failed" in capsys.readouterr().out
    assert run(command(folder, *METHODS, out="unbroken")) == 0
    assert bytes_of(out) == bytes_of(folder / "unbroken")
    assert not list(out.rglob("*.part"))


@pytest.mark.parametrize(
    ("kind", "filled"),
    [("ome-zarr", 920_000), ("anndata", 990_000)],
)
def test_a_full_disk_in_a_store_stops_the_export_and_blames_no_slide(
    tmp_path: Path, small_disk: Path, capfd: pytest.CaptureFixture[str], kind: str, filled: int
) -> None:
    folder = make_cohort(tmp_path / "cohort", 2, instances=30)
    assert run(command(folder)) == 0
    out, ballast = small_disk / "export", small_disk / "ballast"
    words = ["export", str(folder / "run"), "--to", kind, "--out", str(out)]
    ballast.write_bytes(bytes(filled))
    assert run(words) == 2
    told = capfd.readouterr().err.strip()
    assert "No space left on device" in told.splitlines()[-1]
    assert "Traceback" not in told
    assert not (out / "failures.csv").exists() or table(out / "failures.csv") == []
    ballast.unlink()
    assert run(words) == 0
    assert not list(out.rglob("*.part"))


FILL = """
import sys
import numpy as np
import xmil
from xmil.core.errors import WriteError

bag = xmil.Bag(np.zeros((10, 64)), coords=np.zeros((10, 2), int), patch_size=256)
for i in range(60):
    try:
        xmil.write_bag(bag, f"{sys.argv[1]}/b{i}.h5")
    except WriteError as error:
        assert "No space left on device" in str(error)
        print(i)
"""


@pytest.mark.parametrize("room", [4, 8, 20, 40, 100])
def test_a_full_disk_in_hdf5_is_an_error_of_one_file(small_disk: Path, room: int) -> None:
    """HDF5 itself would end the process, or leave files open that it cannot close."""
    (small_disk / "ballast").write_bytes(bytes((1 << 20) - room * 1024))
    words = [sys.executable, "-c", FILL, str(small_disk)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[-1] == "59"
    for path in small_disk.glob("*.h5"):
        assert xmil.read_bag(path).features.shape == (10, 64)
    assert not list(small_disk.glob("*.part"))


def test_a_read_only_folder_is_said_at_once(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cohort(tmp_path / "cohort", 6)
    arguments = command(folder)
    for out in (small_disk / "run", small_disk / "new"):
        arguments[arguments.index("--out") + 1] = str(out)
        if out.name == "run":
            assert run(arguments) == 0
            (out / "slides" / "s003.parquet").unlink()
            kept = bytes_of(out)
            _mount("-o", "remount,ro", str(small_disk))
        capsys.readouterr()
        assert run(arguments) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert "Read-only file system" in error
        assert str(out) in error
    _mount("-o", "remount,rw", str(small_disk))
    arguments[arguments.index("--out") + 1] = str(small_disk / "run")
    assert bytes_of(small_disk / "run") == kept
    assert run(arguments) == 0
    assert "1 explained, 5 already done" in capsys.readouterr().out


def test_an_interrupted_run_keeps_its_slides_and_leaves_no_worker(tmp_path: Path) -> None:
    folder = make_trap(tmp_path, 12, slide=6)
    arm(folder, "SIGINT", "parent")
    interrupted = subprocess.run(  # it ends once its workers have, since they hold its pipes, too
        script(trap_command(folder, *METHODS, "--workers", "2")),
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells in the background ignore it
    )
    assert interrupted.returncode == 130, interrupted.stderr
    assert "Traceback" not in interrupted.stderr
    rows = table(folder / "run" / "slides.csv")
    assert 1 <= len(rows) <= done(folder / "run") < 12


def test_evaluate_gives_the_same_in_worker_processes(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 4)
    options = ("--methods", "lrp,random", "--modes", "remove", "--steps", "10", "--orders", "3")
    for out, workers in (("one", "1"), ("two", "2")):
        arguments = ["evaluate", *command(folder, *options, "--workers", workers, out=out)[1:]]
        assert run(arguments) == 0
    assert bytes_of(folder / "one") == bytes_of(folder / "two")
    one, two = (table(folder / out / "slides.csv") for out in ("one", "two"))
    assert all(float(row.pop("seconds")) > 0 for row in (*one, *two))
    assert one == two
    assert [row["slide_id"] for row in one] == [f"s{i:03}" for i in range(4)]
    assert {row["predicted"] for row in one} <= {"neg", "pos"}
    files = [folder / out / "results" / "s001.parquet" for out in ("one", "two")]
    results = [pq.read_table(file).drop_columns("seconds") for file in files]
    assert results[0].equals(results[1], check_metadata=True)
