"""From Python alone: every command over slides as a function, and its folder as a `Run`."""

from __future__ import annotations

import inspect
import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xmil
from tests.runs.cohorts import command, make_cohort, table
from tests.slides.pyramids import textured, write_pyramid
from xmil.cli._app import run as xmil_run
from xmil.cli._command import REQUESTS
from xmil.core.errors import FileError, InputError, XmilError
from xmil.core.registry import load_function
from xmil.core.request import options as request_options

MEAN = "tests.encoders.builders:network"
DOORS = {
    "tile": "tile_slides",
    "embed": "embed_slides",
    "predict": "predict_slides",
    "explain": "explain_slides",
    "evaluate": "evaluate_slides",
    "heatmap": "draw_slides",
}


def test_slides_to_pictures_without_the_command_line(tmp_path: Path) -> None:
    """Tile, embed, train, predict, explain, evaluate and draw a cohort, as a notebook would."""
    slides = tmp_path / "slides"
    slides.mkdir()
    for i in range(8):
        pixels = textured([(0, 0, 256, 256)], (256, 256), seed=i)
        pixels[64:192, 64:192] //= 1 + i % 2
        write_pyramid(slides / f"s{i}.tif", pixels, mpp=0.5, tile=(64, 64))
    tiles = xmil.tile_slides(slides, out=tmp_path / "tiles", size=64)
    assert (tiles.kind, list(tiles), tiles.failed) == ("tile", [f"s{i}" for i in range(8)], {})
    features = xmil.embed_slides(tiles.path, slides, encoder=MEAN, out=tmp_path / "features", device="cpu")
    assert features.table()["n"].tolist() == tiles.table()["n"].tolist()
    parts = ("train", "train", "train", "train", "val", "val", "test", "test")
    rows = [f"s{i},{('plain', 'dark')[i % 2]},{part}" for i, part in enumerate(parts)]
    cohort = tmp_path / "cohort.csv"
    cohort.write_text("\n".join(["slide_id,label,split", *rows]) + "\n")
    settings = {
        "out": str(tmp_path / "trained"),
        "data": {"features": str(features.path), "cohort": str(cohort), "label": "label"},
        "model": {"name": "attnmil", "dim": 8},
        "train": {"epochs": 2, "monitor": "loss", "device": "cpu", "tensorboard": False},
    }
    (tmp_path / "train.json").write_text(json.dumps(settings))
    xmil.train(_config(tmp_path, settings))
    model = tmp_path / "trained"
    said = xmil.predict_slides(model, features.path, out=tmp_path / "predicted", cohort=cohort, draws=10)
    assert (said.kind, len(said), len(said.table())) == ("predict", 8, 8)
    run = xmil.explain_slides(model, features.path, out=tmp_path / "run", cohort=cohort, split="test")
    assert list(run) == ["s6", "s7"]
    e = run.explanation("s6", method="lrp")
    net = xmil.load_model(tmp_path / "trained" / "model" / "model.safetensors")
    bag = xmil.read_bag(features.path / "s6.h5")
    np.testing.assert_array_equal(e.scores, xmil.explain(net, bag).scores)
    measured = xmil.evaluate_slides(
        model / "model", features.path, out=tmp_path / "faith", cohort=cohort, split=("test",),
        methods=["lrp"], modes="remove", steps=5, orders=2,
    )  # fmt: skip
    assert (measured.kind, sorted(measured)) == ("evaluate", ["s6", "s7"])
    drawn = xmil.draw_slides(run, slides=slides, pictures="overlay", to=["png"])
    assert (drawn.kind, drawn.path, list(drawn)) == ("heatmap", run.path / "heatmaps", ["s6", "s7"])
    assert len(list((drawn.path / "overlay").iterdir())) == 2


def _config(folder: Path, settings: dict[str, object]) -> object:
    from xmil.training.config import dumps

    path = folder / "train.toml"
    path.write_text(dumps(settings))
    return xmil.load_config(path)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_cohort(tmp_path_factory.mktemp("doors"), 5)
    (folder / "features" / "s004.h5").write_bytes(b"nothing")
    assert xmil_run(command(folder, "--target", "all")) == 1
    return folder


def test_the_same_files_as_the_command(cohort: Path) -> None:
    made = xmil.explain_slides(
        cohort / "m0.safetensors", cohort / "features", out=cohort / "door", cohort=cohort / "cohort.csv",
        target="all",
    )  # fmt: skip
    ours, theirs = (
        {str(path.relative_to(cohort / name)) for path in (cohort / name).rglob("*") if path.is_file()}
        for name in ("door", "run")
    )
    assert ours == theirs
    one, two = (xmil.open_run(cohort / name) for name in ("door", "run"))
    assert one.about["fingerprint"] == two.about["fingerprint"]
    assert one.table().drop(columns="seconds").equals(two.table().drop(columns="seconds"))
    assert made.failed == two.failed


