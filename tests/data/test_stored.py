"""Features in the type they are stored in: the same numbers, explanations and checks as widened ones."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

import xmil
from xmil.core.bag import StoredBag
from xmil.core.errors import FileError
from xmil.data.bags import named


def stored(path: Path, values: np.ndarray, **options: object) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("features", data=values, **options)
        coords = file.create_dataset("coords", data=np.arange(2 * values.shape[-2]).reshape(-1, 2) * 256)
        coords.attrs["patch_size_level0"] = 256
    return path


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f2", "int8"])
@pytest.mark.parametrize("options", [{}, {"chunks": (5, 8), "compression": "gzip"}])
@pytest.mark.parametrize("shape", [(20, 8), (1, 20, 8)])
def test_any_layout_gives_the_same_numbers(tmp_path: Path, dtype: str, options: dict, shape: tuple) -> None:
    values = (np.random.default_rng(0).standard_normal(shape) * 9).astype(dtype)
    chunked = {**options, "chunks": (*shape[:-2], 5, 8)} if options else {}
    path = stored(tmp_path / "s.h5", values, **chunked)
    bag, plain = xmil.open_bag(path).read_stored(), xmil.read_bag(path)
    assert isinstance(bag, StoredBag)
    kept = not options and len(shape) == 2 and dtype in ("float16", "float32")
    assert bag.stored.dtype == (dtype if kept else "float32")
    assert (len(bag), bag.dim, repr(bag)) == (20, 8, repr(plain))
    other = named(bag, "another")
    assert (other.slide_id, bag.slide_id) == ("another", plain.slide_id)
    model = xmil.create_model("attnmil", in_dim=8, n_classes=2, seed=0)
    ours, expected = (xmil.explain(model, one, method="lrp") for one in (other, plain))
    np.testing.assert_array_equal(ours.scores, expected.scores)
    assert "features" not in bag.__dict__  # never widened on the way
    np.testing.assert_array_equal(bag.features, plain.features)


def test_features_are_read_into_memory_of_the_callers(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((20, 8)).astype("float16")
    made: list[np.ndarray] = []

    def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        made.append(np.empty(shape, dtype))
        return made[0]

    bag = xmil.open_bag(stored(tmp_path / "s.h5", values)).read_stored(empty)
    assert isinstance(bag, StoredBag)
    assert bag.stored is made[0]
    np.testing.assert_array_equal(made[0], values)


def test_a_file_cut_off_after_it_was_opened_is_named(tmp_path: Path) -> None:
    path = stored(tmp_path / "s.h5", np.ones((5000, 64), "float16"))
    header = xmil.open_bag(path)
    path.write_bytes(path.read_bytes()[:200_000])
    with pytest.raises(FileError, match=r"s\.h5: "):
        header.read_stored()
