"""Sources of instances, their pools, and files that are not what they should be."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from xmil.bench import DIGITS, SPLITS, STRENGTH, TASKS, draw_bags, load_instances, read_idx, with_variants
from xmil.core.errors import FileError, InputError, UnknownNameError


def idx_bytes(array):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx(folder, name, n_per_digit, *, packed=False):
    """Images whose first pixel is their digit, with labels, as MNIST's files are named."""
    digits = np.tile(np.arange(DIGITS), n_per_digit)
    images = np.zeros((len(digits), 4, 4), dtype=np.uint8)
    images[:, 0, 0], images[:, 3, 3] = digits, 255
    for kind, array in (("images-idx3", images), ("labels-idx1", digits)):
        data = idx_bytes(array)
        path = folder / f"{name}-{kind}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
    return images, digits


def write_npz(path, *, n_per_digit=10, width=7, without=(), seed=0):
    digits = np.tile([d for d in range(DIGITS) if d not in without], n_per_digit)
    x = np.random.default_rng(seed).normal(size=(len(digits), width)).astype(np.float16)
    np.savez(path, x=x, y=digits)
    return x, digits


@pytest.mark.parametrize("source", ["digits", "onehot"])
def test_embedded_data_has_disjoint_pools_with_every_digit(source):
    data = load_instances(source)
    rows = np.concatenate([data.pools[pool] for pool in SPLITS])
    assert sorted(rows) == list(range(len(data.digits)))
    for pool, share in zip(SPLITS, (0.6, 0.15, 0.25), strict=True):
        assert len(data.pools[pool]) / len(rows) == pytest.approx(share, abs=0.01)
        assert all(len(candidates) for candidates in data.rows_of(pool))
    assert data.embedded


def test_one_pool_reproduces_the_released_code():
    data = load_instances("digits").with_one_pool()
    assert all(sorted(data.pools[pool]) == list(range(1797)) for pool in SPLITS)


