"""The ledger of a run: every damage to every kind of file is found, and no untouched run is accused."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from tests.runs.cohorts import command, make_cohort
from tests.runs.every_run import damages, healthy_runs, make_runs
from xmil.cli._app import run
from xmil.core.durable import remove_file, write_folder, write_text
from xmil.core.errors import InputError, XmilError
from xmil.core.ledger import LEDGER
from xmil.runs.verify import unknowns, verify_run
from xmil.storage import Run, compare_files, open_folder, open_run, read_ledger


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_runs(tmp_path_factory.mktemp("every"))


def is_clean(folder: Path) -> bool:
    return verify_run(open_run(folder)) == []


def test_every_damage_of_a_seeded_list_is_found(runs: dict[str, Path], full: bool) -> None:
    missed = []
    every = damages(runs, full=full)
    for damage in every:
        restore = damage.apply()
        try:
            if is_clean(damage.run):
                missed.append(str(damage))
        except XmilError:  # a run.json that says nothing any more
            pass
        restore()
    assert missed == []
    assert len(every) >= (1000 if full else 150)
    assert {damage.run.name for damage in every} == {folder.name for folder in runs.values()}


def test_healthy_runs_raise_no_alarm(runs: dict[str, Path], tmp_path: Path, full: bool) -> None:
    """As made, carried elsewhere, with their command repeated, with a method more, and of 0.2.0."""
    checked = []
    for name, folder in healthy_runs(runs, tmp_path, full=full):
        assert verify_run(open_run(folder)) == [], name
        checked.append(name)
    assert len(set(checked)) == len(checked)
    assert len(checked) >= (130 if full else 50)


def test_quick_compares_sizes(runs: dict[str, Path]) -> None:
    path = runs["predict"] / "metrics.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + b" \n")
    assert verify_run(open_run(runs["predict"]), quick=True) == []
    assert not is_clean(runs["predict"])
    path.write_bytes(whole + b"\n")
    assert [fault.what for fault in verify_run(open_run(runs["predict"]), quick=True)] == ["metrics.json"]
    path.write_bytes(whole)


def test_a_slide_deleted_with_its_row_is_missed(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs["explain"], out)
    (out / "slides" / "s1.parquet").unlink()
    lines = (out / "slides.csv").read_text().splitlines(keepends=True)
    (out / "slides.csv").write_text("".join(line for line in lines if not line.startswith("s1,")))
    assert {"slides.csv", "slides/s1.parquet"} <= {fault.what for fault in verify_run(open_run(out))}


def test_a_run_inside_a_run_that_is_gone_is_missed(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["viewed"], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "heatmaps")
    assert [fault.what for fault in verify_run(open_run(tmp_path / "run"))] == ["heatmaps"]


def test_a_run_that_is_put_into_a_run_is_extra(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["viewed"], tmp_path / "run")
    shutil.copytree(runs["tile"], tmp_path / "run" / "stranger")
    assert [fault.what for fault in verify_run(open_run(tmp_path / "run"))] == ["stranger"]


def test_a_link_in_a_store_is_extra(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["export"], tmp_path / "run")
    store = next((tmp_path / "run" / "ome-zarr").iterdir())
    (store / "stranger").symlink_to(tmp_path)
    assert [Path(fault.what).name for fault in verify_run(open_run(tmp_path / "run"))] == [store.name]


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "a" * 5000, "../run.json", "/etc/passwd", ""])
def test_a_ledger_with_an_odd_path_is_named(
    runs: dict[str, Path], tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs["tile"], tmp_path / "run")
    with (tmp_path / "run" / LEDGER).open("a") as stream:
        stream.write(json.dumps({"path": path, "size": 1, "by": "x"}) + "\n")
    assert run(["verify", str(tmp_path / "run")]) == 1
    assert LEDGER in capsys.readouterr().out


def test_the_ledger_itself_is_looked_after(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs["tile"], out)
    path = out / LEDGER
    lines = path.read_bytes().splitlines(keepends=True)
    whole = b"".join(lines)
    for damaged in (b"".join(lines[:-1]), b"".join(lines[1:]), b"", whole[:-9], whole[:-1]):
        path.write_bytes(damaged)
        assert not is_clean(out)
    path.unlink()
    assert [fault.what for fault in verify_run(open_run(out))] == [LEDGER]


def test_a_run_of_an_earlier_version_is_read_and_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cohort = make_cohort(tmp_path, 2)
    out = cohort / "run"
    assert run(command(cohort)) == 0
    about = json.loads((out / "run.json").read_text())
    del about["ledger"]
    (out / "run.json").write_text(json.dumps(about))
    (out / LEDGER).unlink()
    assert is_clean(out)
    assert "without a ledger" in unknowns(open_run(out))[0]
    assert run(command(cohort, "--methods", "gxi")) == 0  # goes on in it, and begins a ledger
    ledger = read_ledger(out)
    assert ledger is not None
    assert "sha256" in ledger.files["slides/s000.parquet"]
    assert is_clean(out)
    assert run(["verify", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))["faults"] == []


def write_many(folder: str, writer: int) -> None:
    for i in range(40):
        write_text(Path(folder) / "slides" / f"{writer}-{i}.txt", f"{writer} {i}")


def test_several_writers_lose_no_line(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with open_folder(tmp_path / "run", "explain"):
        (tmp_path / "run" / "slides").mkdir()
        workers = [context.Process(target=write_many, args=(str(tmp_path / "run"), i)) for i in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    ledger = read_ledger(tmp_path / "run")
    assert ledger is not None
    assert len(ledger.files) == 4 * 40 + 1
    assert list(compare_files(tmp_path / "run", ledger)) == []


def test_a_writer_that_dies_leaves_one_file_in_doubt(tmp_path: Path) -> None:
    """The file as it was, as it is, or not there is no fault; of every other file any change is."""
    out = tmp_path / "run"
    child = os.fork()
    if child == 0:
        with open_folder(out, "explain"):
            write_text(out / "old.txt", "old")
            os.replace = _fail  # an error is taken back, and the writer goes on
            with suppress(XmilError):
                write_text(out / "old.txt", "new")
            os.replace = _die
            write_text(out / "new.txt", "new")
    os.waitpid(child, 0)
    ledger = read_ledger(out)
    assert ledger is not None
    assert (ledger.begun, set(ledger.doubtful)) == ("explain", {"new.txt"})
    assert list(compare_files(out, ledger)) == []
    assert not Run(out).is_finished
    (out / "old.txt").write_text("odd")
    assert [name for name, _ in compare_files(out, ledger)] == ["old.txt"]
    (out / "old.txt").write_text("old")
    with open_folder(out, "explain"):
        pass
    ledger = read_ledger(out)
    assert ledger is not None
    assert (ledger.begun, sorted(ledger.files)) == (None, ["old.txt", "run.json"])
    assert is_clean(out)


def _die(*_: object) -> None:
    os.kill(os.getpid(), 9)


def _fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_stores_and_removals_are_noted(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def fill(folder: Path) -> None:
        (folder / "0").mkdir(parents=True)
        (folder / ".zarray").write_text("{}")
        (folder / "0" / "0").write_bytes(b"chunk")

    with open_folder(out, "heatmap"):
        write_folder(out / "a.zarr", fill)
        write_text(out / "gone.txt", "")
        remove_file(out / "gone.txt")
    assert is_clean(out)
    for name in (".zarray", "0/0"):
        content = (out / "a.zarr" / name).read_bytes()
        (out / "a.zarr" / name).write_bytes(content[::-1])
        assert [fault.what for fault in verify_run(open_run(out))] == ["a.zarr"]
        (out / "a.zarr" / name).write_bytes(content)
    (out / "a.zarr" / "0" / ".extra").touch()
    assert [fault.what for fault in verify_run(open_run(out))] == ["a.zarr"]


def test_a_ledger_of_the_users_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_text('{"mine": 1}\n')
    with pytest.raises(InputError, match=LEDGER), open_folder(tmp_path, "explain"):
        pass
    write_text(tmp_path / "file.txt", "")
    assert (tmp_path / LEDGER).read_text() == '{"mine": 1}\n'


def test_an_unfinished_run_has_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slides that wait are not faults; those that are damaged are."""
    cohort = make_cohort(tmp_path, 4)
    out = cohort / "run"
    assert run(command(cohort)) == 0
    rows = (out / "slides.csv").read_text().splitlines(keepends=True)
    with suppress(KeyboardInterrupt), open_folder(out, "explain", compared=False):
        remove_file(out / "slides" / "s003.parquet")
        write_text(out / "slides.csv", "".join(rows[:2]))
        raise KeyboardInterrupt
    capsys.readouterr()
    assert run(["verify", str(out)]) == 0
    assert "has not finished" in capsys.readouterr().out
    (out / "slides" / "s000.parquet").unlink()
    assert [fault.what for fault in verify_run(open_run(out))] == ["slides/s000.parquet"]


def test_a_model_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cohort = make_cohort(tmp_path, 2)
    monkeypatch.chdir(cohort)
    assert run(["explain", "--model", "m0.safetensors", "--features", "features", "--out", "run"]) == 0
    monkeypatch.chdir("/")
    assert is_clean(cohort / "run")
    about = json.loads((cohort / "run" / "run.json").read_text())
    assert Path(about["model"]["path"]).is_absolute()
