"""Interaction indices against the formula, written out slowly."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from tests.methods.test_shapley import bag_of, model_of, value_of
from xmil.core.errors import FileError, InputError


def by_formula(value: object, players: list[tuple[int, ...]], i: int, j: int) -> float:
    """The mean over sizes, then over sets of a size, of what i and j add together."""
    others = [k for k in range(len(players)) if k not in (i, j)]

    def v(*chosen: int) -> float:
        return value(tuple(row for k in chosen for row in players[k]))

    means = []
    for size in range(len(others) + 1):
        sets = list(combinations(others, size))
        means.append(np.mean([v(*s, i, j) - v(*s, i) - v(*s, j) + v(*s) for s in sets]))
    return float(np.mean(means))


@pytest.mark.parametrize("name", ["attnmil", "transmil", "maxpool", "addmil"])
def test_enumeration_is_the_formula(name: str) -> None:
    model, bag = model_of(name), bag_of(5)
    found = xmil.interactions(model, bag, target=1)
    value = value_of(model, bag)
    singles = [(i,) for i in range(5)]
    assert sorted(map(tuple, found.pairs)) == list(combinations(range(5), 2))
    for (i, j), index, alone in zip(found.pairs, found.values, found.alone, strict=True):
        assert index == pytest.approx(by_formula(value, singles, i, j), abs=1e-5)
        assert alone == pytest.approx(value((i, j)) - value((i,)) - value((j,)) + value(()), abs=1e-5)
    assert (np.diff(np.abs(found.values)) <= 0).all()


def test_groups_are_players() -> None:
    model, bag = model_of("transmil"), bag_of(7)
    labels = np.array(["b", "a", "c", "a", "b", "c", "c"])
    found = xmil.interactions(model, bag, target=1, groups=labels)
    assert found.names == ("a", "b", "c")
    players = [tuple(np.flatnonzero(labels == name)) for name in found.names]
    for (i, j), index in zip(found.pairs, found.values, strict=True):
        assert index == pytest.approx(by_formula(value_of(model, bag), players, i, j), abs=1e-5)
    assert set(found.to_pandas()["first"]) <= set("abc")


@pytest.mark.parametrize("name", ["attnmil", "meanpool", "maxpool", "dsmil"])
def test_samples_agree_with_enumeration(name: str) -> None:
    model, bag = model_of(name), bag_of(9)
    truth = xmil.interactions(model, bag, target=1)
    found = xmil.interactions(model, bag, target=1, exact=False, precision=None, draws=400, seed=1)
    expected = {tuple(pair): value for pair, value in zip(truth.pairs, truth.values, strict=True)}
    errors = [value - expected[tuple(pair)] for pair, value in zip(found.pairs, found.values, strict=True)]
    assert (np.abs(errors) <= 3.5 * found.stderr).all()
    np.testing.assert_allclose(
        np.sort(found.alone), np.sort(truth.alone), atol=1e-5
    )  # the pair alone needs no draws


def test_many_groups_can_be_sampled() -> None:
    model, bag, labels = model_of("attnmil"), bag_of(12), np.arange(12) // 2
    truth = xmil.interactions(model, bag, target=1, groups=labels)
    found = xmil.interactions(model, bag, target=1, groups=labels, exact=False, precision=None, draws=300)
    expected = {tuple(pair): value for pair, value in zip(truth.pairs, truth.values, strict=True)}
    errors = [value - expected[tuple(pair)] for pair, value in zip(found.pairs, found.values, strict=True)]
    assert (np.abs(errors) <= 3.5 * found.stderr).all()


class SumPool(nn.Module):
    """No interaction by construction: logits are sums over instances, and a zero vector adds nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.a = nn.Parameter(torch.randn(6, 8, generator=rng))
        self.b = nn.Parameter(torch.randn(8, 2, generator=rng))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.a).tanh() @ self.b).sum(dim=1)


@pytest.mark.parametrize("n", [8, 14])
def test_a_sum_has_no_interactions(n: int) -> None:
    beyond = []
    for seed in range(3):
        found = xmil.interactions(SumPool(seed), bag_of(n), target=1, precision=None, draws=32)
        beyond += list(found.sure)
        assert np.abs(found.values).max() < 1e-5
    assert np.mean(beyond) <= 0.05


