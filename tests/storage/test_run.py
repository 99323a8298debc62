"""Run folders that earlier versions wrote are read; those of later ones are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import xmil
from xmil.core.errors import FileError, InputError, XmilError
from xmil.data.inspection import inspect_run
from xmil.storage import LAYOUT, explained_run, open_explanations, read_rows, read_run, write_run
from xmil.viewer.collection import ShownRun

OLD = Path(__file__).parents[1] / "fixtures" / "runs"
KINDS = {
    "explain": "explain",
    "ensemble": "explain",
    "survival": "explain",
    "evaluate": "evaluate",
    "predict": "predict",
    "train": "train",
    "tiles": "tile",
    "embedded": "embed",
    "toy": "toy",
}


@pytest.mark.parametrize("name", KINDS)
def test_folders_of_layout_one_are_read(name: str) -> None:
    known = read_run(OLD / name)
    assert known is not None
    assert (known["kind"], known["layout"]) == (KINDS[name], 1)
    assert isinstance(known["settings"], dict)
    run = xmil.open_run(OLD / name)
    assert (run.kind, run.warnings) == (KINDS[name], [])
    assert inspect_run(OLD / name).facts["kind" if name != "toy" else "layout"]


@pytest.mark.parametrize("name", ["explain", "ensemble", "survival", "evaluate"])
def test_explanations_of_layout_one(name: str) -> None:
    run = xmil.open_run(OLD / name)
    methods = run.about["methods"]
    target = "neg" if name == "explain" else None
    for slide in ("s0", "s1", "s2"):
        e = run.explanation(slide, method=methods[0], target=target)
        assert (e.bag, len(e.scores)) == (slide, 8)
    assert set(run.table()["slide_id"]) >= {"s0", "s1", "s2"}
    held = open_explanations(OLD / name)
    assert (held.task, held.rows["s0"]["n"]) == (run.task, "8")
    assert ("bad" in run.failed) == (name in ("explain", "survival"))


def test_tables_of_layout_one() -> None:
    assert len(xmil.open_run(OLD / "predict").table()) == 6
    assert len(xmil.open_run(OLD / "train").table()) == 2
    assert xmil.open_run(OLD / "predict").failed["bad"].startswith("features/bad.h5: not a readable HDF5")


def test_models_of_an_earlier_training_are_used(tmp_path: Path) -> None:
    rng = __import__("numpy").random.default_rng(0)
    xmil.write_bag(xmil.Bag(rng.normal(size=(5, 4)).astype("float32")), tmp_path / "s9.h5")
    run = xmil.predict_slides(OLD / "train", tmp_path / "s9.h5", out=tmp_path / "out")
    assert (list(run), run.about["class_names"]) == (["s9"], ["neg", "pos"])


def test_pictures_from_before_run_json_are_left_alone(tmp_path: Path) -> None:
    run = shutil.copytree(OLD / "explain", tmp_path / "run")
    out = shutil.copytree(OLD / "heatmaps", tmp_path / "heatmaps")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="not of a run of `xmil heatmap`"):
        xmil.draw_slides(run, out=out, to=["csv"], names=["s0"])
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_later_layout_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "explain", {"settings": {}})
    stored = json.loads((tmp_path / "run.json").read_text())
    assert stored["layout"] == LAYOUT
    (tmp_path / "run.json").write_text(json.dumps({**stored, "layout": LAYOUT + 1}))
    with pytest.raises(InputError, match="does not know; update xmil"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        read_run(tmp_path)


def test_tables_that_are_none(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "slides.csv") == {}
    (tmp_path / "slides.csv").write_bytes(b"slide_id,n\na,\xff\n")
    with pytest.raises(FileError, match="not a readable table"):
        read_rows(tmp_path / "slides.csv")
    with pytest.raises(FileError, match="no such table"):
        xmil.Run(tmp_path / "none").table()


@pytest.mark.parametrize("kind", ["tile", "predict", "heatmap", "insight"])
def test_a_run_that_explains_nothing_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    write_run(tmp_path, kind, {})
    for opened in (explained_run, ShownRun):
        with pytest.raises(XmilError, match=f"a run of `xmil {kind}`.*, which holds no explanations; give"):
            opened(tmp_path)
    (tmp_path / "slides").mkdir()
    (tmp_path / "slides" / "s.parquet").touch()  # whatever made it: there is something to show
    assert explained_run(tmp_path).kind == kind
    (tmp_path / "slides" / "s.parquet").unlink()
    write_run(tmp_path, "explain", {})  # which has just begun
    assert ShownRun(tmp_path).slides == explained_run(tmp_path).slides == []
