"""Measures of predictions against scikit-learn, SciPy and their definitions; intervals over cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, pearsonr, spearmanr
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    brier_score_loss,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
)

from xmil.core.errors import InputError
from xmil.core.task import TASKS
from xmil.evaluate import (
    auroc,
    average_precision,
    balanced_accuracy,
    c_index,
    calibration_error,
    class_metrics,
    concordance,
    r_squared,
    risk_metrics,
    statistics,
    survival,
    value_metrics,
)


def slow_c_index(times, events, risks) -> float:
    """Harrell's C from its definition, pair by pair."""
    known = right = 0.0
    for i in range(len(times)):
        for j in range(len(times)):
            before = times[i] < times[j] or (times[i] == times[j] and not events[j])
            if i != j and events[i] and before:
                known += 1
                right += 1.0 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0.0
    return right / known if known else math.nan


def slow_ece(hits, chances, bins=10) -> float:
    total = 0.0
    for b in range(bins):
        inside = [i for i, p in enumerate(chances) if b == min(int(p * bins), bins - 1)]
        if inside:
            gap = np.mean([float(hits[i]) for i in inside]) - np.mean([chances[i] for i in inside])
            total += len(inside) / len(chances) * abs(gap)
    return total


patients = st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(-3, 3)), min_size=1, max_size=25)


@settings(deadline=None)
@given(patients)
def test_c_index_is_the_definition(rows) -> None:
    times, events, risks = (np.array(column) for column in zip(*rows, strict=True))
    found, expected = c_index(times, events, risks), slow_c_index(times, events, risks)
    assert found == pytest.approx(expected, nan_ok=True)
    turned = c_index(times, events, -risks)
    assert turned == pytest.approx(1 - expected, nan_ok=True)


def test_c_index_in_blocks(monkeypatch, rng) -> None:
    times, events, risks = rng.integers(1, 40, 60), rng.random(60) < 0.6, rng.integers(0, 9, 60)
    whole = c_index(times, events, risks)
    monkeypatch.setattr(survival, "PAIRS", 130)
    assert c_index(times, events, risks) == pytest.approx(whole)
    assert whole == pytest.approx(slow_c_index(times, events, risks))


def test_two_classes_agree_with_sklearn(rng) -> None:
    y = rng.integers(0, 2, 200)
    p = np.clip(np.round(0.3 * y + 0.6 * rng.random(200), 2), 0, 1)  # with ties
    found = {
        k: v.estimate for k, v in class_metrics(y, np.stack([1 - p, p], 1), draws=0, units=range(200)).items()
    }
    guess = (p > 0.5).astype(int)
    assert found["auroc"] == pytest.approx(roc_auc_score(y, p))
    assert found["auprc"] == pytest.approx(average_precision_score(y, p))
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(y, guess))
    assert found["accuracy"] == pytest.approx(accuracy_score(y, guess))
    assert found["sensitivity"] == pytest.approx(guess[y == 1].mean())
    assert found["specificity"] == pytest.approx(1 - guess[y == 0].mean())
    assert found["brier"] == pytest.approx(brier_score_loss(y, p))
    assert found["ece"] == pytest.approx(slow_ece(y == 1, p))


def test_many_classes_agree_with_sklearn(rng) -> None:
    y = rng.integers(0, 4, 300)
    p = rng.dirichlet(np.ones(4), 300) * 0.7
    p[np.arange(300), y] += 0.3
    found = {k: v.estimate for k, v in class_metrics(y, p, draws=0, units=range(300)).items()}
    assert found["auroc"] == pytest.approx(roc_auc_score(y, p, multi_class="ovr", average="macro"))
    assert found["auprc"] == pytest.approx(
        np.mean([average_precision_score(y == c, p[:, c]) for c in range(4)])
    )
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(y, p.argmax(1)))
    assert found["brier"] == pytest.approx(((p - np.eye(4)[y]) ** 2).sum(1).mean())
    assert found["ece"] == pytest.approx(slow_ece(p.argmax(1) == y, p.max(1)))
    assert "sensitivity" not in found


def test_labels_agree_with_sklearn(rng) -> None:
    y = rng.random((150, 3)) < 0.4
    p = np.clip(0.3 * y + 0.7 * rng.random((150, 3)), 0, 1)
    found = {k: v.estimate for k, v in class_metrics(y, p, draws=0, units=range(150)).items()}
    assert found["auroc"] == pytest.approx(roc_auc_score(y, p, average="macro"))
    assert found["auprc"] == pytest.approx(average_precision_score(y, p, average="macro"))
    assert found["accuracy"] == pytest.approx(((p > 0.5) == y).mean())
    each = [balanced_accuracy_score(y[:, c], p[:, c] > 0.5) for c in range(3)]
    assert found["balanced_accuracy"] == pytest.approx(np.mean(each))


