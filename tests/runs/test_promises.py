"""What docs/reliability.md promises of files and names from others: links, memory, hangs, clear lines."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.runs.cohorts import command, make_cohort, make_model, table
from xmil.bench import read_units
from xmil.bench.entries import COLUMNS, method_entry
from xmil.cli._app import run
from xmil.core.background import Background
from xmil.core.errors import CheckpointError, FileError, InputError
from xmil.core.ledger import append
from xmil.data import Cohort, read_cohort, split_folds, split_fractions
from xmil.models import load_model
from xmil.storage import open_run, read_ledger
from xmil.training.config import MOST_MODELS, grid_points, load_config, make_config
from xmil.training.fit import read_state


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_cohort(tmp_path_factory.mktemp("cohort"), 3)
    assert run(command(folder)) == 0
    return folder


def write_training(folder: Path) -> Path:
    """A config for a short training, over a cohort that it writes."""
    cohort = make_cohort(folder / "cohort", 8)
    table = (cohort / "cohort.csv").read_text().splitlines()
    sides = ["split", *("train" if i < 4 else "val" for i in range(8))]
    lines = [f"{row},{side}" for row, side in zip(table, sides, strict=True)]
    (cohort / "cohort.csv").write_text("\n".join(lines) + "\n")
    (folder / "config.toml").write_text(
        f'[data]\nfeatures = "{cohort}/features"\ncohort = "{cohort}/cohort.csv"\n'
        '[model]\ndim = 8\n[train]\nepochs = 2\nbatch = 2\ndevice = "cpu"\n'
    )
    return folder / "config.toml"


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The line of an error, which is one."""
    return capsys.readouterr().err.strip().splitlines()[-1]


# Links


