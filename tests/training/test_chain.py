"""From slides to Table 2 by one command each, in the layout of docs/studies/table2.md."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from xmil.cli._app import run

tifffile = pytest.importorskip("tifffile")
CONFIG = Path(__file__).parents[2] / "configs" / "paper" / "luad_tp53_attnmil.toml"
PART = ("train", "train", "val", "test")
EDGE = 256


def write_slide(path: Path, mutated: bool, rng: np.random.Generator) -> None:
    """3 x 3 patches of pink tissue on glass; a mutated slide has two dark ones."""
    pixels = np.full((5 * EDGE, 5 * EDGE, 3), 244, dtype=np.uint8)
    tissue = np.array([222, 150, 190]) + rng.normal(0, 14, size=(3 * EDGE, 3 * EDGE, 3))
    if mutated:
        tissue[:EDGE, : 2 * EDGE] -= 90
    pixels[EDGE:-EDGE, EDGE:-EDGE] = np.clip(tissue, 0, 255).astype(np.uint8)
    per_cm = 1e4 / 0.5
    with tifffile.TiffWriter(path) as file:
        file.write(
            pixels,
            tile=(EDGE, EDGE),
            photometric="rgb",
            resolution=(per_cm, per_cm),
            resolutionunit="CENTIMETER",
        )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Slides, metadata and a split file of eight cases."""
    root = tmp_path_factory.mktemp("luad")
    rng = np.random.default_rng(0)
    (root / "slides").mkdir()
    (root / "luad" / "metadata").mkdir(parents=True)
    (root / "splits").mkdir()
    cases = [f"TCGA-05-{i:04}" for i in range(16)]
    for i, case in enumerate(cases):
        write_slide(root / "slides" / f"{case}-DX1.tiff", i % 2 == 1, rng)
    slides = "".join(f"{case}-DX1,{case}\n" for case in cases)
    (root / "luad" / "metadata" / "slide_metadata.csv").write_text("slide_id,case_id\n" + slides)
    split = "".join(f"{case},{i % 2},{i % 2},{PART[i // 2 % 4]}\n" for i, case in enumerate(cases))
    (root / "splits" / "tcga_luad_tp53_60_15_25_0.csv").write_text("case_id,TP53,label,subset\n" + split)
    return root


def test_one_command_each(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    assert run(["tile", "slides", "--out", "luad/tiles"]) == 0
    embed = ["embed", "--tiles", "luad/tiles", "--slides", "slides", "--encoder", "resnet18", "--random"]
    assert (
        run([*embed, "--out", "luad/features_ctranspath", "--config", "input_size=64", "--device", "cpu"])
        == 0
    )
    small = [
        "--set",
        "train.epochs=30",
        "--set",
        "optim.lr=0.02",
        "--set",
        "train.batch=4",
        "--set",
        "train.repeats=1",
    ]
    assert run(["train", str(CONFIG), *small, "--set", "train.device=cpu"]) == 0
    out = Path("runs/luad_tp53_attnmil")
    best = json.loads((out / "best.json").read_text())
    assert best["test"]["auc"]["mean"] == 1.0
    said = json.loads((out / "run.json").read_text())
    assert said["class_names"] == ["wild type", "mutated"]
    assert said["encoder"] is not None
    capsys.readouterr()
    evaluate = ["evaluate", "--model", str(out / best["models"][0]), "--features", "luad/features_ctranspath"]
    evaluate += ["--cohort", str(out / "cohort.csv"), "--split", "test", "--modes", "remove", "--steps", "9"]
    assert run([*evaluate, "--methods", "random,lrp", "--orders", "3", "--out", str(out / "table2")]) == 0
    assert "2 methods on 4 slides of 4 cases." in capsys.readouterr().out
