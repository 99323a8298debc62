"""Shapley values against the formula, written out slowly."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import combinations, permutations
from math import factorial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError
from xmil.methods.shapley import measure_prefixes
from xmil.network import Network
from xmil.subsets import open_subsets

WIDTH = 6
SMALL = {
    "transmil": {"dim": 16},
    "addmil": {"hidden": 8},
    "attnmil": {"dim": 8, "attention_dim": 4},
    "mambamil": {"dim": 8, "attention_dim": 4},
    "stamp_vit": {"dim": 16, "heads": 2, "feedforward": 16},
    "clam_sb": {"dim": 8, "attention_dim": 4},
    "clam_mb": {"dim": 8, "attention_dim": 4},
}
Value = Callable[[tuple[int, ...]], float]


def model_of(name: str, **params: object) -> nn.Module:
    model = xmil.create_model(name, in_dim=WIDTH, n_classes=2, seed=4, **{**SMALL.get(name, {}), **params})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6)
    return model


def bag_of(n: int) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n))


def value_of(model: nn.Module, bag: Tensor) -> Value:
    """v(S): the logit of class 1 of the sub-bag in order; n zero vectors where it is empty."""

    @torch.no_grad()
    def value(members: tuple[int, ...]) -> float:
        x = bag[sorted(members)] if members else torch.zeros_like(bag)
        return float(model(x.unsqueeze(0))[0, 1])

    return value


def by_formula(value: Value, n: int) -> np.ndarray:
    found = np.zeros(n)
    for i in range(n):
        others = [k for k in range(n) if k != i]
        for size in range(n):
            weight = factorial(size) * factorial(n - 1 - size) / factorial(n)
            for s in combinations(others, size):
                found[i] += weight * (value((*s, i)) - value(s))
    return found


@pytest.mark.parametrize("name", xmil.list_models())
def test_values_are_those_of_the_formula(name: str) -> None:
    """All coalitions give the formula's values, samples come within three standard errors; both add up."""
    model, bag, n = model_of(name), bag_of(8), 8
    value = cache(value_of(model, bag))
    expected = by_formula(value, n)
    exact = xmil.explain(model, bag, method="shapley", target=1)
    sampled = xmil.explain(
        model, bag, method="shapley", target=1, exact=False, precision=None, permutations=100, seed=1
    )
    assert exact.stderr is not None
    assert sampled.stderr is not None
    np.testing.assert_allclose(exact.scores, expected, atol=1e-5)
    assert not exact.stderr.any()
    assert (sampled.stderr > 0).all()
    assert (np.abs(sampled.scores - expected) <= 3 * sampled.stderr + 1e-5).all()
    for e in (exact, sampled):
        assert float(e.scores.sum()) == pytest.approx(value(tuple(range(n))) - value(()), abs=1e-5)


def test_the_formula_is_the_mean_over_all_orders() -> None:
    model, bag = model_of("transmil"), bag_of(4)
    value, found = value_of(model, bag), np.zeros(4)
    for order in permutations(range(4)):
        for place, i in enumerate(order):
            found[i] += (value(order[: place + 1]) - value(order[:place])) / 24
    e = xmil.explain(model, bag, method="shapley", target=1)
    np.testing.assert_allclose(e.scores, found, atol=1e-5)


@pytest.mark.parametrize("name", xmil.list_models())
@pytest.mark.parametrize("n", [1, 19])
def test_efficiency(name: str, n: int) -> None:
    model, bag = model_of(name), bag_of(n)
    e = xmil.explain(model, bag, method="shapley", target=1, permutations=4, exact=False if n > 1 else None)
    value = value_of(model, bag)
    assert e.audit is not None
    assert e.audit.bias == pytest.approx(value(()), abs=1e-6)
    assert float(e.scores.sum()) == pytest.approx(value(tuple(range(n))) - value(()), abs=1e-5)
    assert abs(e.audit.other) < 1e-9


def test_equal_instances_share_alike_and_a_lone_one_takes_all() -> None:
    model = model_of("attnmil", n_out_layers=1)
    bag = bag_of(1).repeat(5, 1)
    scores = xmil.explain(model, bag, method="shapley", target=1).scores
    np.testing.assert_allclose(scores, np.full(5, scores.mean()), atol=1e-6)


def test_attention_too_wide_for_sums() -> None:
    model = model_of("attnmil")
    nn.init.constant_(model.attention.w.weight, 1e4)
    bag = bag_of(5)
    e = xmil.explain(model, bag, method="shapley", target=1)
    np.testing.assert_allclose(e.scores, by_formula(value_of(model, bag), 5), atol=1e-5)


class Order(nn.Module):
    """A foreign module that depends on the order of its instances."""

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        return (x[..., :2] * steps).sum(dim=1).tanh()


def test_sub_bags_stay_in_order() -> None:
    model, bag = Order(), bag_of(6)
    expected = by_formula(value_of(model, bag), 6)
    e = xmil.explain(model, bag, method="shapley", target=1)
    np.testing.assert_allclose(e.scores, expected, atol=1e-5)
    sampled = xmil.explain(model, bag, method="shapley", target=1, exact=False, precision=0.005)
    assert sampled.stderr is not None
    assert (np.abs(sampled.scores - expected) <= 3 * sampled.stderr + 1e-5).all()


def test_precision_stops_the_sampling_and_a_shortfall_is_said() -> None:
    model, bag = model_of("attnmil"), bag_of(30)
    seen: list[tuple[int, int]] = []
    e = xmil.explain(model, bag, method="shapley", target=1, precision=0.1, permutations=4000,
                     progress=lambda *step: seen.append(step))  # fmt: skip
    assert e.stderr is not None
    assert e.stderr.max() <= 0.1
    assert seen[-1][0] < seen[-1][1] == 4000
    assert not e.warnings
    assert "progress" not in e.params
    short = xmil.explain(model, bag, method="shapley", target=1, precision=1e-4, permutations=40)
    assert "above the precision of 0.0001" in short.warnings[0]


