"""The engine: in process, in worker processes and on Ray, one behaviour."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.runs.cohorts import arm, make_trap, scores, table, trap_command
from tests.runs.workers import make, make_broken, make_staged
from tests.waiting import wait_for
from xmil.cli._app import run
from xmil.core.errors import InputError, StopError, UnknownNameError
from xmil.execute.workers import Stages, Workers, process

pytestmark = pytest.mark.early
HERE, TWO, RAY = Workers(), Workers(workers=2), Workers("ray", workers=2)
ENGINES = [pytest.param(HERE, id="here"), pytest.param(TWO, id="processes"), pytest.param(RAY, id="ray")]
QUICK_TO_MISS = {  # a dead node is missed after 1.5 s instead of 15; a slow answer still has its 10 s
    "RAY_health_check_initial_delay_ms": "100",
    "RAY_health_check_period_ms": "300",
}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    """A local Ray of two CPUs: one for all tests that need it, since starting it costs seconds."""
    ray = pytest.importorskip("ray")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80_000_000,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


def paths() -> dict[str, str]:
    """The environment of a process of its own that imports the tests."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    return {**os.environ, **QUICK_TO_MISS, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_item_has_one_outcome_and_errors_are_its_own(engine: Workers) -> None:
    outcomes = list(process(["a", "raise", "b", "bug", "c"], make, engine))
    found = {outcome.item: (outcome.result, outcome.error) for outcome in outcomes}
    assert len(outcomes) == 5
    assert found == {
        "a": ("a!", None),
        "b": ("b!", None),
        "c": ("c!", None),
        "raise": (None, "This item cannot be used."),
        "bug": (None, "KeyError: 'lost'"),
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_ends_the_run_with_its_words(engine: Workers) -> None:
    with pytest.raises(StopError, match="disk is full"):
        list(process(["a", "stop", *"bcdefgh"], make, engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_worker_that_cannot_be_made_ends_the_run(engine: Workers) -> None:
    with pytest.raises((StopError, InputError), match="model is missing"):
        list(process(["a", "b"], make_broken, engine))


@pytest.mark.parametrize(
    ("number", "cause"), [(errno.ENOSPC, "shm"), (errno.EMFILE, "ulimit -n"), (errno.EAGAIN, "workers=")]
)
def test_workers_that_cannot_start_name_the_cause(
    number: int, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own error names no file: /dev/shm is full, or too few file handles are left."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("xmil.execute.workers.ProcessPoolExecutor", refuse)
    with pytest.raises(StopError, match=cause):
        list(process(range(3), make, TWO))


@pytest.mark.parametrize("engine", [TWO, RAY], ids=["processes", "ray"])
def test_a_dead_worker_loses_no_item(engine: Workers, tmp_path: Path) -> None:
    items = [*"abcd", "die once", *"efgh"]
    outcomes = list(process(items, partial(make, str(tmp_path)), engine))
    assert sorted(outcome.item for outcome in outcomes) == sorted(items)
    assert [outcome.result for outcome in outcomes if outcome.item == "die once"] == ["die once!"]
    assert all(outcome.error is None for outcome in outcomes)
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_an_item_that_kills_its_worker_is_given_up_and_the_rest_goes_on(kind: str) -> None:
    outcomes = list(process(["a", "die", "b", "c"], make, Workers(kind, workers=2, retries=1)))
    errors = {outcome.item: outcome.error for outcome in outcomes}
    assert set(errors) == {"a", "b", "c", "die"}
    assert "died 2 times" in str(errors.pop("die"))
    assert set(errors.values()) == {None}


def test_a_worker_is_made_once_in_each_process(tmp_path: Path) -> None:
    outcomes = list(process(["pid"] * 8, partial(make, str(tmp_path), seconds=0.05), TWO))
    pids = {outcome.result for outcome in outcomes}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert {path.name for path in tmp_path.iterdir()} == {f"made-{pid}" for pid in pids}


def test_one_local_worker_is_this_process() -> None:
    assert [outcome.result for outcome in process(["pid"], make, HERE)] == [os.getpid()]


@pytest.mark.parametrize("engine", [HERE, TWO], ids=["here", "processes"])
def test_an_item_is_read_and_worked_on(engine: Workers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    outcomes = list(process(range(6), partial(make_staged, str(log)), engine))
    found = {outcome.item: outcome.result for outcome in outcomes}
    assert found == {0: 1, 1: 11, 2: None, 3: 31, 4: 41, 5: 51}
    assert [outcome.error for outcome in outcomes if outcome.item == 2] == ["Item 2 cannot be read."]
    lines = log.read_text().splitlines()
    assert sum(line.startswith("read") for line in lines) == 6


def test_the_next_item_is_read_while_this_one_is_worked_on() -> None:
    """Work on an item ends only once the next one has been read."""
    known = [threading.Event() for _ in range(4)]

    def read(item: int) -> int:
        known[item].set()
        return item

    def work(item: int, content: int) -> int:
        assert known[min(item + 1, 3)].wait(120)
        return content

    outcomes = process(range(4), lambda: Stages(read, work), HERE)
    assert [(outcome.item, outcome.error) for outcome in outcomes] == [(i, None) for i in range(4)]


def test_a_result_is_written_while_the_next_item_is_worked_on() -> None:
    """The first write ends only once the second item is at work; a write that fails is its item's fault."""
    second = threading.Event()

    def work(item: int, content: int) -> int:
        if item == 1:
            second.set()
        return content

    def write(content: int) -> int:
        assert second.wait(120)
        if content == 20:
            raise InputError("No ink.")
        return content + 1

    stages = Stages(lambda item: item * 10, work, write)
    outcomes = list(process(range(4), lambda: stages, HERE))
    assert [(o.item, o.result, o.error) for o in outcomes] == [
        (0, 1, None),
        (1, 11, None),
        (2, None, "No ink."),
        (3, 31, None),
    ]

    def full(_: int) -> int:
        raise StopError("The disk is full.")

    with pytest.raises(StopError, match="disk is full"):
        list(process(range(4), lambda: Stages(lambda i: i, work, full), HERE))


def test_leaving_early_ends_the_workers() -> None:
    outcomes = process(["pid"] * 50, partial(make, seconds=0.2), TWO)
    pid = next(outcomes).result
    outcomes.close()  # type: ignore[attr-defined]
    assert not _alive(int(str(pid)))


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "from functools import partial\n"
        "from tests.runs.workers import make\n"
        "from xmil.execute.workers import Workers, process\n"
        "if __name__ == '__main__':\n"
        f"    worker = partial(make, {str(tmp_path)!r}, seconds=0.1)\n"
        "    for o in process(['pid'] * 500, worker, Workers(workers=2)):\n"
        "        print(o.result, flush=True)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert parent.stdout is not None
    pids = {int(parent.stdout.readline()) for _ in range(6)}
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not any(map(_alive, pids)))


RAY_DRIVER = """
import os, sys
from functools import partial
from tests.runs.workers import make
from xmil.execute.workers import Workers, process
for o in process(["pid"] * 40, partial(make, seconds=0.3), Workers("ray", workers=1, address={address!r})):
    print(o.result, flush=True)
"""


def test_workers_on_ray_end_when_their_driver_is_killed() -> None:
    """On a cluster that goes on, a worker would otherwise write into a folder that is no longer locked."""
    import ray

    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", RAY_DRIVER.format(address=address)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=paths())
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_for(lambda: not _alive(pid))


RAYLET_DIES = """
import os, signal
from functools import partial
from pathlib import Path
from tests.runs.workers import make
from xmil.core.errors import StopError
from xmil.execute.workers import Workers, process

def kill_raylet():
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if words[0].endswith(b"raylet/raylet") and parent == os.getpid():
            os.kill(int(entry.name), signal.SIGKILL)

failed = 0
try:
    for number, o in enumerate(process(range(50), partial(make, seconds=0.2), Workers("ray", workers=1))):
        failed += o.error is not None
        if number == 1:
            kill_raylet()
except StopError as error:
    print(failed, error)
"""


def test_a_dead_raylet_stops_the_run_and_blames_no_item() -> None:
    done = subprocess.run([sys.executable, "-c", RAYLET_DIES], capture_output=True, text=True, env=paths())
    assert "\n0 Ray stopped working" in f"\n{done.stdout}", done.stdout[-500:] + done.stderr[-500:]


def test_a_worker_of_the_cluster_that_dies_changes_nothing(tmp_path: Path) -> None:
    folder = make_trap(tmp_path, 6, slide=3)
    methods = ("--methods", "lrp,gxi", "--target", "all")
    assert run(trap_command(folder, *methods, out="local")) == 0
    arm(folder, "SIGKILL", "self")
    assert run(trap_command(folder, *methods, "--engine", "ray", "--workers", "2")) == 0
    assert not (folder / "armed").exists()  # it died
    assert table(folder / "run" / "failures.csv") == []
    ours, theirs = scores(folder / "run"), scores(folder / "local")
    assert ours.keys() == theirs.keys()
    assert len(ours) == 6 * 4
    for key, values in ours.items():
        np.testing.assert_allclose(values, theirs[key], atol=1e-6)


@pytest.mark.full
def test_two_nodes_equal_one_process_and_a_dead_node_costs_no_slide(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.runs.two_nodes", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=paths(), capture_output=True, text=True)
    assert (tmp_path / "found.json").exists(), done.stdout[-1000:] + done.stderr[-1000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.pop("written when the node died") < 16  # it died on the way
    assert found == {
        "nodes at work": 2,
        "the node is dead": True,
        "failed": {"one": 0, "two": 0, "killed": 0},
        "equal": {"two": True, "killed": True},
    }


def test_without_items_no_worker_is_made() -> None:
    for engine in (HERE, TWO, RAY):
        assert list(process([], make_broken, engine)) == []


def test_an_engine_says_what_is_wrong_with_it() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown engine 'rya'\. Did you mean 'ray'"):
        Workers("rya")
    with pytest.raises(InputError, match="'workers' parameter of Workers"):
        Workers(workers=0)
    with pytest.raises(InputError, match="address is for"):
        Workers(address="auto")


def test_items_are_asked_for_as_they_are_needed() -> None:
    asked: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1000):
            asked.append(number)
            yield number

    outcomes = process(items(), make, TWO)
    for _ in range(5):
        next(outcomes)
    outcomes.close()  # type: ignore[attr-defined]
    assert len(asked) < 20


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
