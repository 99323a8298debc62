"""The colon benchmark in little: real nuclei, a random encoder, two models, every row of the table."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="the colon images need pillow")

from benchmarks.colon.__main__ import tables
from benchmarks.colon.bags import ColonBag, folds, read_bags
from benchmarks.colon.features import embed, patches
from benchmarks.colon.measure import measure

from xmil.bench import CELLS, nuclei
from xmil.nn import ResNet


def test_nuclei_are_those_described(data_dir):
    tables = nuclei(data_dir / "colon")
    cells = np.concatenate([cells for _, cells in tables.values()])
    counts = dict(zip(CELLS, np.bincount(cells).tolist(), strict=True))
    assert counts == {"epithelial": 7722, "inflammatory": 6971, "fibroblast": 5712, "others": 2039}
    labels = [int((cells == 0).any()) for _, cells in tables.values()]
    assert (len(labels), sum(labels)) == (100, 51)


def test_patches_are_centred_on_the_nucleus(data_dir):
    image = data_dir / "colon" / "img1.jpg"
    near, corner = patches(image, np.array([[100.0, 200.0], [0.0, 0.0]]), patch=8, edge=8)
    moved = patches(image, np.array([[102.0, 200.0]]), patch=8, edge=8)[0]
    torch.testing.assert_close(near[:, :, 2:], moved[:, :, :-2])
    assert torch.isfinite(corner).all()


def test_labels_and_evidence():
    bag = ColonBag("x", torch.zeros(5, 2), np.array([0, 0, 1, 1, 1]))
    assert (bag.label("epithelial"), bag.label("balance")) == (1, 0)
    assert bag.evidence("epithelial").tolist() == [1, 1, 0, 0, 0]
    assert bag.evidence("balance").tolist() == [1, 1, -1, -1, -1]


def test_folds_hold_each_bag_once():
    bags = [ColonBag(str(i), torch.zeros(1, 2), np.array([i % 2])) for i in range(23)]
    found = folds(bags, "epithelial", seed=3)
    assert sorted(np.concatenate(found).tolist()) == list(range(23))
    assert all(0 < np.mean([bags[i].label("epithelial") for i in rows]) < 1 for rows in found)


@pytest.mark.parametrize("name", ["attnmil", "addmil"])
def test_a_tiny_run(data_dir, tmp_path, monkeypatch, name):
    every = nuclei(data_dir / "colon")
    sized = [k for k, (_, cells) in every.items() if 8 <= len(cells) <= 120]
    sides = [[k for k in sized if (every[k][1] == 0).any() == side] for side in (True, False)]
    small = sides[0][:6] + sides[1][:6]
    monkeypatch.setattr("benchmarks.colon.features.nuclei", lambda folder: {k: every[k] for k in small})
    torch.manual_seed(0)
    arrays = embed(ResNet("resnet18").eval(), data_dir / "colon", patch=32, edge=32)
    np.savez(tmp_path / "features.npz", **arrays)
    bags = read_bags(tmp_path / "features.npz")
    assert sum(len(bag.cells) for bag in bags) == len(arrays["cells"])
    found = measure(name, bags, "epithelial", run=0, thorough=True, epochs=2, steps=10)
    assert 0 <= found["auroc"] <= 1
    assert "lrp" in found["rows"]
    assert ("logits" in found["rows"]) == (name == "addmil")
    text = tables([json.loads(json.dumps(found))])
    assert f"| {name} | lrp |" in text