def test_values_agree_with_sklearn_and_scipy(rng) -> None:
    y = np.round(rng.normal(size=120), 1) + 50  # far from 0, with ties
    v = y + rng.normal(size=120)
    found = {k: x.estimate for k, x in value_metrics(y, v, draws=0, units=range(120)).items()}
    assert found["mae"] == pytest.approx(mean_absolute_error(y, v))
    assert found["rmse"] == pytest.approx(np.sqrt(((y - v) ** 2).mean()))
    assert found["r2"] == pytest.approx(r2_score(y, v))
    assert found["pearson"] == pytest.approx(pearsonr(y, v).statistic)
    assert found["spearman"] == pytest.approx(spearmanr(y, v).statistic)
    assert found["medape"] == pytest.approx(np.median(100 * np.abs(y - v) / np.abs(y)))
    assert "auroc" not in found


def test_values_at_a_reference_and_beside_zero(rng) -> None:
    y, v = rng.normal(size=40), rng.normal(size=40)
    y[:5] = 0.0
    found = {k: x.estimate for k, x in value_metrics(y, v, reference=0.3, draws=0, units=range(40)).items()}
    assert found["auroc"] == pytest.approx(roc_auc_score(y > 0.3, v))
    assert found["medape"] == pytest.approx(np.median(100 * np.abs(y[5:] - v[5:]) / np.abs(y[5:])))
    assert math.isnan(value_metrics(np.zeros(3), v[:3], draws=0, units=range(3))["medape"].estimate)


def test_a_weighted_median_is_that_of_the_drawn(rng) -> None:
    values, counts = rng.integers(0, 6, 15).astype(float), rng.integers(0, 4, (30, 15)).astype(float)
    found = statistics.median(counts, values)
    for row, one in zip(counts.astype(int), found, strict=True):
        assert one == np.median(np.repeat(values, row))


def test_a_draw_is_the_measure_of_the_drawn(rng) -> None:
    """Weights stand for repeated slides, in every measure."""
    n = 60
    y, e = rng.integers(0, 2, n), rng.random(n) < 0.5
    p, t = np.round(rng.random(n), 1), rng.integers(1, 9, n).astype(float)
    rows = rng.integers(0, n, (5, n))
    weights = np.stack([np.bincount(row, minlength=n) for row in rows]).astype(float)
    right = (p > 0.5) == y
    pairs = [
        (statistics.auroc(weights, y == 1, p), lambda r: roc_auc_score(y[r], p[r])),
        (statistics.auprc(weights, y == 1, p), lambda r: average_precision_score(y[r], p[r])),
        (
            balanced_accuracy(weights, y, right),
            lambda r: balanced_accuracy_score(y[r], (p > 0.5)[r]),
        ),
        (r_squared(weights, t, p), lambda r: r2_score(t[r], p[r])),
        (statistics.correlation(weights, t, p), lambda r: pearsonr(t[r], p[r]).statistic),
        (statistics.rank_correlation(weights, t, p), lambda r: spearmanr(t[r], p[r]).statistic),
        (calibration_error(weights, y == 1, p), lambda r: slow_ece(y[r], p[r])),
    ]
    for found, expected in pairs:
        np.testing.assert_allclose(found, [expected(row) for row in rows], rtol=1e-9)
    # twins drawn of one patient with the event tell no order: the slow version leaves i == j out by time
    found = concordance(weights, t, e, p)
    np.testing.assert_allclose(found, [slow_c_index(t[r], e[r], p[r]) for r in rows], rtol=1e-9)


def test_intervals_cover_and_repeat(rng) -> None:
    y = rng.integers(0, 2, 80)
    p = np.clip(0.25 * y + 0.7 * rng.random(80), 0, 1)
    chances = np.stack([1 - p, p], axis=1)
    first, again = (class_metrics(y, chances, seed=3, units=range(80)) for _ in range(2))
    assert first == again
    assert first != class_metrics(y, chances, seed=4, units=range(80))
    for found in first.values():
        assert found.low <= found.estimate <= found.high
    narrow = class_metrics(y, chances, level=0.5, seed=3, units=range(80))["auroc"]
    assert narrow.high - narrow.low < first["auroc"].high - first["auroc"].low