class Partners(nn.Module):
    """Speaks only where both the first and the second feature are in the bag."""

    def forward(self, x: Tensor) -> Tensor:
        z = x[..., 0].amax(dim=1) * x[..., 1].amax(dim=1)
        return torch.stack([-z, z], dim=1)


def test_true_partners_come_first_and_with_their_sign() -> None:
    x = torch.zeros(16, 6)
    x[3, 0] = x[7, 1] = 1.0
    found = xmil.interactions(Partners(), x, target=1, draws=200)
    assert found.pairs[0].tolist() == [3, 7]
    assert found.values[0] == pytest.approx(1.0)  # in every company
    assert np.abs(found.values[1:]).max() < 1e-6
    assert xmil.interactions(Partners(), x, target=0, draws=16).values[0] == pytest.approx(-1.0)


def test_pairs_are_among_the_strongest() -> None:
    model, bag = model_of("attnmil"), bag_of(30)
    found = xmil.interactions(model, bag, target=1, top=4, precision=0.5)
    scores = xmil.explain(model, bag, method="lrp", target=1).scores
    assert set(found.pairs.ravel()) == set(np.argsort(-np.abs(scores))[:4])
    assert len(found) == 6
    given = xmil.interactions(model, bag, target=1, top=2, by=np.arange(30), precision=0.5)
    assert given.pairs.tolist() == [[28, 29]]
    held = xmil.explain(model, xmil.Bag(bag.numpy(), slide_id="s1"), target=1)
    same = xmil.interactions(model, bag, target=1, top=4, by=held, precision=0.5)
    assert set(same.pairs.ravel()) == set(found.pairs.ravel())
    with pytest.raises(InputError, match="of the bag 's1'"):
        xmil.interactions(model, xmil.Bag(bag.numpy(), slide_id="s2"), top=4, by=held)
    for wrong in (np.arange(29), None, ["a"] * 30):
        with pytest.raises(InputError, match=r"'by' parameter of interactions must be .* or 30 scores"):
            xmil.interactions(model, bag, target=1, top=4, by=wrong)


def test_saved_placed_and_read_again(tmp_path: Path) -> None:
    features, coords = bag_of(5).numpy(), np.arange(10).reshape(5, 2) * 100
    bag = xmil.Bag(features, coords=coords, patch_size=100, slide_id="s")
    found = xmil.interactions(model_of("attnmil"), bag, target=1)
    first, second = found.pairs[0]
    assert found.lines()[0].tolist() == [*(coords[first] + 50), *(coords[second] + 50)]
    found.save(tmp_path / "i.parquet")
    again = xmil.Interactions.load(tmp_path / "i.parquet")
    assert again.to_pandas().equals(found.to_pandas())
    assert (again.target, again.output, again.bag, again.patch_size) == (1, found.output, "s", 100)
    groups = xmil.interactions(model_of("attnmil"), bag, target=1, groups=[0, 1, 1, 0, 2])
    groups.save(tmp_path / "g.parquet")
    assert xmil.Interactions.load(tmp_path / "g.parquet").names == ("0", "1", "2")
    with pytest.raises(InputError, match="no places"):
        groups.lines()


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    xmil.explain(model_of("attnmil"), bag_of(5), target=1).save(tmp_path / "e.parquet")
    (tmp_path / "t.parquet").write_text("text")
    for name, words in (("e", "holds no interactions"), ("t", "not a readable"), ("none", "no such file")):
        with pytest.raises(FileError, match=words):
            xmil.Interactions.load(tmp_path / f"{name}.parquet")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"top": 1}, "'top' parameter of interactions"),
        ({"draws": 1}, "'draws' parameter of interactions"),
        ({"precision": -1}, "'precision' parameter of interactions"),
        ({"exact": True}, "'exact' parameter of interactions"),
        ({"groups": [0, 1]}, "'groups' parameter of interactions"),
        ({"groups": np.zeros(21)}, "two groups or more"),
    ],
)
def test_bad_parameters(params: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        xmil.interactions(model_of("attnmil"), bag_of(21), target=1, **params)


def test_a_lone_instance_has_no_pairs() -> None:
    with pytest.raises(InputError, match="two patches or more"):
        xmil.interactions(model_of("attnmil"), bag_of(1), target=1)


def test_a_shortfall_of_precision_is_said() -> None:
    found = xmil.interactions(model_of("attnmil"), bag_of(20), target=1, precision=1e-7, draws=20)
    assert "above the precision of 1e-07" in found.warnings[0]