@pytest.mark.parametrize("n", [14, 40])
@torch.no_grad()
def test_the_cost_is_told_from_the_work_itself(n: int) -> None:
    """Measured not by a clock but by a module that counts: the estimate is the work of all sub-bags."""

    class Counts(nn.Module):
        work = 0

        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[1]
            Counts.work += len(x) * (300 + 7 * size + size**2)
            return x.mean(dim=1)[:, :2]

    def count(call: Callable[[], Tensor]) -> float:
        before = Counts.work
        call()
        return float(Counts.work - before)

    game = open_subsets(Network(Counts().eval()), bag_of(n).unsqueeze(0))
    orders = torch.arange(n).repeat(8, 1)
    assert measure_prefixes(game, 8, count) == pytest.approx(count(lambda: game.prefixes(orders)), rel=0.1)
    pooled = open_subsets(Network(model_of("attnmil")), bag_of(n).unsqueeze(0))
    assert pooled.cost == "sum"
    assert measure_prefixes(pooled, 8, lambda call: float(len(call()))) == 8


@pytest.mark.parametrize("precision", [0.06, 0.5])
def test_where_sampling_stops_is_foretold(precision: float, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    with caplog.at_level("INFO", logger="xmil.methods.shapley"):
        xmil.explain(
            model_of("transmil"), bag_of(24), method="shapley", target=1, precision=precision,
            permutations=4000, progress=lambda done, _: seen.append(done),
        )  # fmt: skip
    told = int(re.search(r"about (\d+) permutations for the precision", caplog.text)[1])  # type: ignore[index]
    assert seen[-1] / 2 <= told <= 2 * seen[-1]


def test_finer_precision_comes_nearer() -> None:
    model, bag = model_of("transmil"), bag_of(10)
    truth = xmil.explain(model, bag, method="shapley", target=1).scores
    errors = [
        np.abs(
            xmil.explain(
                model, bag, method="shapley", target=1, exact=False, precision=None, permutations=count
            ).scores
            - truth
        ).mean()
        for count in (8, 800)
    ]
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize("output", ["probability", "log_odds", "contrastive"])
def test_other_outputs(output: str) -> None:
    e = xmil.explain(model_of("meanpool"), bag_of(5), method="shapley", target=1, output=output)
    assert e.audit is not None
    assert e.audit.instances + e.audit.bias == pytest.approx(e.output)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"precision": 0.0}, "'precision' parameter of shapley"),
        ({"permutations": 2}, "'permutations' parameter of shapley"),
        ({"exact": True}, "False for bags of more than 20"),
        ({"seed": -1}, "'seed' parameter of shapley"),
    ],
)
def test_bad_parameters(params: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        xmil.explain(model_of("attnmil"), bag_of(30), method="shapley", target=1, **params)


def test_saved_and_read_again(tmp_path: object) -> None:
    e = xmil.explain(model_of("attnmil"), bag_of(30), method="shapley", target=1, permutations=64)
    e.save(f"{tmp_path}/e.parquet")
    again = xmil.Explanation.load(f"{tmp_path}/e.parquet")
    assert again.stderr is not None
    assert e.stderr is not None
    np.testing.assert_array_equal(again.stderr, e.stderr)
    np.testing.assert_array_equal(again.stable, e.stable)


def test_standard_errors_are_honest() -> None:
    """Intervals at 95 % hold the exact value in 90 to 98 % of the cases."""
    model, bag = model_of("attnmil"), bag_of(10)
    truth = xmil.explain(model, bag, method="shapley", target=1, exact=True).scores
    held = []
    for seed in range(40):
        e = xmil.explain(
            model, bag, method="shapley", target=1, exact=False, precision=None, permutations=64, seed=seed
        )
        assert e.stderr is not None
        held.append(np.abs(e.scores - truth) <= 2.04 * e.stderr)  # t(.975, 31)
    assert 0.9 <= np.mean(held) <= 0.98


def test_attention_that_no_number_holds_has_finite_values() -> None:
    """The weight of the empty bag's vector beside a low instance may be infinite; it is not in the bag."""
    model = xmil.create_model("addmil", in_dim=8, n_classes=2, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attention" in name and parameter.ndim > 1:
                parameter.mul_(30)
    bag = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    e = xmil.explain(model, bag, method="shapley", permutations=32, precision=None)
    assert np.isfinite(e.scores).all()
    assert abs(e.audit.other) < 1e-6 * abs(e.output)


@pytest.mark.parametrize("name", ["attnmil", "clam_mb", "addmil"])
@pytest.mark.parametrize("width", [104.0, 2000.0])
def test_samples_of_peaked_attention_are_right(name: str, width: float) -> None:
    """Attention logits so far apart that weights vanish, in single precision and in double."""
    model, bag = model_of(name), bag_of(6)
    last = model.attention[6] if name == "addmil" else model.attention.w
    with torch.no_grad():
        a = model.attend(model.embed(bag.unsqueeze(0)))[0]
        last.weight.mul_(width / float((a.amax(dim=0) - a.amin(dim=0)).max()))
    truth = by_formula(value_of(model, bag), 6)
    e = xmil.explain(model, bag, method="shapley", target=1, exact=False, precision=None, permutations=256)
    assert e.stderr is not None
    assert (np.abs(e.scores - truth) <= 4.5 * e.stderr + 1e-5).all()
    assert float(e.scores.sum()) == pytest.approx(truth.sum(), abs=1e-4)
