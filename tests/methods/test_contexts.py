"""Scores averaged over sub-bags, against the mean written out, and their standard errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError, UnknownNameError
from xmil.methods.explain import deal

WIDTH = 6


def model_of(name: str) -> nn.Module:
    small = {"transmil": {"dim": 16}, "attnmil": {"dim": 8, "attention_dim": 4}, "addmil": {"hidden": 8}}
    return xmil.create_model(name, in_dim=WIDTH, n_classes=2, seed=2, **small.get(name, {}))


def bag_of(n: int) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), keep=st.floats(0.05, 1.0), extra=st.integers(0, 9), seed=st.integers(0, 99))
def test_every_instance_is_in_two_sub_bags_or_more(n: int, keep: float, extra: int, seed: int) -> None:
    hands = deal(n, contexts=int(np.ceil(2 / keep)) + extra, keep=keep, seed=seed)
    counts = np.bincount(np.concatenate(hands), minlength=n)
    assert counts.min() >= 2
    assert counts.max() - counts.min() <= 1
    assert {len(hand) for hand in hands} == {int(np.ceil(keep * n - 1e-9))}
    assert all((np.diff(hand) > 0).all() for hand in hands)


def test_halves_are_complementary() -> None:
    hands = deal(12, contexts=8, keep=0.5, seed=3)
    for first, second in zip(hands[::2], hands[1::2], strict=True):
        assert sorted([*first, *second]) == list(range(12))


def test_hands_do_not_come_back() -> None:
    """Where decks do not come out even: hands two apart share no more than two random ones do."""
    hands = deal(31, contexts=600, keep=0.5, seed=2)
    shared = [len(np.intersect1d(a, b)) for a, b in zip(hands, hands[2:], strict=False)]
    assert np.mean(shared) < 1.05 * 16 * 16 / 31


def test_standard_errors_are_honest() -> None:
    """Intervals at 95 % hold the mean over very many sub-bags in 90 to 98 % of cases, in odd bags, too."""
    model, bag = model_of("attnmil"), bag_of(31)
    truth = xmil.explain(model, bag, target=1, contexts=1000, seed=99).scores
    held = []
    for seed in range(20):
        e = xmil.explain(model, bag, target=1, contexts=24, seed=seed)
        assert e.stderr is not None
        held.append(np.abs(e.scores - truth) <= stats.t.ppf(0.975, 11) * e.stderr)
    assert 0.9 <= np.mean(held) <= 0.98


def test_intervals_hold_where_rare_sub_bags_decide(tmp_path: Path) -> None:
    """Narrow attention: most scores are near zero but in the few sub-bags that lack the strongest patches."""
    model, bag = xmil.create_model("attnmil", in_dim=WIDTH, n_classes=2, seed=2), bag_of(20)
    with torch.no_grad():
        for layer in (model.attention.V, model.attention.w):
            layer.weight.mul_(10)
    truth = xmil.explain(model, bag, target=1, contexts=1000, seed=99).scores
    plain, held = [], []
    for seed in range(20):
        e = xmil.explain(model, bag, target=1, contexts=24, seed=seed)
        low, high = e.interval()
        plain.append(np.abs(e.scores - truth) <= stats.t.ppf(0.975, 11) * e.stderr)
        held.append((low <= truth) & (truth <= high))
    assert np.mean(plain) < 0.9 <= np.mean(held) <= 0.98
    e.save(tmp_path / "e.parquet")
    np.testing.assert_allclose(xmil.Explanation.load(tmp_path / "e.parquet").interval()[0], low, rtol=1e-5)


def test_an_interval_is_the_formula() -> None:
    e = xmil.explain(model_of("transmil"), bag_of(10), contexts=9, keep=0.4)  # four patches in each
    assert e.stderr is not None
    joined = (2 * e.stderr**2 + 0.01 * np.mean(e.stderr**2)) / 2.01  # three sub-bags hold each, at the least
    np.testing.assert_allclose(
        e.interval(0.8)[1], e.scores + stats.t.ppf(0.9, 2) * np.sqrt(joined), rtol=1e-5
    )
    with pytest.raises(InputError, match=r"'level' parameter of Explanation\.interval"):
        e.interval(1.0)
    with pytest.raises(InputError, match="no standard errors; pass `contexts=24`"):
        xmil.explain(model_of("transmil"), bag_of(10)).interval()


@pytest.mark.parametrize("method", ["lrp", "ig", "gxi"])
@pytest.mark.parametrize("name", ["attnmil", "transmil"])
def test_mean_and_standard_error_are_the_formula(name: str, method: str) -> None:
    model, bag, n = model_of(name), bag_of(11), 11
    own = {"steps": 8} if method == "ig" else {}
    e = xmil.explain(model, bag, method=method, target=1, contexts=8, keep=0.4, seed=5, **own)
    held: list[list[float]] = [[] for _ in range(n)]
    audits = []
    for rows in deal(n, contexts=8, keep=0.4, seed=5):
        part = xmil.explain(model, bag[rows], method=method, target=1, **own)
        audits.append(part.audit)
        for i, score in zip(rows, part.scores, strict=True):
            held[i].append(float(score))
    m = np.array([len(values) for values in held])
    mean = np.array([np.mean(values) for values in held])
    stderr = np.array([np.std(values, ddof=1) for values in held]) / np.sqrt(m)
    assert e.stderr is not None
    np.testing.assert_allclose(e.scores, mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(e.stderr, stderr, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(e.stable, np.abs(mean) > stats.t.ppf(0.975, m - 1) * stderr)
    assert e.output == pytest.approx(float(model(bag[None])[0, 1].detach()), abs=1e-6)
    (said,) = (line for line in e.warnings if "sub-bags of" in line)
    assert "means over 8 sub-bags of 5 patches" in said
    assert "compare the ranking" in said
    assert ("their sum is about 2.2 times audit.instances" in said) == (method != "gxi")
    if method == "gxi":
        assert e.audit is None
    else:
        assert e.audit is not None
        assert e.audit.bias == pytest.approx(np.mean([a.bias for a in audits if a]), abs=1e-6)
        assert e.audit.output == pytest.approx(np.mean([a.output for a in audits if a]), abs=1e-6)


def test_the_warning_says_what_the_scores_add_up_to() -> None:
    e = xmil.explain(model_of("attnmil"), bag_of(10), target=1, contexts=4, keep=0.5)  # each patch in two
    assert e.audit is not None
    assert float(e.scores.sum()) == pytest.approx(2 * e.audit.instances, abs=1e-5)
    assert "sum is about 2 times audit.instances" in e.warnings[0]


def test_the_target_is_that_of_the_full_bag() -> None:
    model = model_of("transmil")
    bag = bag_of(9)
    e = xmil.explain(model, bag, contexts=6)
    assert int(e.target) == int(model(bag[None]).argmax())
    both = xmil.explain_classes(model, bag, contexts=6)
    np.testing.assert_allclose(both[int(e.target)].scores, e.scores, atol=1e-6)


def test_companions_travel_into_sub_bags() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(WIDTH, 2)

    def forward(net: Placed, x: Tensor, *, coords: Tensor) -> Tensor:
        if x.detach().any():  # not the empty bag: each instance with its own place
            assert torch.equal(coords[0, :, 0], x.detach()[0, :, 0].round().long())
        return net.read(x).mean(dim=1)

    features = torch.randn(8, WIDTH)
    features[:, 0] = torch.arange(8)
    bag = xmil.Bag(features.numpy(), coords=np.stack([np.arange(8)] * 2, axis=1))
    e = xmil.explain(Placed(), bag, target=1, forward=forward, contexts=6)
    assert e.stderr is not None
    xmil.explain(Placed(), bag, target=1, forward=forward, method="shapley")


def test_equal_instances_of_a_mean_are_alike_in_every_context() -> None:
    model = model_of("meanpool")
    e = xmil.explain(model, bag_of(1).repeat(10, 1), target=1, contexts=8)
    assert e.stderr is not None
    np.testing.assert_allclose(e.stderr, 0, atol=1e-7)
    assert e.stable is not None
    assert e.stable.all()


def test_saved_and_read_again(tmp_path: Path) -> None:
    e = xmil.explain(model_of("transmil"), bag_of(12), target=1, contexts=8)
    e.save(tmp_path / "e.parquet")
    again = xmil.Explanation.load(tmp_path / "e.parquet")
    np.testing.assert_array_equal(again.stable, e.stable)
    np.testing.assert_array_equal(again.stderr, e.stderr)
    assert again.warnings == e.warnings
    assert again.params["contexts"] == 8


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({"contexts": 3}, InputError, r"\[4, 100000\], so that each of 10"),
        ({"contexts": 8, "keep": 0.0}, InputError, "'keep' parameter of contexts"),
        ({"contexts": 8, "feature_level": True}, InputError, "leave out `feature_level=True`"),
        ({"contexts": 8, "method": "attention"}, UnknownNameError, "parameter of attention 'contexts'"),
    ],
)
def test_bad_parameters(params: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        xmil.explain(model_of("attnmil"), bag_of(10), target=1, **params)


class Rare(nn.Module):
    """The sum of the instances, a hundred times as much where no marked one is in the bag."""

    def forward(self, x: Tensor) -> Tensor:
        alone = (x[..., 1].sum(dim=1) == 0).float().detach()
        z = x[..., 0].sum(dim=1) * (1 + 100 * alone)
        return torch.stack([-z, z], dim=1)


def test_scores_that_a_few_sub_bags_decide_are_said_to_be_rough() -> None:
    x = torch.ones(24, 2)
    x[4:, 1] = 0.0  # four marked ones: hardly a sub-bag has none
    rare = xmil.explain(Rare(), x, method="gxi", target=1, contexts=40)
    assert any("skewed over the sub-bags" in line for line in rare.warnings)
    plain = xmil.explain(model_of("attnmil"), bag_of(24), target=1, contexts=40)
    assert not any("skewed" in line for line in plain.warnings)


@pytest.mark.parametrize(("n", "contexts"), [(1, 4), (2, 4), (7, 12), (31, 24)])
def test_sizes_of_all_kinds(n: int, contexts: int) -> None:
    hands = deal(n, contexts=contexts, keep=None, seed=5)
    counts = np.bincount(np.concatenate(hands), minlength=n)
    assert counts.min() >= 2
    assert counts.max() - counts.min() <= 1
    sizes = sorted(map(len, hands))
    assert sizes == [int(np.ceil(n * (k + 0.5) / contexts)) for k in range(contexts)]
    assert [len(hand) for hand in hands] != sizes or n < 3


def test_scores_over_all_sizes_are_means_over_the_sub_bags() -> None:
    model, bag = model_of("transmil"), bag_of(9)
    e = xmil.explain(model, bag, target=1, contexts=16, keep=None, seed=2)
    total, counts = np.zeros(9), np.zeros(9)
    for hand in deal(9, contexts=16, keep=None, seed=2):
        total[hand] += xmil.explain(model, bag[hand], target=1).scores
        counts[hand] += 1
    np.testing.assert_allclose(e.scores, total / counts, atol=1e-5)
    assert e.params["keep"] is None
    low, high = e.interval()
    assert (low <= e.scores).all()
    assert (e.scores <= high).all()


@pytest.mark.parametrize(("n", "keep"), [(1, 0.5), (1, None), (9, 1.0), (2, 0.5), (4, 0.1)])
def test_what_never_varied_is_unknown(n: int, keep: float | None) -> None:
    e = xmil.explain(model_of("attnmil"), bag_of(n), target=1, contexts=8, keep=keep)
    assert e.stable is None
    assert e.stderr is None
    with pytest.raises(InputError, match="the same others"):
        e.interval()