def test_draws_do_not_depend_on_blocks(monkeypatch, rng) -> None:
    y, v = rng.normal(size=30), rng.normal(size=30)
    whole = value_metrics(y, v, draws=40, units=range(30))
    monkeypatch.setattr(statistics, "BLOCK", 100)
    in_blocks = value_metrics(y, v, draws=40, units=range(30))
    for name, found in whole.items():
        assert in_blocks[name].low == pytest.approx(found.low)
        assert in_blocks[name].high == pytest.approx(found.high)


def test_sure_predictions_are_still_ranked() -> None:
    """Probabilities of 1 are all equal; their logits are not."""
    z = np.array([[0.0, 40.0], [0.0, 60.0], [0.0, 50.0], [0.0, 45.0]])
    task = TASKS["classification"]
    y, chances = np.array([0, 1, 1, 0]), task.numbers(z)
    assert class_metrics(y, chances, draws=0, units=range(4))["auroc"].estimate == 0.5
    ranked = class_metrics(y, chances, scores=task.log_odds(z), draws=0, units=range(4))
    assert ranked["auroc"].estimate == 1.0


def test_slides_of_a_case_are_drawn_together(rng) -> None:
    """Ten copies of every slide know no more than one: by case the interval stays as wide."""
    y = rng.integers(0, 2, 40)
    p = np.clip(0.3 * y + 0.6 * rng.random(40), 0, 1)
    chances = np.stack([1 - p, p], axis=1)
    once = class_metrics(y, chances, units=range(40))["auroc"]
    many = {"labels": np.repeat(y, 10), "chances": np.repeat(chances, 10, axis=0)}
    naive = class_metrics(**many, units=range(400))["auroc"]
    by_case = class_metrics(**many, units=np.repeat(np.arange(40), 10))["auroc"]
    assert by_case.estimate == pytest.approx(once.estimate)
    assert by_case.high - by_case.low == pytest.approx(once.high - once.low, rel=0.25)
    assert naive.high - naive.low < 0.5 * (once.high - once.low)


def test_bootstrap_covers_the_truth_as_often_as_it_says() -> None:
    """Over repeated samples the 90 % interval of a mean holds the true mean about 90 times in 100."""
    rng, inside = np.random.default_rng(0), 0
    for seed in range(200):
        values = rng.normal(size=60)
        found = statistics.bootstrap_mean(values, units=range(60), draws=300, level=0.9, seed=seed)
        inside += found.low <= 0.0 <= found.high
    assert 0.83 <= inside / 200 <= 0.96


def test_draws_that_never_differ_claim_no_certainty() -> None:
    """Eleven cases of each class, two slides each, all right: shares have exact intervals, areas none."""
    y = np.repeat([0, 1], 22)
    chances = np.stack([1 - 0.8 * y, 0.8 * y], axis=1)
    found = class_metrics(y, chances, units=np.repeat(range(22), 2).tolist())
    low = binomtest(11, 11).proportion_ci(method="exact").low
    for name in ("sensitivity", "specificity"):
        assert (found[name].low, found[name].high) == pytest.approx((low, 1.0))
    assert found["accuracy"].low == pytest.approx(binomtest(22, 22).proportion_ci(method="exact").low)
    assert not found["auroc"].exists
    assert not found["balanced_accuracy"].exists
    one_answer = class_metrics(y, chances[::-1][:22].repeat(2, axis=0), units=range(44))
    assert (one_answer["specificity"].low, one_answer["specificity"].estimate) == (0.0, 0.0)
    assert 0.1 < one_answer["specificity"].high < 0.2
    assert not risk_metrics(range(1, 11), np.ones(10), range(10, 0, -1), units=range(10))["c_index"].exists


def test_the_mean_over_classes_is_of_the_same_classes_in_every_draw(rng) -> None:
    """A rare label and a good one: a draw without the rare one is none of their mean."""
    y = np.zeros((30, 2), dtype=int)
    y[::2, 0] = y[:6, 1] = 1
    p = np.stack([0.1 + 0.8 * y[:, 0], rng.random(30)], axis=1)
    p[:6, 1] = 0.0  # always below the others: its AUROC is 0, that of the first label 1
    found = class_metrics(y, p, units=range(30), names=["first", "rare"])
    assert (found["auroc"].estimate, found["auroc:rare"].estimate) == (0.5, 0.0)
    assert not found["auroc"].exists  # all draws with both labels agree
    weights = np.ones((1, 30))
    weights[0, :6] = 0.0
    assert math.isnan(balanced_accuracy(weights, y[:, 1], (p[:, 1] > 0.5) == y[:, 1])[0])


