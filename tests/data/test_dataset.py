"""Bags for training: draws from a seed, whole bags, caps that report, filters, preloading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

import xmil
from tests.data import producers as p
from xmil.data.dataset import BagDataset, EpochSampler, InstanceFilter, collate


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = []
    for i, n in enumerate([50, 8, 200]):
        bag = xmil.Bag(np.arange(n * 4, dtype=np.float32).reshape(n, 4) + 10_000 * i, slide_id=f"s{i}")
        xmil.write_bag(bag, tmp_path / f"s{i}.h5")
        found.append(tmp_path / f"s{i}.h5")
    return found


def test_draws_differ_by_epoch_repeat_by_seed_and_keep_the_order(paths: list[Path]) -> None:
    data = BagDataset(paths, [0, 1, 0], draw=16, seed=3)
    first, again, later = data[0, 2].bag.features, data[0, 2].bag.features, data[1, 2].bag.features
    np.testing.assert_array_equal(first, again)
    assert first.shape == (16, 4)
    assert not np.array_equal(first, later)
    assert np.all(np.diff(first[:, 0]) > 0)
    assert not np.array_equal(first, BagDataset(paths, [0, 1, 0], draw=16, seed=4)[0, 2].bag.features)
    assert len(data[0, 1].bag) == 8  # fewer than drawn: all of them


def test_every_instance_is_drawn_over_the_epochs(paths: list[Path]) -> None:
    data = BagDataset(paths, [0, 1, 0], draw=16)
    seen = {float(x) for epoch in range(60) for x in data[epoch, 0].bag.features[:, 0]}
    assert len(seen) == 50


def test_whole_bags_without_draw(paths: list[Path]) -> None:
    data = BagDataset(paths, [0, 1, 0])
    assert [len(data[i].bag) for i in range(3)] == [50, 8, 200]
    assert data[-1].bag.slide_id == "s2"
    with pytest.raises(IndexError):
        data[3]


def test_the_cap_reports_what_it_leaves_out(paths: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    data = BagDataset(paths, [0, 1, 0], max_instances=40)
    assert [(out.slide_id, out.instances, out.kept) for out in data.left_out] == [
        ("s0", 10, 40),
        ("s2", 160, 40),
    ]
    assert "max_instances=40 leaves out 170 patches of 2 slides of 3." in caplog.text
    np.testing.assert_array_equal(data[0].bag.features, data[5, 0].bag.features)  # the same in every epoch


def test_preload_stays_within_its_limit(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    limit = (50 + 8) * 4 * 4
    data = BagDataset(paths, [0, 1, 0], draw=6, preload=limit)
    assert sorted(data._bags) == [0, 1]
    lazy = BagDataset(paths, [0, 1, 0], draw=6)
    for row in range(3):
        np.testing.assert_array_equal(data[4, row].bag.features, lazy[4, row].bag.features)


def test_instances_are_filtered_by_annotation(tmp_path: Path) -> None:
    path = p.paper(tmp_path)
    kept = BagDataset([path], [0], instances=InstanceFilter(has=("annotation:1",)))[0].bag
    np.testing.assert_array_equal(kept.features, p.features()[1::2])
    np.testing.assert_array_equal(kept.boxes(), p.BOXES[1::2])
    rest = BagDataset([path], [0], instances=InstanceFilter(lacks=("annotation:1",)), draw=2)[0].bag
    assert set(rest.columns["annotation:1"]) == {0.0}
    with pytest.raises(xmil.XmilError, match="Did you mean 'annotation:1'"):
        BagDataset([path], [0], instances=InstanceFilter(has=("annotations:1",)))


def test_widths_must_agree(tmp_path: Path, paths: list[Path]) -> None:
    np.save(tmp_path / "wide.npy", np.zeros((3, 7), np.float32))
    with pytest.raises(xmil.XmilError, match=r"has width 7 but .* has 4"):
        BagDataset([*paths, tmp_path / "wide.npy"], [0, 1, 0, 1])


@pytest.mark.parametrize(("name", "value"), [("draw", 0), ("max_instances", -1), ("draw", 2.5)])
def test_bad_parameters(paths: list[Path], name: str, value: float) -> None:
    with pytest.raises(xmil.XmilError, match=f"The '{name}' parameter of BagDataset must be"):
        BagDataset(paths, [0, 1, 0], **{name: value})
    with pytest.raises(xmil.XmilError, match="3 bags but 2 targets"):
        BagDataset(paths, [0, 1])


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_do_not_change_the_draw(paths: list[Path], workers: int) -> None:
    data = BagDataset(paths, [0, 1, 0], draw=6, seed=1)
    sampler = EpochSampler(len(data), seed=1)
    sampler.set_epoch(7)
    loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=workers, collate_fn=collate)
    batches = list(loader)
    order = [row for _, row in sampler]
    expected = [data[7, row].bag.features for row in order]
    got = [features.numpy() for batch in batches for features in batch[0]]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert [name for batch in batches for name in batch[2]] == [f"s{row}" for row in order]


def test_the_order_changes_with_the_epoch() -> None:
    sampler = EpochSampler(50, seed=0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert [row for _, row in first] != [row for _, row in sampler]
    assert sorted(row for _, row in first) == list(range(50))
