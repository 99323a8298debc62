"""Nothing runs that the user did not type, and no file is replaced that a run did not write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.runs.cohorts import make_cohort, make_model
from xmil.cli._app import run
from xmil.core.errors import InputError
from xmil.storage import check_folder, open_folder

EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\ndef build(): ...\n"


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four slides, a model, and a run of `xmil explain`."""
    folder = make_cohort(tmp_path_factory.mktemp("cohort"), 4)
    where = ["--model", f"{folder}/m0.safetensors", "--features", f"{folder}/features"]
    assert run(["explain", *where, "--out", f"{folder}/explained"]) == 0
    return folder


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def commands(cohort: Path, model: Path, out: Path) -> dict[str, list[str]]:
    over = ["--model", str(model), "--features", f"{cohort}/features", "--out", str(out)]
    return {
        "explain": ["explain", *over],
        "predict": ["predict", *over],
        "evaluate": ["evaluate", *over, "--methods", "lrp", "--steps", "2", "--orders", "2"],
        "insight": ["insight", f"{cohort}/explained", *over],
    }


@pytest.mark.parametrize("command", ["explain", "predict", "evaluate", "insight"])
@pytest.mark.parametrize("name", ["evil.py:build", "{out}/evil.py:build", "evil:build"])
def test_a_file_cannot_name_code(
    cohort: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    name: str,
) -> None:
    trained = tmp_path / "trained"
    trained.mkdir()
    (trained / "evil.py").write_text(EVIL)
    (trained / "best.json").write_text(json.dumps({"models": [name.format(out=trained)]}))
    monkeypatch.chdir(trained)
    assert run(commands(cohort, trained, tmp_path / "out")[command]) == 2
    told = capsys.readouterr().err
    assert "best.json" in told
    assert "evil" in told
    assert len(told.strip().splitlines()) == 1
    assert not (trained / "ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", [[], {}, [[]], None, "model.safetensors"])
def test_a_list_of_models_that_names_none_is_refused(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], names: object
) -> None:
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "best.json").write_text(json.dumps({"models": names}))
    assert run(commands(cohort, tmp_path / "trained", tmp_path / "out")["predict"]) == 2
    assert "best.json" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["{folder}", "\ud800", "x" * 5000, "a\0b", "/dev/zero", "evil:build"])
@pytest.mark.parametrize("command", ["insight", "verify"])
def test_a_run_that_names_a_strange_model_is_read_without_it(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    shutil.copytree(cohort / "explained", tmp_path / "run")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    about["models"][0]["path"] = about["model"]["path"] = name.format(folder=tmp_path)
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(1 << 40)  # were the folder read whole, it would take an hour
    words = {"insight": ["--features", f"{cohort}/features", "--out", f"{tmp_path}/out"], "verify": []}
    assert run([command, str(tmp_path / "run"), *words[command]]) == (0 if command == "insight" else 1)
    assert "unexpected" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["../m0.safetensors", "{cohort}/m0.safetensors", "linked.safetensors", 3, ""]
)
def test_models_outside_the_folder_are_refused(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: object
) -> None:
    trained = tmp_path / "trained"
    trained.mkdir()
    make_model(tmp_path / "m0.safetensors")
    (trained / "linked.safetensors").symlink_to(tmp_path / "m0.safetensors")
    named = name.format(cohort=cohort) if isinstance(name, str) else name
    (trained / "best.json").write_text(json.dumps({"models": [named]}))
    assert run(commands(cohort, trained, tmp_path / "out")["predict"]) == 2
    assert "best.json" in capsys.readouterr().err


def test_what_the_user_typed_may_name_code(cohort: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"import xmil\ndef build():\n    return xmil.load_model({str(cohort / 'm0.safetensors')!r})\n"
    )
    assert run(commands(cohort, Path(f"{tmp_path}/mine.py:build"), tmp_path / "out")["predict"]) == 0


@pytest.mark.parametrize("command", ["explain", "predict", "evaluate", "insight"])
@pytest.mark.parametrize("name", ["slides.csv", "predictions.csv", "summary.csv", "notes/mine.txt"])
@pytest.mark.parametrize("more", [[], ["--restart"]])
def test_a_folder_of_the_user_is_left_alone(
    cohort: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    name: str,
    more: list[str],
) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine\n")
    words = commands(cohort, cohort / "m0.safetensors", tmp_path / "out")[command]
    assert run([*words, *more]) == 2
    told = capsys.readouterr().err
    assert name in told
    assert "--out" in told
    assert len(told.strip().splitlines()) == 1
    assert all_files(tmp_path) == {f"out/{name}": b"mine\n"}


@pytest.mark.parametrize("command", ["explain", "predict", "evaluate", "insight"])
def test_a_link_in_a_circle_is_no_folder(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "out")
    assert run(commands(cohort, cohort / "m0.safetensors", tmp_path / "out")[command]) == 2
    told = capsys.readouterr().err
    assert str(tmp_path / "out") in told
    assert "unexpected" not in told


def test_a_store_of_hidden_files_is_of_the_user(cohort: Path, tmp_path: Path) -> None:
    store = tmp_path / "out" / "ome-zarr" / "s000.scores.ome.zarr"
    store.mkdir(parents=True)
    (store / ".zattrs").write_text("mine")
    words = ["export", f"{cohort}/explained", "--to", "ome-zarr", "--out", str(tmp_path / "out")]
    assert run(words) == 2
    assert all_files(tmp_path) == {"out/ome-zarr/s000.scores.ome.zarr/.zattrs": b"mine"}


