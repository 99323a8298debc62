"""Models as folders that hubs know: written, read back, also once another tool has saved the weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import xmil


def test_a_folder_comes_back(tmp_path: Path) -> None:
    model = xmil.create_model("attnmil", in_dim=6, n_classes=2, class_names=["benign", "tumour"], seed=1)
    folder = tmp_path / "my-model"
    xmil.save_model(model, f"{folder}/")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {"0": "benign", "1": "tumour"}
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: xmil\n")
    assert "| outputs | benign, tumour |" in card
    x = torch.randn(1, 5, 6)
    plain = load_file(folder / "model.safetensors")
    save_file(plain, folder / "model.safetensors")  # as others do: without our header
    for loaded in (xmil.load_model(folder), xmil.load_model(folder / "model.safetensors")):
        assert loaded.spec == model.spec
        assert torch.equal(loaded(x), model(x))


def test_a_card_of_yours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    xmil.save_model(xmil.create_model("meanpool", in_dim=3, n_classes=2), tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
