"""Runs that are killed, lose a worker, or run out of disk: nothing half, nothing lost, the same results."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.runs.cohorts import bytes_of, command, environment, make_cohort, scores, script, table
from xmil.cli._app import run
from xmil.core.storage import read_explanations

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes the Linux way")
METHODS = ("--methods", "lrp,gxi", "--target", "all")


def wait_for(condition, *, seconds: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def done(out: Path) -> int:
    return len(list((out / "slides").glob("*.parquet"))) if (out / "slides").is_dir() else 0


@pytest.mark.parametrize(("workers", "kills"), [("1", 2), ("2", 1)])
def test_killed_runs_end_as_an_unbroken_one(tmp_path: Path, workers: str, kills: int) -> None:
    folder = make_cohort(tmp_path, 40, instances=300)
    assert run(command(folder, *METHODS, out="unbroken")) == 0
    arguments = script(command(folder, *METHODS, "--workers", workers))
    out, rng = folder / "run", np.random.default_rng(int(workers))
    for _ in range(kills):
        before = done(out)
        process = subprocess.Popen(arguments, env=environment(), stderr=subprocess.PIPE)
        wait_for(lambda p=process, b=before: done(out) > b or p.poll() is not None)
        time.sleep(float(rng.uniform(0, 0.1)))
        process.kill()
        process.communicate()
        for path in (out / "slides").glob("*.parquet"):
            assert len(read_explanations(path)) == 4  # whole
    assert 0 < done(out) < 40
    assert run(command(folder, *METHODS)) == 0
    assert bytes_of(out) == bytes_of(folder / "unbroken")
    names = [row["slide_id"] for row in table(out / "slides.csv")]
    assert names == [f"s{i:03}" for i in range(40)]
    assert not list(out.rglob("*.part"))


@pytest.mark.usefixtures("ray_session")
def test_a_worker_of_the_cluster_that_dies_changes_nothing(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 60, instances=400)
    assert run(command(folder, *METHODS, out="local")) == 0
    killed: list[tuple[int, int]] = []

    def kill() -> None:
        wait_for(lambda: done(folder / "run") >= 5)
        pid = ray_workers()[0]
        killed.append((pid, done(folder / "run")))
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert run(command(folder, *METHODS, "--engine", "ray", "--workers", "2")) == 0
    thread.join()
    assert killed
    assert killed[0][1] < 60
    assert table(folder / "run" / "failures.csv") == []
    ours, theirs = scores(folder / "run"), scores(folder / "local")
    assert ours.keys() == theirs.keys()
    assert len(ours) == 60 * 4
    for key, values in ours.items():
        np.testing.assert_allclose(values, theirs[key], atol=1e-6)


def ray_workers() -> list[int]:
    """The processes in which this session's Ray runs our tasks."""
    parents = {p: parent(p) for p in (int(d.name) for d in Path("/proc").iterdir() if d.name.isdigit())}
    ours = {p for p, up in parents.items() if up == os.getpid()}  # the raylet among them
    return [p for p, up in parents.items() if up in ours and b"ray::xmil" in cmdline(p)]


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError):
        return 0


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


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


@pytest.mark.parametrize("workers", ["1", "2"])
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
    assert run(arguments) == 0
    assert f"{30 - before} explained, {before} already done, 0 failed" in capsys.readouterr().out
    assert run(command(folder, *METHODS, out="unbroken")) == 0
    assert bytes_of(out) == bytes_of(folder / "unbroken")
    assert not list(out.rglob("*.part"))


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
    folder = make_cohort(tmp_path, 60, instances=2000)
    arguments = script(command(folder, *METHODS, "--workers", "2"))
    process = subprocess.Popen(
        arguments,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells in the background ignore it
    )
    wait_for(lambda: done(folder / "run") >= 4)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    rows = table(folder / "run" / "slides.csv")
    assert 1 <= len(rows) <= done(folder / "run") < 60


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