def test_the_folder_of_another_kind_is_left_alone(cohort: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = all_files(cohort)
    words = commands(cohort, cohort / "m0.safetensors", cohort / "explained")
    assert run(words["evaluate"]) == 2
    assert "xmil explain" in capsys.readouterr().err
    assert all_files(cohort) == before


@pytest.mark.parametrize(
    "words", [["bench", "--suite", "paper", "--quick"], ["bench", "--suite", "evidence", "--quick"], ["demo"]]
)
def test_so_do_the_benchmarks_and_the_demonstration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (tmp_path / "table1.csv").write_text("mine\n")
    assert run([*words, "--out", str(tmp_path)]) == 2
    assert "table1.csv" in capsys.readouterr().err
    assert all_files(tmp_path) == {"table1.csv": b"mine\n"}


def test_a_report_of_the_benchmark_is_not_written_into_another_run(
    cohort: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = all_files(cohort)
    assert run(["bench", "--out", str(cohort / "explained")]) == 2
    assert "xmil explain" in capsys.readouterr().err
    assert all_files(cohort) == before


@pytest.mark.parametrize("more", [[], ["--restart"]])
def test_a_style_of_the_user_is_left_alone(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    (tmp_path / "style.json").write_text('{"mine": 1}')
    words = ["heatmap", f"{cohort}/explained", "--to", "csv", "--out", str(tmp_path), *more]
    assert run(words) == 2
    assert "style.json" in capsys.readouterr().err
    assert all_files(tmp_path) == {"style.json": b'{"mine": 1}'}


def test_another_style_is_refused_before_anything_is_written(cohort: Path, tmp_path: Path) -> None:
    (tmp_path / "style.json").write_text('{"mpp": 2.0}')
    assert run(["heatmap", f"{cohort}/explained", "--to", "csv", "--out", str(tmp_path)]) == 2
    assert all_files(tmp_path) == {"style.json": b'{"mpp": 2.0}'}


def test_a_split_replaces_no_other_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"s{i},c{i},{i % 2}\n" for i in range(12))
    (tmp_path / "cohort.csv").write_text("slide_id,case_id,label\n" + rows)
    mine = "slide_id,label\nt0,1\n"
    (tmp_path / "mine.csv").write_text(mine)
    words = ["split", f"{tmp_path}/cohort.csv", "--folds", "2", "--out"]
    assert run([*words, f"{tmp_path}/mine.csv"]) == 2
    told = capsys.readouterr().err
    assert "mine.csv" in told
    assert "--overwrite" in told
    assert (tmp_path / "mine.csv").read_text() == mine
    assert run([*words, f"{tmp_path}/new.csv"]) == 0
    assert run([*words, f"{tmp_path}/new.csv", "--seed", "1"]) == 0  # its own result
    assert run([*words, f"{tmp_path}/mine.csv", "--overwrite"]) == 0


EXPORTED = [
    "bench",
    "--suite",
    "evidence",
    "--task",
    "standard",
    "--config",
    "repetitions=1",
    "--quick",
    "--only",
]


@pytest.mark.parametrize("name", ["standard--attnmil--0.npz", "notes/mine.txt", "run.json"])
def test_exported_bags_leave_a_folder_of_the_user_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = tmp_path / "exam" / name
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    assert run([*EXPORTED, "--export", str(tmp_path / "exam"), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert name in told
    assert "--export" in told
    assert len(told.strip().splitlines()) == 1
    assert all_files(tmp_path) == {f"exam/{name}": b"{}"}


def test_exported_bags_are_not_written_into_another_run(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = all_files(cohort)
    assert run([*EXPORTED, "--export", f"{cohort}/explained", "--out", str(tmp_path / "out")]) == 2
    assert "xmil explain" in capsys.readouterr().err
    assert all_files(cohort) == before


def test_what_a_killed_run_leaves_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "slides").mkdir()
    for name in (".lock", ".run.json.abc.part", "slides/.s0.parquet.x.part"):
        (tmp_path / name).touch()
    with open_folder(tmp_path, "explain", {}):
        (tmp_path / "slides").mkdir(exist_ok=True)
        (tmp_path / "slides" / "s0.parquet").touch()
    check_folder(tmp_path, "explain")
    with pytest.raises(InputError, match="xmil explain"):
        check_folder(tmp_path, "evaluate")


def test_a_link_in_a_folder_is_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "slides").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="slides"):
        check_folder(tmp_path / "out", "explain")


def test_folders_of_earlier_versions_are_known(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"protocol_name": "quick"}')
    check_folder(tmp_path, "bench")
    (tmp_path / "run.json").write_text('{"mine": 1}')
    with pytest.raises(InputError, match=r"run\.json"):
        check_folder(tmp_path, "bench")


@pytest.mark.parametrize("encoder", ["evil.py:build", "evil:build", "hf-hub:someone/evil", "evil.pt"])
def test_no_command_is_proposed_with_code_that_a_file_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], encoder: str
) -> None:
    model = make_model(tmp_path / "m.safetensors", encoder=encoder)
    (tmp_path / "slides").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "slides" / "s0.png")
    words = ["--model", str(model), "--slides", f"{tmp_path}/slides", "--out", f"{tmp_path}/out"]
    assert run(["explain", *words]) == 2
    told = capsys.readouterr().err
    assert "--encoder" in told
    assert f"--encoder {encoder}" not in told