def test_a_run_is_read(cohort: Path) -> None:
    run = xmil.open_run(cohort / "run")
    assert (run.kind, run.task, run.class_names) == ("explain", "classification", ("neg", "pos"))
    assert (list(run), len(run), "s001" in run) == ([f"s{i:03}" for i in range(4)], 4, True)
    assert list(run.failed) == ["s004"]
    frame = run.table()
    assert frame["slide_id"].tolist() == list(run)
    assert set(frame["correct"]) <= {True, False}
    e = run.explanation("s002", method="lrp", target="pos")
    assert (e.bag, str(e.target)) == ("s002", "pos")
    with pytest.raises(XmilError, match="several explanations fit"):
        run.explanation("s002")
    with pytest.raises(InputError, match="not a readable HDF5 file"):
        run.explanation("s004")
    with pytest.raises(XmilError, match="Did you mean 's001'"):
        run.explanation("s01")
    html = run._repr_html_()
    assert "<b>explain</b>" in html
    assert "s004" in html
    assert "4 slides, 1 failed" in repr(run)


def test_names_that_look_like_numbers_stay_names(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 2)
    for i in range(2):
        (folder / "features" / f"s{i:03}.h5").rename(folder / "features" / f"00{i}.h5")
    run = xmil.explain_slides(folder / "m0.safetensors", folder / "features", out=folder / "run")
    assert run.table()["slide_id"].tolist() == ["000", "001"]


def test_one_feature_file(cohort: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = cohort / "features" / "s002.h5"
    arguments = ["explain", "--model", str(cohort / "m0.safetensors"), "--features", str(one)]
    assert xmil_run([*arguments, "--out", str(cohort / "alone")]) == 0
    assert "1 explained, 0 already done, 0 failed" in capsys.readouterr().out
    assert list(xmil.open_run(cohort / "alone")) == ["s002"]
    labelled = [*arguments, "--cohort", str(cohort / "cohort.csv"), "--target", "label"]
    assert xmil_run([*labelled, "--out", str(cohort / "labelled")]) == 0
    assert [row["label"] for row in table(cohort / "labelled" / "slides.csv")] == ["pos"]


def test_what_is_no_run(tmp_path: Path, cohort: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        xmil.open_run(tmp_path / "none")
    with pytest.raises(InputError, match="not a run"):
        xmil.open_run(tmp_path)
    link = cohort / "linked"
    (link / "slides").mkdir(parents=True)
    (link / "slides" / "s001.parquet").symlink_to(cohort / "run" / "slides" / "s001.parquet")
    with pytest.raises(FileError, match="without following links"):
        xmil.open_run(link).explanation("s001")


@pytest.mark.parametrize("name", DOORS)
def test_commands_have_the_options_of_their_functions(name: str) -> None:
    from importlib import import_module

    options = inspect.signature(getattr(import_module(f"xmil.cli.{name}"), name)).parameters
    parameters = inspect.signature(getattr(xmil, DOORS[name])).parameters
    rare = {key for key, about in request_options(REQUESTS[name]).items() if about.rare}
    assert set(options) - {"as_json", "config", "context"} == set(parameters) - rare


def test_the_route_of_explain(tmp_path: Path) -> None:
    """From the command to the methods through 15 files of commands and runs; one load, one digest a model."""
    folder = make_cohort(tmp_path, 3, models=2)
    import xmil.runs.explain

    root, files, calls = Path(xmil.__file__).parent, set(), []

    def note(frame: Any, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(root)) and frame.f_code.co_name != "<module>":
            files.add(path)
            calls.append((Path(path).stem, frame.f_code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        assert xmil_run(command(folder, models=2)) == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    ours = [path for path in files if Path(path).is_relative_to(root / "cli") or "/xmil/runs/" in path]
    assert len(ours) <= 15, sorted(ours)
    assert calls.count(("durable", "file_digest")) == 2
    assert calls.count(("ensemble", "_load")) == 2
    assert calls.count(("files", "read_weights")) == 2


@pytest.mark.parametrize("door", ["predict_slides", "explain_slides", "evaluate_slides"])
@pytest.mark.parametrize("given", [{"weight": 1}, [4], None])
def test_a_model_is_a_path_a_module_or_a_function(door: str, given: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\"mine\.py:build\"\. Got (dict|int|NoneType|str)"):
        getattr(xmil, door)(given, tmp_path, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


OWN_REGRESSION = """
import torch

class Age(torch.nn.Linear):
    task, reference, class_names = "regression", torch.tensor([2.0]), ("age",)

    def forward(self, x):
        return super().forward(x).mean(dim=1)

def build():
    torch.manual_seed(0)
    return Age(4, 1)
"""


def test_a_module_keeps_its_reference_in_a_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_REGRESSION)
    (tmp_path / "features").mkdir()
    np.save(tmp_path / "features" / "s1.npy", np.eye(4, dtype=np.float32))
    name = f"{tmp_path / 'mine.py'}:build"
    run = xmil.explain_slides(name, tmp_path / "features", out=tmp_path / "run", methods="gxi")
    own = xmil.explain(load_function(name, kind="model")(), np.eye(4, dtype=np.float32), method="gxi")
    held = run.explanation("s1")
    assert (held.column, held.output) == ("gxi:age", pytest.approx(own.output, abs=1e-6))
