"""Extras of a bag go through files: arrays per instance, dense and sparse matrices, edges of graphs."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.sparse
import torch

import xmil
from xmil.core.errors import FileError

RNG = np.random.default_rng(0)
JOINED = (RNG.random((6, 6)) < 0.4).astype(np.float32)
FEATURES = RNG.normal(size=(6, 3)).astype(np.float32)


def dense(values: object) -> np.ndarray:
    return values.toarray() if scipy.sparse.issparse(values) else np.asarray(values)


@pytest.mark.parametrize("sparse", [False, True])
def test_written_extras_are_read_back(tmp_path: Path, sparse: bool) -> None:
    joined = scipy.sparse.csr_array(JOINED) if sparse else JOINED
    bag = xmil.Bag(FEATURES, extras={"adjacency": joined, "stain": np.arange(6)})
    xmil.write_bag(bag, tmp_path / "s.h5")
    back = xmil.read_bag(tmp_path / "s.h5")
    assert scipy.sparse.issparse(back.extras["adjacency"]) is sparse
    np.testing.assert_array_equal(dense(back.extras["adjacency"]), JOINED)
    np.testing.assert_array_equal(back.extras["stain"], np.arange(6))
    some = xmil.read_bag(tmp_path / "s.h5", rows=[4, 1])
    np.testing.assert_array_equal(dense(some.extras["adjacency"]), JOINED[[4, 1]][:, [4, 1]])
    assert some.extras["stain"].tolist() == [4, 1]


def test_graphs_of_others(tmp_path: Path) -> None:
    np.savez(tmp_path / "dense.npz", features=FEATURES, adj=JOINED)
    np.testing.assert_array_equal(xmil.read_bag(tmp_path / "dense.npz").extras["adjacency"], JOINED)
    edges = np.stack(np.nonzero(JOINED))
    torch.save(
        {"x": torch.from_numpy(FEATURES), "edge_index": torch.from_numpy(edges)}, tmp_path / "graph.pt"
    )
    np.savez(tmp_path / "graph.npz", x=FEATURES, edge_index=edges)
    for name in ("graph.npz", "graph.pt"):
        np.testing.assert_array_equal(dense(xmil.read_bag(tmp_path / name).extras["adjacency"]), JOINED)


def test_damage_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "far.npz", x=FEATURES, edge_index=np.array([[0, 9], [1, 2]]))
    with pytest.raises(FileError, match=r"far.npz: 'edge_index' must hold pairs \(2, e\) of rows below 6"):
        xmil.read_bag(tmp_path / "far.npz")
    xmil.write_bag(
        xmil.Bag(FEATURES, extras={"adjacency": scipy.sparse.csr_array(JOINED)}), tmp_path / "s.h5"
    )
    with h5py.File(tmp_path / "s.h5", "a") as file:
        file["extras.indices/adjacency"][0] = 77
    with pytest.raises(FileError, match=r"s.h5: the extra 'adjacency' is damaged"):
        xmil.read_bag(tmp_path / "s.h5")
    with h5py.File(tmp_path / "s.h5", "a") as file:
        del file["extras.indptr/adjacency"]
    with pytest.raises(FileError, match="lacks indptr"):
        xmil.read_bag(tmp_path / "s.h5")
