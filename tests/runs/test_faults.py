"""A world that misbehaves: a full disk, few file handles, little memory, a clock that jumps.

Each time: one clear line, nothing corrupted, and the same command goes on to the same results. A full disk on
a real file system is in test_broken_runs.py, as is a read-only folder; two runs in one folder and inputs
that change between runs are in tests/trust/test_runs.py (items 19 to 21).
"""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable
from copy import copy
from pathlib import Path

import benchmarks.killed.__main__ as killed
import numpy as np
import pytest
from benchmarks.killed.__main__ import Study, Trial

import xmil
from xmil.cli._app import run

COMMANDS = ["explain", "heatmap"]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return Study(tmp_path_factory.mktemp("faults"), COMMANDS, ["1"])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_is_full_from_any_write_on(study: Study, command: str) -> None:
    """The whole of it, over all commands and workers: `python -m benchmarks.killed --full-disk`."""
    last = study.points[command, "1"]
    for at in (1, last // 3, last - 2):
        result = study.judge(Trial(command, "1", at, everyone=False, full=True))
        assert (result.killed, result.faults) == (True, [])


def under(study: Study, limit: Callable[[], None], command: str, out: Path) -> tuple[int, str]:
    """The exit code and last line of a command in a process of its own that limits itself first."""
    real = killed.run

    def limited(arguments: list[str]) -> int:
        limit()
        return real(arguments)

    killed.run = limited
    try:
        code = study.attempt(Trial(command, "1", 0, everyone=False), out)
    finally:
        killed.run = real
    return code, (study.said.strip().splitlines() or [""])[-1]


def test_few_file_handles(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No slide is blamed, and no file is called damaged."""
    monkeypatch.setenv("XMIL_SYNC", "1")  # takes handles, too
    codes = []
    for handles in (1, 2, 3, 12):
        out = tmp_path / str(handles)
        codes.append(_with_handles(study, out, handles))
        assert not (out / "failures.csv").exists() or (out / "failures.csv").read_text().count("\n") == 1
        assert study.attempt(Trial("explain", "1", 0, everyone=False), out) == 0
        assert killed._differences(study.whole["explain", "1"], out) == []
    assert codes[-1] == 0
    assert any(codes)


def _with_handles(study: Study, out: Path, handles: int) -> int:
    def limit() -> None:
        held = {int(name) for name in os.listdir("/proc/self/fd")}
        free = (number for number in range(4096) if number not in held)
        most = [next(free) for _ in range(handles + 1)][-1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    code, said = under(study, limit, "explain", out)
    assert code == 0 or "oo many" in said, (handles, said)
    return code


def test_little_memory_costs_the_slide_that_needs_it_and_no_other(study: Study, tmp_path: Path) -> None:
    """A slide beyond what the process may take is named; with room the same command explains it."""
    small, out = copy(study), tmp_path / "out"
    small.folder = tmp_path / "study"
    shutil.copytree(study.folder / "data", small.folder / "data")
    np.save(small.folder / "data" / "features" / "large.npy", np.ones((500_000, 12), np.float32))

    def limit() -> None:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 24_000_000,) * 2)

    under(small, limit, "explain", out)
    run_ = xmil.open_run(out)
    assert list(run_.failed) == ["large"]
    assert "emory" in run_.failed["large"]
    assert len(run_.rows) == 4
    assert small.attempt(Trial("explain", "1", 0, everyone=False), out) == 0
    assert not xmil.open_run(out).failed


def test_a_clock_that_jumps_changes_no_result(study: Study, tmp_path: Path) -> None:
    """Forth and back by months at every look."""
    turn = [0]

    def jumping() -> float:
        turn[0] += 1
        return 1e9 + (-1) ** turn[0] * 1e7 * (turn[0] % 9)

    def jump() -> None:
        time.time = jumping

    for command in COMMANDS:
        out = tmp_path / command
        assert under(study, jump, command, out)[0] == 0, study.said
        for path in out.rglob("*"):
            os.utime(path, (1, 1) if len(path.name) % 2 else (4e9, 4e9))
        assert under(study, jump, command, out)[0] == 0
        assert killed._differences(study.whole[command, "1"], out) == []


def test_a_clock_set_back_does_not_keep_an_old_picture(study: Study, tmp_path: Path) -> None:
    """Pictures of a run that was killed, and explanations that were replaced while the clock was wrong."""
    source, out = tmp_path / "run", tmp_path / "pictures"
    shutil.copytree(study.folder / "data" / "done_explain", source)
    draw = ["heatmap", str(source), "--to", "csv", "--out", str(out)]
    assert run(draw) == 0
    (out / "slides.csv").unlink()  # as a kill leaves it
    before = (out / "csv" / "s0.csv").read_bytes()
    shutil.copy(source / "slides" / "s1.parquet", source / "slides" / "s0.parquet")
    os.utime(source / "slides" / "s0.parquet", (1, 1))
    assert run(draw) == 0
    assert (out / "csv" / "s0.csv").read_bytes() != before