@pytest.mark.parametrize("linked", ["export", "export/qupath", "heatmaps", "heatmaps/csv"])
def test_no_output_follows_a_link_in_a_run(
    linked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cohort(tmp_path, 2)
    assert run(command(folder)) == 0
    outside = tmp_path / "outside"
    outside.mkdir()
    place = folder / "run" / linked
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(outside)
    words = {"export": ["export", "--to", "qupath"], "heatmaps": ["heatmap", "--to", "csv"]}
    name, *more = words[linked.partition("/")[0]]
    assert run([name, str(folder / "run"), *more]) == 2
    assert "link" in last_line(capsys)
    assert not list(outside.iterdir())


def test_a_run_with_a_linked_folder_is_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cohort(tmp_path, 2)
    assert run(command(folder)) == 0
    (folder / "run" / "slides").rename(tmp_path / "outside")
    (folder / "run" / "slides").symlink_to(tmp_path / "outside")
    before = {path: path.read_bytes() for path in (tmp_path / "outside").iterdir()}
    assert run(command(folder, "--methods", "gxi")) == 2
    assert "link" in last_line(capsys)
    assert {path: path.read_bytes() for path in (tmp_path / "outside").iterdir()} == before


def test_an_out_folder_that_is_a_link_is_the_users_choice(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 2)
    (tmp_path / "disk").mkdir()
    (folder / "run").symlink_to(tmp_path / "disk")
    assert run(command(folder)) == 0


# The note of a picture


def test_a_repeated_drawing_keeps_its_notes(cohort: Path, tmp_path: Path) -> None:
    words = ["heatmap", str(cohort / "run"), "--to", "csv", "--out", str(tmp_path / "out")]
    assert run(words) == 0
    path = tmp_path / "out" / "slides.csv"
    record = read_ledger(tmp_path / "out").records["s000"]
    noted = {"rows": [{**record.rows[0], "note": "seen"}], "facts": {**record.facts, "note": "seen"}}
    append(tmp_path / "out", {"item": "s000", **record.as_dict(), **noted})
    for more in ("csv", "csv,geojson"):
        assert run([*words[:3], more, *words[4:]]) == 0
        assert [row["note"] for row in table(path)] == ["seen", "", ""]


def test_a_panel_of_other_methods_is_drawn_again(tmp_path: Path) -> None:
    """It shows all that were asked for: one kept from another choice would pass for this one's."""
    folder = make_cohort(tmp_path, 2)
    assert run(command(folder, "--methods", "lrp,gxi")) == 0
    words = [
        "heatmap",
        str(folder / "run"),
        "--pictures",
        "panel",
        "--size",
        "60",
        "--out",
        f"{tmp_path}/out",
    ]
    panel = tmp_path / "out" / "panel" / "s000.png"
    assert run([*words, "--methods", "lrp", "--names", "s000"]) == 0
    one = panel.read_bytes()
    assert run(words) == 0
    both = panel.read_bytes()
    assert both != one
    time = panel.stat().st_mtime_ns
    assert run(words) == 0
    assert panel.stat().st_mtime_ns == time


def test_a_run_of_another_kind_is_not_drawn(cohort: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", f"{cohort}/m0.safetensors", "--features", f"{cohort}/features"]
    assert run(["predict", *words, "--out", f"{cohort}/predicted"]) == 0
    before = sorted(cohort.rglob("*"))
    assert run(["heatmap", f"{cohort}/predicted", "--out", f"{cohort}/drawn"]) == 2
    assert "xmil predict" in last_line(capsys)
    assert sorted(cohort.rglob("*")) == before
    assert run(["verify", str(cohort)]) == 2  # a folder of runs, beside the slides
    assert "predicted" in last_line(capsys)


def test_an_entry_that_is_no_file_costs_its_slide_alone(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 2)
    (folder / "features" / "odd.h5").mkdir()
    words = ["--model", f"{folder}/m0.safetensors", "--features", f"{folder}/features"]
    assert run(["predict", *words, "--out", f"{folder}/out"]) == 1
    assert {row["slide_id"] for row in table(folder / "out" / "predictions.csv")} == {"s000", "s001"}
    assert [row["slide_id"] for row in table(folder / "out" / "failures.csv")] == ["odd"]


# Memory


def lightning(path: Path, views: int, length: int) -> Path:
    """A checkpoint whose tensors are views of one number, `length` long each."""

    class Storage:
        def __reduce__(self) -> Any:
            return (None,)

    names = {f"w{i}": i for i in range(views)}
    stream = io.BytesIO()

    class Pickler(pickle._Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 1) if isinstance(obj, Storage) else None

    class View:
        def __init__(self, storage: Storage) -> None:
            self.storage = storage

        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (self.storage, 0, (length,), (0,), False, {})

    storage = Storage()
    content = {
        "pytorch-lightning_version": "2.0",
        "state_dict": {name: View(storage) for name in names},
        "hyper_parameters": {},
    }
    Pickler(stream, protocol=2).dump(content)
    foreign = b"cmodule_of_theirs\nThing\n0"  # pushed and popped: only our reader goes beyond it
    data = stream.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data[:2] + foreign + data[2:])
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", np.ones(1, np.float32).tobytes())
    return path


def test_views_of_one_number_are_counted_together(tmp_path: Path) -> None:
    """Each is below the budget; together they are far above, and none is copied."""
    path = lightning(tmp_path / "bomb.ckpt", views=40, length=20_000_000)
    assert path.stat().st_size < 10_000
    with pytest.raises(CheckpointError, match="GiB"):
        load_model(path)


def test_scores_of_repeats_are_counted_as_python_has_them(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    texts = {name: pa.array(["x"]) for name in COLUMNS if name not in ("scores", "repetition", "target")}
    numbers = {name: pa.array([0]) for name in ("repetition", "target")}
    scores = pa.ListArray.from_arrays([0, 12_000_000], pa.array(np.zeros(12_000_000)))
    pq.write_table(pa.table({**texts, **numbers, "scores": scores}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    with pytest.raises(FileError, match="GiB"):
        method_entry(str(path))


@pytest.mark.parametrize("words", [["verify"], ["heatmap", "--to", "csv"]])
def test_short_rows_under_a_wide_header_are_counted_together(
    cohort: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(cohort / "run", tmp_path / "run")
    header = ",".join(["slide_id", *(f"c{i}" for i in range(20_000))])
    rows = "".join(f"s{i}\n" for i in range(20_000))
    (tmp_path / "run" / "slides.csv").write_text(f"{header}\n{rows}")
    assert run([words[0], str(tmp_path / "run"), *words[1:]]) in (1, 2)
    told = capsys.readouterr()
    assert "memory bomb" in told.out + told.err
    with pytest.raises(FileError, match="memory bomb"):
        open_run(tmp_path / "run").table()


def test_a_cohort_of_many_columns_takes_linear_time(tmp_path: Path) -> None:
    names = ",".join(f"c{i}" for i in range(99_999))
    (tmp_path / "cohort.csv").write_text(f"slide_id,{names}\ns0{',1' * 99_999}\n")
    begin = time.process_time()
    read_cohort(tmp_path / "cohort.csv")
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("where", ["optimizer", "model"])
def test_views_of_one_number_in_a_training_are_counted_together(where: str, tmp_path: Path) -> None:
    config = write_training(tmp_path)
    assert run(["train", str(config), "--out", f"{tmp_path}/out"]) == 0
    path = tmp_path / "out" / "model" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    view = torch.zeros(1, dtype=torch.half).as_strided((8000, 8000), (0, 0))
    held = [content["model"]] if where == "model" else content["optimizer"]["state"].values()
    for values in held:
        values.update(dict.fromkeys(values, view))
    torch.save(content, path)
    with pytest.raises(FileError, match=r"last\.ckpt.*memory bomb"):
        read_state(path.parent)


def test_a_state_of_another_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_training(tmp_path)
    assert run(["train", str(config), "--out", f"{tmp_path}/out"]) == 0
    path = tmp_path / "out" / "model" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    for state in content["optimizer"]["state"].values():
        state["exp_avg"] = torch.zeros(3, 5)
    content["epoch"] = 1
    torch.save(content, path)
    (path.parent / "metrics.json").unlink()
    assert run(["train", str(config), "--out", f"{tmp_path}/out"]) == 2
    assert "last.ckpt: damaged" in last_line(capsys)


def test_bench_units_that_are_bombs_pipes_or_damaged_are_named(tmp_path: Path) -> None:
    units = tmp_path / "units"
    units.mkdir()
    path = units / "bomb.npz"
    np.savez_compressed(path, header=np.zeros(2, np.uint8), v0=np.zeros((9000, 9000), np.uint8))
    with pytest.raises(FileError, match="GiB"):
        read_units(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FileError, match="pipe"):
        read_units(tmp_path)
    path.unlink()
    for header in ({}, [], {"rows": 3}, {"settings": {}, "measures": 1, "facts": {}, "rows": []}, "null"):
        np.savez(path, header=np.frombuffer(json.dumps(header).encode(), np.uint8))
        with pytest.raises(FileError, match="benchmark"):
            read_units(tmp_path)


@pytest.mark.parametrize("scores", [None, "many", [float("inf")], [None], [[1.0]]])
def test_foreign_scores_that_are_none_are_named(scores: Any, tmp_path: Path) -> None:
    path = tmp_path / "theirs.parquet"
    row = dict.fromkeys(COLUMNS, "x") | {"repetition": 0, "target": 0, "scores": scores}
    pq.write_table(pa.Table.from_pylist([row]), path)
    entry = method_entry(str(path))
    exam = type("Exam", (), {"problem": "x", "model_name": "x", "repetition": 0, "n_classes": 1})
    with pytest.raises(InputError):
        entry._one(exam, "x", 0, "x", 1)  # type: ignore[attr-defined]
    pq.write_table(pa.Table.from_pylist([row | {"repetition": None}]), path)
    with pytest.raises(FileError, match=path.name):
        method_entry(str(path))


@pytest.mark.parametrize("shape", ["(4000000000000,)", "(-1,)", "(5,)" + " " * 70_000, "("])
def test_time_bins_with_an_absurd_header_are_named(shape: str, tmp_path: Path) -> None:
    make_model(tmp_path / "m.safetensors")
    weights = tmp_path / "best_model.pt"
    torch.save({"model.0.weight": torch.zeros(3, 3)}, weights)
    head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    magic = b"\x93NUMPY\x02\x00" + len(head).to_bytes(4, "little")
    (tmp_path / "survival_bins.npy").write_bytes(magic + head)
    from xmil.models.checkpoints.files import _time_bins

    with pytest.raises(CheckpointError, match="survival_bins"):
        _time_bins(tmp_path, 4)


def test_a_damaged_background_is_refused_and_none_is_none(tmp_path: Path) -> None:
    path = tmp_path / "background.npz"
    assert Background.load(path) is None
    Background(np.zeros(3), np.ones((2, 3)), 5).save(path)
    assert Background.load(path) is not None
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(FileError, match=r"background\.npz"):
        Background.load(path)


# Hangs


def test_splits_of_many_cases_take_linear_time() -> None:
    """By counting what is looked at: a list that counts its reads is read some times over, not n times."""
    n = 20_000
    reads = [0]

    class Cells(tuple[str, ...]):
        __slots__ = ()

        def __iter__(self) -> Any:
            reads[0] += 1
            return super().__iter__()

    names = Cells(f"s{i}" for i in range(n))
    cohort = Cohort({"slide_id": names, "case_id": names, "site": names, "y": Cells("ab" * (n // 2))})
    split_folds(cohort, 5, stratify="y", sites="site")
    split_fractions(cohort, {"train": 0.5, "test": 0.5}, stratify="y")
    assert reads[0] < 60


def test_the_split_command_reads_the_cases_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = tmp_path / "cohort.csv", [0]
    path.write_text("slide_id,case_id\n" + "".join(f"s{i},c{i}\n" for i in range(2000)))
    cases = Cohort.cases.fget  # type: ignore[attr-defined]

    def counted(self: Cohort) -> Any:
        calls[0] += 1
        return cases(self)

    monkeypatch.setattr(Cohort, "cases", property(counted))
    assert run(["split", str(path), "--folds", "5"]) == 0
    assert calls[0] < 10


def test_pipes_are_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for words in (["split"], ["train"], ["study", "plan"]):
        assert run([*words, str(tmp_path / "pipe")]) == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    "changes", [{"train": {"repeats": 10**9}}, {"grid": {f"model.p{i}": list(range(30)) for i in range(9)}}]
)
def test_more_models_than_anyone_means_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{MOST_MODELS:,}"):
        grid_points(make_config({"data": {"features": "f", "cohort": "c"}, **changes}))


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "--param", "lrp.contexts=1000000000"],
        ["explain", "--methods", "ig", "--param", "ig.steps=1000000000"],
        ["explain", "--config", "seed=-5"],
        ["bench", "--suite", "evidence", "--quick", "--seed", "-1"],
        ["bench", "--suite", "evidence", "--quick", "--repetitions", "0"],
        ["bench", "--suite", "paper", "--quick", "--seed", "-1"],
        ["evaluate", "--methods", "lrp", "--steps", "1000000000"],
        ["evaluate", "--methods", "lrp", "--orders", "1000000000"],
    ],
)
def test_numbers_nobody_means_are_refused(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    more = ["--model", f"{cohort}/m0.safetensors", "--features", f"{cohort}/features"]
    assert (
        run([*words, *(more if words[0] in ("explain", "evaluate") else []), "--out", f"{tmp_path}/out"]) == 2
    )
    told = "".join(capsys.readouterr())
    assert "in the range" in told
    assert words[-1].rpartition("=")[2] in told


def test_more_repetitions_than_there_are_seeds_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--quick", "--repetitions", "1000000000", "--out", str(tmp_path / "out")]
    for words in (["bench", "--suite", "evidence"], ["bench", "--suite", "paper"]):
        assert run([*words, *out]) == 2
        assert "1000" in last_line(capsys)


# Clear lines


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = 1" * 400_000, "a = " + "9" * 5000, "\ud800"])
def test_traps_in_toml_are_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text, errors="surrogatepass")
    with pytest.raises(FileError, match=r"config\.toml: not a valid TOML"):
        load_config(path)


@pytest.mark.parametrize("name", ["explain", "predict"])
def test_a_name_that_is_not_utf8_costs_its_slide(name: str, tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 3)
    os.rename(folder / "features" / "s001.h5", os.fsencode(folder / "features") + b"/s\xff.h5")
    words = ["--model", str(folder / "m0.safetensors"), "--features", str(folder / "features")]
    assert run([name, *words, "--out", str(folder / "out")]) == 1
    (row,) = table(folder / "out" / "failures.csv")
    assert "UTF-8" in row["error"]