def test_pools_follow_their_seed():
    pools = [load_instances("digits", seed=seed).pools["test"] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(pools[0], pools[1])
    assert list(pools[0]) != list(pools[2])


def test_one_hot_vectors_point_at_their_digit():
    data = load_instances("onehot")
    means = np.stack([data.features[data.digits == d].mean(axis=0) for d in range(DIGITS)])
    np.testing.assert_allclose(means, np.eye(DIGITS), atol=0.1)


def test_bags_hold_instances_of_their_digits_from_their_pool():
    data = load_instances("digits")
    drawn = draw_bags(TASKS["four_bags"], data, "test", n_bags=20, n=8, seed=(0, 1, 2))
    np.testing.assert_array_equal(data.digits[drawn.rows], drawn.codes)
    assert set(drawn.rows.ravel()) <= set(data.pools["test"])
    np.testing.assert_array_equal(drawn.labels, TASKS["four_bags"].label(drawn.codes))


def test_marks_are_one_direction_added_to_the_features():
    plain = load_instances("digits")
    marked = with_variants(plain, ("mark",), 3)
    shift = marked.features[len(plain.digits) :] - plain.features
    np.testing.assert_allclose(shift, np.broadcast_to(shift[0], shift.shape), atol=1e-5)
    lengths = np.linalg.norm(plain.features - plain.features.mean(axis=0), axis=1)
    assert np.linalg.norm(shift[0]) == pytest.approx(STRENGTH * lengths.mean(), rel=1e-4)
    drawn = draw_bags(TASKS["confounder"], marked, "train", n_bags=30, n=9, seed=(0,))
    np.testing.assert_array_equal(drawn.rows >= len(plain.digits), drawn.codes >= DIGITS)
    np.testing.assert_array_equal(marked.digits[drawn.rows], drawn.codes % DIGITS)
    assert (marked.images[len(plain.digits) :] != plain.images).any(axis=(1, 2)).all()


def test_one_npz_file_is_split_in_three(tmp_path):
    x, _ = write_npz(tmp_path / "all.npz", n_per_digit=20)
    data = load_instances(tmp_path / "all.npz")
    np.testing.assert_array_equal(data.features, x.astype(np.float32))
    assert [len(data.pools[pool]) for pool in SPLITS] == [120, 30, 50]
    assert not data.embedded


def test_a_folder_keeps_the_test_file_apart(tmp_path):
    write_npz(tmp_path / "f_test.npz", n_per_digit=3, seed=1)
    x, _ = write_npz(tmp_path / "f_train.npz", n_per_digit=10)
    data = load_instances(tmp_path)
    assert [len(data.pools[pool]) for pool in SPLITS] == [80, 20, 30]
    assert data.pools["test"].min() == 100
    np.testing.assert_array_equal(data.features[:100], x.astype(np.float32))


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_become_pixels(tmp_path, packed):
    images, _ = write_idx(tmp_path, "train", 10, packed=packed)
    test_images, _ = write_idx(tmp_path, "t10k", 2, packed=packed)
    data = load_instances(tmp_path)
    assert data.features.shape == (120, 16)
    np.testing.assert_array_equal(data.images, np.concatenate([images, test_images]))
    np.testing.assert_allclose(data.features[:, 0] * 255, data.digits, atol=1e-4)
    assert data.pools["test"].min() == 100


def test_one_idx_file_is_split_in_three(tmp_path):
    images, _ = write_idx(tmp_path, "train", 20)
    data = load_instances(tmp_path)
    assert [len(data.pools[pool]) for pool in SPLITS] == [120, 30, 50]
    np.testing.assert_array_equal(data.images, images)


IMAGES = idx_bytes(np.zeros((10, 2, 2)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an IDX file"),
        (b"PK\x03\x04" + bytes(20), "not an IDX file"),
        (IMAGES[:2] + b"\x0d" + IMAGES[3:], "type 0x0d"),
        (IMAGES[:9], "truncated within the header"),
        (IMAGES[:-1], "declares 40 bytes, but only 39 follow"),
        (IMAGES + b"!", "declares 40 bytes, but more follow"),
        (gzip.compress(IMAGES, mtime=0)[:-9], "cannot be read"),
    ],
)
def test_corrupt_idx_files_are_refused(tmp_path, data, message):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(data)
    with pytest.raises(FileError, match=message) as error:
        read_idx(path)
    assert str(path) in str(error.value)


def test_idx_labels_that_do_not_fit_are_refused(tmp_path):
    write_idx(tmp_path, "train", 3)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.zeros(29)))
    with pytest.raises(FileError, match="do not match"):
        load_instances(tmp_path)
    labels.write_bytes(idx_bytes(np.full(30, 10)))
    with pytest.raises(FileError, match=r"digits from 0 to 9\. Got 10"):
        load_instances(tmp_path)
    labels.unlink()
    with pytest.raises(FileError, match=r"labels-idx1-ubyte: no such file"):
        load_instances(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 2))}, "needs the arrays"),
        ({"x": np.zeros(3), "y": np.zeros(3)}, "must be"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, "must be"),
        ({"x": np.full((3, 2), np.nan), "y": np.zeros(3)}, "not finite"),
        ({"x": np.zeros((3, 2)), "y": np.full(3, 10)}, "digits from 0 to 9"),
        ({"x": np.array([{}]), "y": np.zeros(1)}, "not a readable .npz"),
    ],
)
def test_bad_npz_files_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "f.npz", **arrays)
    with pytest.raises(FileError, match=message):
        load_instances(tmp_path / "f.npz")


def test_paths_that_are_no_data_are_refused(tmp_path):
    (tmp_path / "f.npz").write_bytes(b"PK\x03\x04 not a zip")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    for name in ("f.npz", "array.npz"):
        with pytest.raises(FileError, match="not a readable"):
            load_instances(tmp_path / name)
    with pytest.raises(FileError, match="no such file"):
        load_instances(tmp_path / "g.npz")
    with pytest.raises(FileError, match=r"no such data\. Data must be 'digits'"):
        load_instances("digit")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match=r"neither \.npz files"):
        load_instances(tmp_path / "empty")
    with pytest.raises(UnknownNameError, match="Did you mean 'pixels'"):
        load_instances("digits", encoder="pixel")


def test_widths_that_differ_and_two_training_files_are_refused(tmp_path):
    write_npz(tmp_path / "a_train.npz", width=7)
    write_npz(tmp_path / "a_test.npz", width=8)
    with pytest.raises(InputError, match="width 7, test features 8; use one encoder"):
        load_instances(tmp_path)
    write_npz(tmp_path / "b_train.npz")
    with pytest.raises(FileError, match=r"needs one file named \*train\*"):
        load_instances(tmp_path)


def test_a_digit_without_images_is_refused(tmp_path):
    write_npz(tmp_path / "f.npz", without=(7,))
    with pytest.raises(InputError, match="the train pool has no images of 7"):
        load_instances(tmp_path / "f.npz").rows_of("train")
