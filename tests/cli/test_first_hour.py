"""The first hour: slides and a checkpoint to a map in one command or three, each printed by the last."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import xmil
from tests.cli.test_cli import run
from tests.data import producers as p
from tests.slides.pyramids import textured, write_pyramid
from tests.viewer.make_run import write_slide


def clam(root: Path) -> None:
    for slide in ("s1", "s2"):
        p.clam_patches(root, slide), p.clam_features(root, slide), p.clam_pt(root, slide)


def trident(root: Path) -> None:
    for slide in ("s1", "s2"):
        (
            p.trident(root / "20x_256px_0px_overlap", slide),
            p.trident_patches(root / "20x_256px_0px_overlap", slide),
        )


def _flat(write: Callable[..., Path], inside: str = "") -> Callable[[Path], None]:
    def both(root: Path) -> None:
        (root / inside).mkdir(parents=True, exist_ok=True)
        for slide in ("s1", "s2"):
            write(root / inside, slide)

    return both


PRODUCERS = {
    "CLAM": clam,
    "TRIDENT": trident,
    "STAMP": _flat(p.stamp2, "ctranspath"),
    "Slideflow": _flat(p.slideflow, "bags"),
    "TIAToolbox": _flat(p.tiatoolbox),
    "SpatialData": _flat(p.spatialdata),
    "own .pt": _flat(lambda root, slide: p.plain(root, slide, container="pt", coords=True)),
}
SHOWN = ("CLAM", "STAMP")  # with and without a pixel size of their own; the viewer reads the run, not them


def hint(out: str) -> list[str]:
    """The command that a command's last line names, without the program's name."""
    last = out.rstrip().splitlines()[-1]
    assert last.startswith("Next: xmil "), out
    return shlex.split(last.removeprefix("Next: xmil "), comments=True)


@pytest.mark.parametrize(
    "producer", [*SHOWN, *(pytest.param(p, marks=pytest.mark.full) for p in PRODUCERS if p not in SHOWN)]
)
def test_from_features_to_the_viewer(
    producer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if producer in ("TIAToolbox", "SpatialData"):
        pytest.importorskip("zarr")
    monkeypatch.chdir(tmp_path)
    PRODUCERS[producer](tmp_path / "data")
    model = tmp_path / "model.safetensors"
    xmil.save_model(xmil.create_model("attnmil", in_dim=p.D, n_classes=2, seed=0), model)
    (tmp_path / "slides").mkdir()
    for slide in ("s1", "s2"):
        write_slide(tmp_path / "slides" / f"{slide}.tif", np.full((8, 8, 3), 230, np.uint8), edge=512)
    more = {"STAMP": ("--mpp", "0.25"), "Slideflow": ("--mpp", "0.25"), "TIAToolbox": ("--patch-size", "512")}
    code, out, _ = run("inspect", "data", model, "slides", *more.get(producer, ()), capsys=capsys)
    assert code == 0
    explain = hint(out)
    code, out, err = run(*explain, capsys=capsys)
    assert code == 0, err
    assert len(list(Path("run/heatmaps/overlay").glob("*.png"))) == 2
    view = hint(out)
    if producer not in SHOWN:
        assert view[:2] == ["view", "run"]
        return
    code, out, err = run(*view, "--export", "site", "--json", capsys=capsys)
    assert (code, json.loads(out)) == (0, {"out": "site", "failed": {}}), out + err
    assert Path("site/index.html").is_file()


def test_without_slides_the_hints_go_by_heatmap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    PRODUCERS["own .pt"](tmp_path / "data")
    xmil.save_model(xmil.create_model("attnmil", in_dim=p.D, n_classes=2, seed=0), "model.safetensors")
    _, out, _ = run("inspect", "data", "model.safetensors", capsys=capsys)
    explain = hint(out)
    assert explain[-2:] == ["--out", "run"]
    _, out, _ = run(*explain, capsys=capsys)
    assert hint(out) == ["heatmap", "run", "--slides", "SLIDES"]
    (tmp_path / "only").mkdir()
    Image.new("RGB", (64, 64), (200, 120, 170)).save(tmp_path / "only" / "s.png")
    _, out, _ = run("inspect", "only", capsys=capsys)
    assert hint(out) == ["tile", "only", "--out", "tiles"]


def test_slides_and_a_checkpoint_in_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training records how its features were made, so that the model alone tells how to make others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for folder in ("training", "slides"):
        (tmp_path / folder).mkdir()
    for i in range(8):
        box = (256, 128, 384, 256) if i % 2 else (128, 256, 256, 256)
        write_pyramid(Path("training") / f"t{i}.tif", textured([box], (900, 600), seed=i))
    for i in range(2):
        write_pyramid(Path("slides") / f"s{i}.tif", textured([(256, 128, 384, 256)], (900, 600), seed=i))
    xmil.tile_slides("training", out="tiles", size=128)
    xmil.embed_slides("tiles", "training", encoder="resnet18", random=True, out="features")
    rows = [f"t{i},c{i},{'tumour' if i % 2 else 'benign'},{'val' if i > 5 else 'train'}" for i in range(8)]
    Path("cohort.csv").write_text("\n".join(["slide_id,case_id,label,split", *rows]) + "\n")
    Path("train.toml").write_text(
        'out = "trained"\n[data]\nfeatures = "features"\ncohort = "cohort.csv"\n'
        '[model]\nname = "attnmil"\ndim = 8\n[train]\nepochs = 1\ndevice = "cpu"\n'
    )
    code, out, err = run("train", "train.toml", capsys=capsys)
    assert code == 0, err
    code, out, err = run("inspect", "trained/model/model.safetensors", "slides", capsys=capsys)
    code, out, err = run(*hint(out), capsys=capsys)
    assert code == 0, err
    assert sorted(path.stem for path in Path("run/heatmaps/panel").glob("*.png")) == ["s0", "s1"]
    assert xmil.read_bag("run/features/s0.h5").patch_size == 128
    assert hint(out) == ["view", "run", "--slides", "slides"]
    code, out, err = run("explain", "--model", "trained", "--slides", "slides/s0.tif", capsys=capsys)
    assert (code, Path("s0.heatmap.png").is_file(), out.startswith("s0: predicted ")) == (0, True, True), err
    code, out, err = run(*hint(out), capsys=capsys)  # goes on with its features
    assert (code, "0 patches of 0 slides, 1 already done" in out) == (0, True), err
