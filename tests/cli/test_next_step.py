"""`inspect` over several paths: what does not go together is a problem, no command that fails is named."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

import xmil
from tests.cli.test_cli import run


def features(root: Path, name: str, width: int) -> Path:
    root.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    bag = xmil.Bag(rng.normal(size=(5, width)), coords=rng.integers(0, 99, (5, 2)), slide_id=name)
    xmil.write_bag(bag, root / f"{name}.h5")
    return root


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    xmil.save_model(xmil.create_model("attnmil", in_dim=6, n_classes=2, dim=8, seed=0), path)
    return path


def test_features_of_the_models_width_are_chosen(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, right = features(tmp_path / "wrong", "a", 4), features(tmp_path / "right", "a", 6)
    _, out, _ = run("inspect", wrong, right, model, capsys=capsys)
    assert f"the features have width 4, but {model} reads 6" in out
    assert out.endswith(f"Next: xmil explain --model {model} --features {right} --out run\n")
    _, out, _ = run("inspect", wrong, model, capsys=capsys)
    assert "have width 4" in out
    assert "Next:" not in out


def test_slides_of_other_names_are_a_problem(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, slides = features(tmp_path / "features", "a", 6), tmp_path / "slides"
    slides.mkdir()
    Image.new("RGB", (64, 64), "white").save(slides / "b.png")
    _, out, _ = run("inspect", given, model, slides, capsys=capsys)
    assert "no slide has the name of a feature file (b is a slide, a has features)" in out
    assert "--slides" not in out
    Image.new("RGB", (64, 64), "white").save(slides / "a.png")
    _, out, _ = run("inspect", given, model, slides, capsys=capsys)
    assert "no slide has" not in out
    assert f"--slides {slides}" in out


def test_features_that_cannot_be_explained_lead_nowhere(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = features(tmp_path, "a", 6) / "a.h5"
    with h5py.File(path, "a") as file:
        file["features"][0, 0] = np.nan
    _, out, _ = run("inspect", path, model, capsys=capsys)
    assert "nothing can be explained" in out
    assert "Next:" not in out


def test_random_weights_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = features(tmp_path, "a", 6) / "a.h5"
    with h5py.File(path, "a") as file:
        about = {"extra": {"encoder": {"name": "resnet18", "weights": "random"}}}
        file.attrs["xmil"] = json.dumps({**json.loads(file.attrs.get("xmil", "{}")), **about})
        file["features"].attrs["encoder"] = "resnet18"
    _, out, _ = run("inspect", path, capsys=capsys)
    assert "resnet18 (random weights)" in out
