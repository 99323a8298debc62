"""Slides without features: tiled and encoded in the run that explains them, as the checkpoint says."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import xmil
from tests.cli.test_cli import run
from tests.slides.pyramids import textured, write_pyramid
from xmil.core.errors import InputError, XmilError
from xmil.data.files import UNTRAINED
from xmil.heatmaps.words import figure_notes
from xmil.runs.verify import verify_run

pytest.importorskip("openslide")

BOX = (256, 128, 384, 256)
KNOWN = {"weights": "random", "patch_px": 128, "mpp": 0.5}
MEAN = "tests.encoders.builders:network"  # 24 numbers per patch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with slides and a model that knows how its features were made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slides").mkdir()
    for i, name in enumerate(("one", "two")):
        write_pyramid(tmp_path / "slides" / f"{name}.tif", textured([BOX], (900, 600), seed=i))
    save("model.safetensors", encoder="resnet18", features=KNOWN)
    return tmp_path


def save(path: str, in_dim: int = 512, **about: Any) -> None:
    xmil.save_model(xmil.create_model("attnmil", in_dim=in_dim, n_classes=2, dim=8, seed=0, **about), path)


def explain(**options: Any) -> xmil.Run:
    return xmil.explain_slides("model.safetensors", slides="slides", out="run", device="cpu", **options)


def test_features_are_made_as_the_checkpoint_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = explain()
    assert (list(done), done.failed, done.warnings) == (["one", "two"], {}, [])
    assert verify_run(done) == []
    bag = xmil.read_bag("run/features/one.h5")
    assert (bag.features.shape[1], bag.encoder, bag.patch_size) == (512, "resnet18", 128)
    made = xmil.open_run("run/features")
    assert (made.settings["random"], xmil.open_run("run/tiles").settings["size"]) == (True, 128)
    drawn = sorted(str(path) for path in Path("run/heatmaps").rglob("*.*g"))
    assert [name for name in drawn if "panel" in name] == [f"run/heatmaps/panel/{n}.png" for n in done]
    code, _, err = run(
        "explain", "--model", "model.safetensors", "--slides", "slides", "--out", "other", capsys=capsys
    )
    assert code == 0, err  # the command leaves the same
    assert sorted(str(path) for path in Path("other/heatmaps").rglob("*.*g")) == [
        name.replace("run/", "other/") for name in drawn
    ]
    again = xmil.explain("model.safetensors", "run/features/one.h5", target=done.explanation("one").target)
    assert done.explanation("one").scores.tolist() == again.scores.tolist()


def test_each_stage_goes_on_where_it_stopped(folder: Path) -> None:
    xmil.tile_slides("slides", out="run/tiles", size=128)  # a run that was killed after it
    before = {path: path.stat().st_mtime_ns for path in Path("run/tiles/patches").iterdir()}
    explain()
    assert {path: path.stat().st_mtime_ns for path in Path("run/tiles/patches").iterdir()} == before
    made = {path: path.stat().st_mtime_ns for path in Path("run/features").glob("*.h5")}
    for path in Path("run").iterdir():  # killed before its run.json was written
        if path.name in ("slides", "summary"):
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
    explain()
    assert {path: path.stat().st_mtime_ns for path in Path("run/features").glob("*.h5")} == made
    assert Path("run/slides/one.parquet").is_file()


def test_a_slide_that_cannot_be_read_fails_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("slides/bad.tif").write_bytes(b"not a slide")
    done = explain()
    assert (list(done), list(done.failed)) == (["one", "two"], ["bad"])
    code, out, _ = run(
        "explain", "--model", "model.safetensors", "--slides", "slides", "--out", "run", capsys=capsys
    )
    assert (code, out.count("bad: failed")) == (1, 1)
    code, _, err = run("explain", "--model", "model.safetensors", "--slides", "slides/bad.tif", capsys=capsys)
    assert (code, "bad.tif" in err) == (2, True)


def test_a_cohort_says_which_slides(folder: Path) -> None:
    Path("cohort.csv").write_text("slide_id,label\ntwo,1\n")
    assert list(explain(cohort="cohort.csv")) == ["two"]
    assert [path.name for path in Path("run/features").glob("*.h5")] == ["two.h5"]


def test_only_the_slides_that_were_named_are_explained(folder: Path) -> None:
    explain()
    one = xmil.explain_slides("model.safetensors", slides="slides/one.tif", out="run", device="cpu")
    assert list(one.rows) == ["one"]


def test_options_win_over_the_checkpoint(folder: Path) -> None:
    save("model.safetensors", in_dim=24, encoder="resnet18", features=KNOWN)
    done = explain(encoder=MEAN, tile_size=64)
    assert xmil.read_bag("run/features/one.h5").encoder == "network"
    assert xmil.open_run("run/tiles").settings["size"] == 64
    assert "resnet18" in done.warnings[0]  # not what it was trained on


def test_the_command_of_the_error_is_complete(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("model.safetensors", in_dim=24)
    asked = ["--model", "model.safetensors", "--slides", "slides", "--out", "run", "--methods", "gxi"]
    code, _, err = run("explain", *asked, "--encoder", MEAN, capsys=capsys)
    assert (code, Path("run").exists()) == (2, False)
    command = err[err.index("xmil explain ") :].partition(";")[0]
    assert command.split()[-4:] == ["--tile-size", "256", "--tile-mpp", "0.5"]
    assert run(*shlex.split(command)[1:], capsys=capsys)[0] == 0
    assert xmil.open_run("run").explanation("one").method == "gxi"


@pytest.mark.parametrize(
    ("about", "options", "words"),
    [
        ({}, {}, ["--encoder resnet18", "--tile-size 256", "--tile-mpp 0.5"]),  # the one of this width
        ({"encoder": "resnet18", "features": {"patch_px": 128}}, {}, ["--tile-mpp 0.5"]),
        ({"encoder": "resnet18"}, {"tile_mpp": 0.5}, ["--tile-size 256"]),
        ({"encoder": "mine", "features": {"asked": "mine.py:build"}}, {}, ["mine.py:build", " ENCODER"]),
        ({"encoder": "resnet18", "features": {"weights": "ab" * 8}}, {}, ["--weights", "ab" * 8]),
        ({}, {"encoder": "resnet50"}, ["2048", "512", "resnet18"]),
        ({}, {"encoder": "resnet81"}, ["Unknown encoder 'resnet81'", "resnet18"]),
        ({}, {"encoder": "resnet18", "features": "slides"}, ["encoder=", "features="]),
        ({"encoder": "resnet18", "features": KNOWN}, {"methods": ["lpr"]}, ["lrp"]),
    ],
)
def test_what_is_missing_is_named_before_anything_is_done(
    about: dict[str, Any], options: dict[str, Any], words: list[str], folder: Path
) -> None:
    save("model.safetensors", **about)
    with pytest.raises(XmilError) as error:
        explain(**options)
    assert all(word in str(error.value) for word in words), error.value
    assert not Path("run").exists()


def test_slides_without_a_resolution_are_pointed_to_an_option_of_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(textured([BOX], (900, 600))).save("one.png")
    asked = ["explain", "--model", "model.safetensors", "--slides", "one.png"]
    code, _, err = run(*asked, capsys=capsys)
    assert (code, "pass --mpp." in err) == (2, True), err
    assert run(*asked, "--mpp", "0.5", capsys=capsys)[0] == 0


def test_a_run_takes_the_resolution_that_its_failures_ask_for(folder: Path) -> None:
    Image.fromarray(textured([BOX], (900, 600))).save("slides/bare.png")
    assert list(explain().failed) == ["bare"]
    made = Path("run/features/one.h5").stat().st_mtime_ns
    done = explain(mpp=0.5)
    assert (list(done), done.failed) == (["bare", "one", "two"], {})
    assert Path("run/features/one.h5").stat().st_mtime_ns == made
    assert Path("run/heatmaps/panel/bare.png").is_file()


def test_restart_draws_again_as_well(folder: Path) -> None:
    explain()
    picture = Path("run/heatmaps/panel/one.png")
    before = picture.stat().st_mtime_ns
    assert not explain(restart=True).failed
    assert picture.stat().st_mtime_ns > before


def test_an_untrained_encoder_is_warned_of_wherever_a_map_is_seen(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("model.safetensors")
    done = explain(encoder="resnet18", random=True, tile_size=128, tile_mpp=0.5)
    assert done.warnings == [UNTRAINED]
    assert figure_notes([done.explanation("one")]) == [UNTRAINED]
    code, out, _ = run(
        "explain", "--model", "model.safetensors", "--features", "run/features/one.h5", capsys=capsys
    )
    assert (code, out.count(UNTRAINED)) == (0, 1)


def test_a_folder_of_something_else_is_left_alone(folder: Path) -> None:
    Path("run").mkdir()
    Path("run/notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"notes\.txt"):
        explain()
    assert [path.name for path in Path("run").iterdir()] == ["notes.txt"]


def test_own_networks_are_tried_out_on_the_features(folder: Path) -> None:
    Path("nets.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        torch.manual_seed(0)\n        self.head = nn.Linear(24, 2)\n\n"
        "    def forward(self, x):\n        return self.head(x.mean(dim=1))\n\n\n"
        "def build():\n    return Net()\n"
    )
    done = xmil.explain_slides(
        "nets.py:build", slides="slides", out="run", encoder=MEAN, tile_size=128, tile_mpp=0.5
    )
    assert list(done) == ["one", "two"]
