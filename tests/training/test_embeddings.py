"""A probe trained on slide embeddings by `xmil train`, explained down to patches."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from tests.training.cohorts import D, settings, write_cohort
from xmil.cli._app import run
from xmil.core.errors import FileError
from xmil.training.config import dumps

E = 5


class Encoder(nn.Module):
    """A slide encoder: the mean of embedded patches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(D, E)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x)).mean(dim=1)


def embed(folder: Path, encoder: nn.Module) -> None:
    """One vector a slide, as HDF5, .npy and .pt files in turn."""
    (folder / "slides").mkdir()
    for i, path in enumerate(sorted((folder / "features").iterdir())):
        with torch.no_grad():
            vector = encoder(torch.from_numpy(xmil.read_bag(path).features)[None])[0]
        target = folder / "slides" / path.stem
        if i % 3 == 0:
            with h5py.File(f"{target}.h5", "w") as file:
                file["features"] = vector.numpy()
        elif i % 3 == 1:
            np.save(f"{target}.npy", vector.numpy())
        else:
            torch.save(vector, f"{target}.pt")


def test_from_embeddings_to_patches(tmp_path: Path) -> None:
    folder, encoder = write_cohort(tmp_path, n=30), Encoder().eval()
    embed(folder, encoder)
    made = settings(folder)
    del made["model"]
    made["data"]["features"] = str(folder / "slides")
    made["train"]["epochs"] = 30
    made["optim"]["lr"] = 0.1
    (folder / "config.toml").write_text(dumps(made))
    assert run(["train", str(folder / "config.toml"), "--set", "data.source=embeddings"]) == 0
    (path,) = (folder / "out").rglob("*.safetensors")
    probe = xmil.load_model(path)
    assert probe.spec.name == "meanpool"
    assert sum(p.numel() for p in probe.parameters()) == 2 * E + 2  # linear
    model = xmil.chain(encoder, probe)
    right = []
    for case in range(30):
        bag = xmil.read_bag(folder / "features" / f"s{case}.h5")
        e = xmil.explain(model, bag, method="lrp")
        assert abs(e.audit.other) < 1e-4
        with torch.no_grad():
            logits = probe(encoder(torch.from_numpy(bag.features)[None])[None])[0]
        np.testing.assert_allclose(e.logits, logits.numpy(), atol=1e-6)
        right.append(str(e.target) == ("neg", "pos")[case % 2])
    assert np.mean(right) > 0.7


def test_patch_features_are_no_embeddings(tmp_path: Path) -> None:
    np.save(tmp_path / "s.npy", np.zeros((4, 3), np.float32))
    with pytest.raises(FileError, match=r"shape \(4, 3\)"):
        xmil.read_bag(tmp_path / "s.npy", format="embedding")
    np.savez(tmp_path / "t.npz", other=np.zeros(3, np.float32))
    with pytest.raises(FileError, match=r"holds no slide embedding; it holds other \(3,\)"):
        xmil.read_bag(tmp_path / "t.npz", format="embedding")
    np.save(tmp_path / "u.npy", np.zeros(3, np.float32))
    with pytest.raises(FileError, match="slide-level embedding"):  # never by itself
        xmil.read_bag(tmp_path / "u.npy")