@pytest.mark.parametrize(("positives", "has_interval"), [(1, False), (7, False), (8, True), (33, False)])
def test_few_cases_of_a_class_have_no_interval(rng, positives: int, has_interval: bool) -> None:
    """One positive of 40: draws vary the others alone, and an interval would cover 30 % in place of 95."""
    y = (np.arange(40) < positives).astype(int)
    p = np.clip(0.2 * y + 0.8 * rng.random(40), 0, 1)
    found = class_metrics(np.repeat(y, 2), np.stack([1 - p, p], axis=1).repeat(2, axis=0),
                          units=np.repeat(range(40), 2).tolist())  # fmt: skip
    for name in ("auroc", "auprc", "balanced_accuracy"):
        assert found[name].exists == has_interval, name
        assert not math.isnan(found[name].estimate)
    assert found["accuracy"].exists
    values = value_metrics(p, p + rng.normal(size=40), reference=float(np.sort(p)[-positives - 1]),
                           units=range(40))  # fmt: skip
    assert values["auroc"].exists == has_interval
    times, risks = rng.exponential(size=40), rng.normal(size=40)
    assert risk_metrics(times, y, risks, units=range(40))["c_index"].exists == (8 <= positives < 33)


def test_what_cannot_be_measured_is_nan() -> None:
    one_class = class_metrics([1, 1, 1], [[0.2, 0.8], [0.4, 0.6], [0.7, 0.3]], draws=20, units=range(3))
    for name in ("auroc", "auprc", "balanced_accuracy", "specificity"):
        assert math.isnan(one_class[name].estimate), name
    assert one_class["sensitivity"].estimate == pytest.approx(2 / 3)
    assert one_class["accuracy"].estimate == pytest.approx(2 / 3)
    censored = risk_metrics([1, 2, 3], [0, 0, 0], [1, 2, 3], draws=20, units=range(3))["c_index"]
    assert math.isnan(censored.estimate)
    assert math.isnan(censored.low)
    constant = value_metrics([1.0, 1.0], [0.5, 2.0], draws=20, units=range(2))
    assert math.isnan(constant["r2"].estimate)
    assert math.isnan(constant["pearson"].estimate)
    single = value_metrics([1.0], [0.5], draws=20, units=range(1))["mae"]
    assert (single.estimate, math.isnan(single.low)) == (0.5, True)


@pytest.mark.parametrize(
    "call",
    [
        lambda: class_metrics([0, 2], [[0.5, 0.5], [0.5, 0.5]], units=range(2)),
        lambda: class_metrics([0, 1, 1], [[0.5, 0.5], [0.5, 0.5]], units=range(3)),
        lambda: class_metrics([], np.zeros((0, 2)), units=range(0)),
        lambda: class_metrics([[0, 1]], [[0.5]], units=range(1)),
        lambda: value_metrics([1.0], [1.0, 2.0], units=range(1)),
        lambda: risk_metrics([1.0], [1, 0], [1.0], units=range(1)),
        lambda: value_metrics([1.0, 2.0], [1.0, 2.0], draws=-1, units=range(2)),
        lambda: value_metrics([1.0, 2.0], [1.0, 2.0], level=95, units=range(2)),
        lambda: class_metrics([0, 1], [[0.5, 0.5], [np.nan, np.nan]], units=range(2)),
        lambda: class_metrics([[0, 1], [1, 0]], [[0.5, 0.5], [np.nan, 0.2]], units=range(2)),
        lambda: class_metrics([0, 1], [[1.5, -0.5], [0.5, 0.5]], units=range(2)),
        lambda: class_metrics([0, 1], [[1, 0], [0, 1]], scores=[[1, 0], [0, np.nan]], units=range(2)),
        lambda: value_metrics([1.0, 2.0], [1.0, np.nan], units=range(2)),
        lambda: value_metrics([1.0, np.inf], [1.0, 2.0], units=range(2)),
        lambda: risk_metrics([1.0, 2.0], [1, 0], [np.nan, 1.0], units=range(2)),
        lambda: auroc(torch.tensor([True, False]), torch.tensor([0.5, math.nan])),
        lambda: average_precision([True, False], [0.5, np.nan]),
    ],
)
def test_what_does_not_fit_is_refused(call) -> None:
    with pytest.raises(InputError):
        call()
