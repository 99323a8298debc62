"""The verdict: its rate of false praise, its four kinds, and that it is the same for parts of large bags."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.choice.verdicts import cohorts
from torch import nn

import xmil
from xmil.core.errors import XmilError
from xmil.evaluate import KINDS, FaithfulnessSettings, Flips, Judge, evaluate_slide, judge, judge_cohort

D = 8


def net(name: str = "attnmil", seed: int = 0) -> xmil.models.MILModel:
    return xmil.create_model(name, in_dim=D, n_classes=2, dim=16, seed=seed)


def features(n: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(n, D, generator=torch.Generator().manual_seed(seed))


def test_the_gain_is_the_one_srg_whatever_the_steps() -> None:
    """The mean of 101 values, as AUPC; coarser curves are joined by straight lines."""
    flips = Flips(net(), features(200), target=1)
    scores = np.random.default_rng(0).normal(size=200)
    usual = xmil.srg(net(), features(200), scores, target=1)
    np.testing.assert_allclose(flips.gains(np.argsort(-scores)[None], steps=100), usual, rtol=1e-5)
    settings = FaithfulnessSettings(methods=("single",), modes=("remove",), steps=10, orders=2)
    for certificate in evaluate_slide(net(), xmil.Bag(features(200).numpy()), settings).certificates:
        assert f"SRG {certificate.srg:.2f}" in certificate.sentence
        assert certificate.srg == certificate.verdict.srg
    flips = Flips(net(), features(30), target=1)
    scores = np.random.default_rng(0).normal(size=(3, 30))
    orders = np.argsort(-scores, axis=1)
    slow = []
    for own in scores:
        first, last = (flips.curve(own, order=order, steps="each").values for order in ("morf", "lerf"))
        slow.append(np.trapezoid(last - first) / 30 * 100 / 101)
    np.testing.assert_allclose(flips.gains(orders, steps=30), slow, atol=1e-6)
    np.testing.assert_allclose(flips.gains(orders[:, ::-1], steps=30), -np.array(slow), atol=1e-6)


@pytest.mark.parametrize(("name", "bags"), [("attnmil", 40), ("transmil", 4)])
def test_random_scores_are_called_better_or_worse_at_most_as_often_as_stated(name: str, bags: int) -> None:
    """Random scores on bags of several sizes: at most 2.5 % each, with three standard errors."""
    kinds = []
    for seed in range(bags):
        judging = Judge(Flips(net(name, seed), features(12 + seed, seed), target=1), seed=seed)
        draws = np.random.default_rng([seed, 1]).normal(size=(50, 12 + seed))
        kinds += [verdict.kind for verdict in judging.verdicts([("random", own) for own in draws])]
    limit = len(kinds) * 0.025 + 3 * np.sqrt(len(kinds) * 0.025 * 0.975)
    assert kinds.count("better") <= limit
    assert kinds.count("worse") <= limit
    assert set(kinds) <= set(KINDS)


def test_faithful_scores_are_better_and_their_opposite_worse() -> None:
    for seed in range(10):
        model, x = net(seed=seed), features(40, seed)
        e = xmil.explain(model, x, method="shapley", target=1, output="probability", precision=None)
        good, bad = Judge(Flips(model, x, target=1)).verdicts([("shapley", e), ("reversed", -e.scores)])
        assert (good.kind, bad.kind) == ("better", "worse")
        assert good.p == pytest.approx(1 / 201)
        assert (good.orders, good.best, good.share) == (200, "shapley", 1.0)
        assert bad.share == pytest.approx(bad.srg / good.srg)


@pytest.mark.parametrize(
    ("x", "word"),
    [
        (features(1), "patch"),
        (features(4), "patches"),
        (torch.ones(20, D), "evenly"),  # whichever leave, the rest is the same
        (torch.zeros(20, D), "hardly changes"),
    ],
)
def test_what_cannot_be_told_has_its_reason(x: torch.Tensor, word: str) -> None:
    model = xmil.create_model("meanpool", in_dim=D, n_classes=2, seed=1)
    with torch.no_grad():
        model.classifier.weight.mul_(20)
    (verdict,) = Judge(Flips(model, x, target=1)).verdicts([("scores", np.arange(len(x)))])
    assert verdict.kind == "cannot tell"
    assert word in verdict.reason
    assert verdict.reason in str(verdict)


def test_large_bags_are_judged_on_a_part() -> None:
    model, x = net(), features(300)
    e = xmil.explain(model, x, method="single", target=1)
    whole = Judge(Flips(model, x, target=1))
    part = Judge(Flips(model, x, target=1), most=100)
    assert (len(whole.rows), len(part.rows)) == (300, 100)
    (verdict,) = part.verdicts([("single", e)])
    own = Flips(model, x[part.rows], target=1).gains(np.argsort(-e.scores[part.rows])[None], steps=10)
    assert (verdict.kind, verdict.patches) == ("better", 100)
    assert verdict.srg == pytest.approx(float(own[0]), abs=1e-6)


def test_few_orders_are_refused() -> None:
    with pytest.raises(XmilError, match="199"):
        judge(0.5, np.zeros(20))


def test_verdicts_on_cohorts_of_known_worth() -> None:
    """Shuffled maps of 16 cases are better in at most 2.5 %, reversed ones never, right ones always."""
    kinds = cohorts(100, seed=1)
    assert kinds["shuffled"]["better"] <= 100 * 0.025 + 3 * np.sqrt(100 * 0.025 * 0.975)
    assert kinds["reversed"]["better"] == 0
    assert kinds["faithful"]["better"] >= 99


def test_cases_are_the_unit() -> None:
    """Ten slides of each of two cases are two cases, which cannot tell."""
    verdict = judge_cohort({"lrp": [0.4] * 20}, units=["a"] * 10 + ["b"] * 10)
    assert (verdict.kind, verdict.cases, verdict.slides) == ("cannot tell", ["a", "b"], 20)
    alone = judge_cohort({"lrp": [0.4, 0.5, 0.3, 0.4, 0.6, 0.5, 0.4, 0.3]}, units=range(8), unit="slide")
    assert "over 8 slides (taken as independent: no case_id), random order 0.00" in alone.sentence
    assert "over 8 slides" in alone.brief


def test_the_best_method_is_the_best_on_the_cases_that_all_have() -> None:
    """A rival that was tried on the easy cases alone is compared with the first on these."""
    unknown = [float("nan")] * 8
    srgs = {"lrp": [0.8] * 8 + [0.2] * 8, "one_added": [0.6] * 8 + unknown}
    verdict = judge_cohort(srgs, units=range(16))
    assert verdict.table["share"].tolist() == pytest.approx([1.0, 0.75])
    assert "100 % of the best method tried." in verdict.sentence


def test_a_map_is_no_better_where_another_shows_that_the_order_matters() -> None:
    """SRGs below 0.01 alone may mean a flat output; beside a method with a high one they do not."""
    low, high = [0.004, 0.005, 0.006, 0.005] * 2, [0.1, 0.12, 0.09, 0.11] * 2
    assert judge_cohort({"lrp": low}, units=range(8)).kind == "cannot tell"
    both = judge_cohort({"lrp": low, "one_added": high}, units=range(8))
    assert both.table["kind"].to_dict() == {"lrp": "no better", "one_added": "better"}
    assert both.kind == "no better"
    assert "one_added does better" in both.sentence
    few = judge_cohort({"lrp": low[:4], "one_added": high[:4]}, units=range(4))
    assert set(few.table["kind"]) == {"cannot tell"}


def test_a_slide_whose_random_orders_are_all_alike_is_judged_by_a_map_that_is_not() -> None:
    """Of 2,000 patches 100 matter: random orders hardly differ, the right one does."""

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(dim=1)

    x, scores = torch.zeros(2000, 2), np.zeros(2000)
    x[:100, 1], scores[:100] = 1, 1
    flips = Flips(Mean().eval(), x, target=1)
    shuffled = np.random.default_rng(1).permutation(scores)
    (alone,) = Judge(flips).verdicts([("shuffled", shuffled)])
    first, second = Judge(flips).verdicts([("shuffled", shuffled), ("right", scores)])
    assert (alone.kind, second.kind) == ("cannot tell", "better")
    assert first.kind == "no better"
