"""What stops a new user on files of their own, each with the sentence that helps; and one slide at a time."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import xmil
from tests.cli.test_cli import run
from tests.data import producers as p

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.score, self.out = nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x):
        return self.out((self.score(x).softmax(1) * x).sum(1))

def build():
    return Net()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    xmil.save_model(xmil.create_model("attnmil", in_dim=p.D, n_classes=2, seed=0), path)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_one_slide_is_told_and_drawn(here: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bag = p.trident(here.parent)
    code, out, _ = run("explain", "--model", model, "--features", bag, capsys=capsys)
    e = xmil.explain(model, bag)
    best, (x, y) = int(np.argmax(e.scores)), e.coords[int(np.argmax(e.scores))]
    assert code == 0
    assert f"s1: predicted {e.target.cls} (probabilities: 0 " in out
    assert f"audit: {e.output:.4g} = {e.audit.instances:.4g} patches" in out
    assert f"highest: patch {best} at {x},{y} ({e.scores[best]:+.3g})" in out
    assert (here / "s1.heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in here.iterdir()] == ["s1.heatmap.png"]  # no run is left behind
    _, out, _ = run("explain", "--model", model, "--features", bag, "--json", capsys=capsys)
    told = json.loads(out)
    assert told["explanations"][0]["top"][0]["score"] == pytest.approx(float(e.scores.max()))


def test_several_files_need_a_folder(here: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = p.trident(here.parent)
    p.trident(here.parent, "s2")
    code, _, err = run("explain", "--model", model, "--features", first.parent, capsys=capsys)
    assert code == 2
    assert (
        f"holds 2 feature files; pass --out, the folder for their results, or one file: --features {first}"
        in err
    )


def test_a_root_folder_names_the_one_below(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clam, trident = here.parent / "clam", here.parent / "trident" / "20x_256px_0px_overlap"
    for write in (p.clam_features, p.clam_pt, p.clam_patches):
        write(clam)
    p.trident(trident), p.trident_patches(trident)
    for root, below in ((clam, clam / "h5_files"), (trident.parent, trident / "features_uni_v1")):
        code, _, err = run("explain", "--model", model, "--features", root, "--out", "r", capsys=capsys)
        assert (code, err) == (
            2,
            f"xmil: error: {root}: no feature files in this folder; use --features {below}.\n",
        )
        _, out, _ = run("inspect", root, model, capsys=capsys)
        assert out.endswith(f"Next: xmil explain --model {model} --features {below} --out run\n")


def test_two_encoders_are_both_named(here: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = here.parent / "trident"
    one = p.trident(root).parent
    other = one.with_name("features_conch")
    other.mkdir()
    (other / "s1.h5").write_bytes((one / "s1.h5").read_bytes())
    _, _, err = run("explain", "--model", model, "--features", root, "--out", "r", capsys=capsys)
    assert f"use --features with one of {other} (1 file), {one} (1 file)." in err


def test_model_and_features_swapped(here: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bag = p.clam_features(here.parent)
    code, _, err = run("explain", "--model", bag, "--features", model, "--out", "r", capsys=capsys)
    assert code == 2
    assert err.endswith(f"a model: swap them, as --model {model} --features {bag}.\n")
    _, _, err = run("predict", "--model", bag, "--features", bag, "--out", "r", capsys=capsys)
    assert err.endswith("holds features, not a model; pass the checkpoint as --model.\n")


def test_hdf5_without_coords_is_explained_and_not_drawn(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bag = here.parent / "bare.h5"
    with h5py.File(bag, "w") as file:
        file["features"] = p.features()
    assert np.array_equal(xmil.read_bag(bag).features, p.features())
    assert run("explain", "--model", model, "--features", bag, "--out", "r", capsys=capsys)[0] == 0
    code, out, err = run("heatmap", "r", "--pictures", "overlay", "--to", "png", capsys=capsys)
    assert code == 2
    assert "no coordinates" in out + err


def test_clams_patch_size_beside_the_corners(tmp_path: Path) -> None:
    path = p.clam_features(tmp_path, xy=p.XY * 2)
    with h5py.File(path, "a") as file:
        file["coords"].attrs["patch_size"] = 512
    bag = xmil.read_bag(path)
    assert (bag.format, bag.patch_size) == ("clam", 512)  # the gap between corners would say 1024
    assert bag.inferred == ("patch edge 512 from the attribute patch_size, taken as level-0 pixels",)


def test_errors_name_options_of_the_command(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bag = p.clam_features(here.parent)
    _, _, err = run("explain", "--model", model, "--features", bag, "--patch-size", "0", capsys=capsys)
    assert err == "xmil: error: --patch-size must be an int in the range [1, inf). Got 0 instead.\n"
    with h5py.File(here / "odd.h5", "w") as file:
        file["values"] = p.features()
    _, _, err = run("explain", "--model", model, "--features", "odd.h5", capsys=capsys)
    for out in (err, run("inspect", "odd.h5", capsys=capsys)[2], run("inspect", ".", capsys=capsys)[1]):
        assert "'features' and 'coords'" in out
        assert ("with --config format=..., or" if out is err else "with --format, or") in out
        assert "own-reader.md" in out
        assert "`" not in out
    with h5py.File(here / "odd.h5", "a") as file:
        file["features"] = h5py.SoftLink("/nowhere")
    assert "links that are not followed: features" in run("inspect", "odd.h5", capsys=capsys)[2]


def test_networks_of_ones_own_are_pointed_the_way(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"fc.weight": torch.zeros(2, 3)}, here / "own.pt")
    err = run("inspect", "own.pt", capsys=capsys)[2]
    assert "--model FILE.py:FUNCTION" in err
    assert len(err) < 400
    (here / "mine.py").write_text("def build(): ...")
    assert "which inspect does not call" in run("inspect", "mine.py:build", capsys=capsys)[2]


def test_files_of_several_producers_are_no_obstacle(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder := here / "mixed").mkdir()
    xmil.write_bag(xmil.Bag(p.features(), slide_id="a"), folder / "a.h5")
    torch.save(torch.from_numpy(p.features()), folder / "b.pt")
    out = run("inspect", "mixed", capsys=capsys)[1]
    assert "check that one encoder made all of them" in out
    assert "separate them" not in out


@pytest.mark.parametrize("name", ["mine:build", "mine.py:build"])
def test_own_network_with_class_names(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (here / "mine.py").write_text(OWN)
    features = p.trident(here.parent).parent
    options = ["--features", features, "--out", "r", "--class-names", "a,b,c", "--target", "b"]
    assert run("explain", "--model", name, *options, capsys=capsys)[0] == 0
    held = xmil.open_run("r")
    assert list(held.table().filter(like="p:").columns) == ["p:a", "p:b", "p:c"]
    from xmil.core.registry import load_function

    own = xmil.explain(load_function(name, kind="model")().eval(), features / "s1.h5", target=1)
    assert np.array_equal(held.explanation("s1").scores, own.scores)
    assert run("predict", "--model", name, "--features", features, "--out", "q", capsys=capsys)[0] == 0
    code, _, err = run("explain", "--model", name, *options[:5], "a,b", "--restart", capsys=capsys)
    assert (code, "2 class names" in err) == (2, True)


def test_mpp_of_each_slide_from_the_table(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features = here.parent / "stamp"
    features.mkdir()
    p.stamp2(features, "a"), p.stamp2(features, "b")
    table = here / "cohort.csv"
    table.write_text("slide_id,mpp\na,0.25\nb,\n")
    given = ("--model", model, "--features", features, "--cohort", table, "--out", "r")
    assert run("explain", *given, "--mpp", "0.5", capsys=capsys)[0] == 0
    held = xmil.open_run("r")
    assert held.explanation("a").coords.tolist() == p.XY.tolist()
    assert (
        held.explanation("b").coords.tolist() == (p.XY // 2).tolist()
    )  # the option, where the cell is empty
    table.write_text("slide_id,mpp\na,0.5\nb,\n")
    run("explain", *given, "--mpp", "0.5", capsys=capsys)
    assert held.explanation("a").coords.tolist() == (p.XY // 2).tolist()  # another mpp: explained again


def test_two_scanners_are_one_cohort(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, edge, mpp in (("a", 256, 0.5), ("b", 512, 0.25)):
        bag = xmil.Bag(p.features(), p.XY, patch_size=edge, mpp=mpp, slide_id=name)
        xmil.write_bag(bag, tmp_path / f"{name}.h5")
    assert "mixed patch edge" not in run("inspect", tmp_path, capsys=capsys)[1]
    bag = xmil.Bag(p.features(), p.XY, patch_size=512, mpp=0.5, slide_id="c")
    xmil.write_bag(bag, tmp_path / "c.h5")
    assert "mixed patch edge" in run("inspect", tmp_path, capsys=capsys)[1]


def test_equal_reasons_take_one_line(here: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    features = here.parent / "wide"
    features.mkdir()
    for i in range(12):
        np.save(features / f"s{i}.npy", np.zeros((3, 5), "float32"))
    np.save(features / "good.npy", p.features())
    code, out, _ = run("explain", "--model", model, "--features", features, "--out", "r", capsys=capsys)
    told = [line for line in out.splitlines() if "failed: " in line]
    assert (code, len(told)) == (1, 1)
    assert told[0].startswith("s0, s1, s10 and 9 more: failed: ")
