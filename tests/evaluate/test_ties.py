"""Equal scores: what judges averages over their orders, and scores without an order prove nothing."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from xmil.evaluate import (
    FaithfulnessSettings,
    Flips,
    Judge,
    choose_method,
    evaluate_slide,
    flip_order,
    judge_cohort,
    tie_orders,
)
from xmil.methods import METHODS, Attributions, register_method
from xmil.methods.method import attributions

N, BAGS = 20, 16


class Found(nn.Module):
    """A network that finds a marked instance among the others: the more there are, the surer."""

    def forward(self, x: Tensor) -> Tensor:
        return 12 * x[..., :1].mean(dim=1) - 1


def bag(name: str | None, n: int = N) -> xmil.Bag:
    """Evidence in the first four rows, in all bags alike."""
    x = np.zeros((n, 2), dtype=np.float32)
    x[:4, 0] = 1.0
    return xmil.Bag(x, slide_id=name)


def srgs_of(scores: np.ndarray) -> np.ndarray:
    """The SRG of the same scores on each of 16 equal bags."""
    names = [f"s{i}" for i in range(BAGS)]
    return np.array([Judge(Flips(Found(), bag(name), target=1)).srgs([scores])[0] for name in names])


RIGHT = (np.arange(N) < 4).astype(float)
BLIND = np.isin(np.arange(N), [0, 1, *range(4, 12)]).astype(float)  # half of the evidence and of the rest
FLAT = [np.zeros(N), np.full(N, -0.3)]


@pytest.mark.parametrize("scores", FLAT)
def test_a_map_without_an_order_gains_nothing_and_cannot_be_told_about(scores: np.ndarray) -> None:
    srgs = srgs_of(scores)
    np.testing.assert_array_equal(srgs, 0.0)
    alone = judge_cohort({"flat": srgs}, units=range(BAGS))
    beside = judge_cohort({"flat": srgs, "right": srgs_of(RIGHT)}, units=range(BAGS))
    assert alone.kind == beside.kind == "cannot tell"
    assert beside.table["kind"]["right"] == "better"
    flat, right = Judge(Flips(Found(), bag("s"), target=1)).verdicts([("flat", scores), ("right", RIGHT)])
    assert (flat.kind, flat.srg, right.kind) == ("cannot tell", 0.0, "better")
    assert "same score" in flat.reason
    assert xmil.srg(Found(), bag("s"), scores, target=1) == 0.0


def test_two_values_are_judged_by_what_they_tell_apart() -> None:
    """Among equal scores no order is lucky: half of the evidence on each side is no evidence."""
    blind = srgs_of(BLIND)
    assert np.abs(blind).max() < 0.05
    assert judge_cohort({"blind": blind}, units=range(BAGS)).kind != "better"
    right = srgs_of(RIGHT)
    assert np.ptp(right) < 0.01
    assert judge_cohort({"right": right}, units=range(BAGS)).kind == "better"


def test_the_gain_is_the_mean_over_every_order_of_equal_scores() -> None:
    flips = Flips(Found(), bag("s", 6), target=1)
    scores = np.array([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    high, low = np.flatnonzero(scores), np.flatnonzero(scores == 0)
    orders = [[*a, *b] for a in permutations(high) for b in permutations(low)]
    expected = flips.gains(np.array(orders), steps=10).mean()
    assert Judge(flips).srgs([scores])[0] == pytest.approx(expected, abs=1e-7)
    curves = [flips.curve(-np.argsort(order), steps="each").values for order in orders]
    (mean,) = flips.curves([(scores, "morf")], steps="each", over_ties=True)
    np.testing.assert_allclose(mean.values, np.mean(curves, axis=0), atol=1e-7)


def test_orders_of_ties_share_the_places_evenly() -> None:
    scores = np.array([2.0, *[1.0] * 5, *[0.0] * 4])
    orders = tie_orders(scores, range(11), seed=1)
    for place in range(10):
        assert set(scores[orders[:, place]]) == {np.sort(scores)[::-1][place]}
    for place in range(1, 6):
        assert set(Counter(orders[:, place].tolist()).values()) == {2}  # of ten orders
    np.testing.assert_array_equal(tie_orders(scores, [0, 1, 6, 10], seed=1), [flip_order(scores, seed=1)])


def test_each_bag_has_its_own_order_of_equal_scores() -> None:
    def order_of(name: str | None, seed: int = 0) -> list[int]:
        own = Flips(Found(), bag(name), target=1).tie_seed(seed)
        return flip_order(np.zeros(N), seed=own).tolist()

    assert order_of("s1") == flip_order(np.zeros(N), seed=[0, crc32(b"s1")]).tolist()
    orders = [order_of("s1"), order_of("s2"), order_of("s1", seed=1), order_of(None)]
    assert len(set(map(tuple, orders))) == 4
    assert order_of(None) == orders[3]
    curves = [xmil.flip(Found(), bag(name), np.zeros(N), target=1).values for name in ("s1", "s2", "s1")]
    np.testing.assert_array_equal(curves[0], curves[2])
    assert not np.array_equal(curves[0], curves[1])


@pytest.fixture
def flat_method():
    @register_method("flat", signed=True, cost="1")
    @torch.no_grad()
    def flat(network, x, question) -> Attributions:
        return attributions(network(x), question, lambda _: torch.zeros(x.shape[1]))

    yield "flat"
    METHODS._entries.pop("flat")


def test_no_door_calls_a_map_without_an_order_better(flat_method: str) -> None:
    settings = FaithfulnessSettings(methods=(flat_method, "single"), modes=("remove",), orders=2)
    result = evaluate_slide(Found(), bag("s"), settings)
    flat, single = result.certificates
    assert (flat.srg, flat.verdict.kind, single.verdict.kind) == (0.0, "cannot tell", "better")
    assert (result.rows[0]["srg"], result.rows[0]["verdict"]) == (0.0, "cannot tell")
    choice = choose_method(Found(), [bag(f"s{i}") for i in range(BAGS)], [flat_method])
    assert choice.verdict is not None
    assert (choice.table["srg"][flat_method], choice.verdict.kind) == (0.0, "cannot tell")
