"""Paired tests against SciPy's own, corrections against their definitions, units that stay whole."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from xmil.core.errors import XmilError
from xmil.evaluate import hazard_p, median_halves
from xmil.evaluate.statistics import (
    best_method,
    bonferroni,
    bootstrap,
    bootstrap_mean,
    compare,
    holm,
    median,
    paper_pairs,
    permutation_p,
    shuffle_values,
    sign_flip_p,
    unit_means,
)

RNG = np.random.default_rng(0)
A, B, C = RNG.uniform(size=(3, 25))
C = C + 0.8


def test_tests_are_the_paired_ones():
    (found,) = compare({"a": A, "b": B}, [("a", "b")], units=range(25))
    assert found.t_p == pytest.approx(stats.ttest_rel(A, B).pvalue)
    assert found.wilcoxon_p == pytest.approx(stats.wilcoxon(A, B).pvalue)
    assert found.cohens_d == pytest.approx((A - B).mean() / (A - B).std(ddof=1))
    ranks = stats.rankdata(np.abs(A - B))
    expected = (ranks[A > B].sum() - ranks[A < B].sum()) / ranks.sum()
    assert found.rank_biserial == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_corrections_by_their_definitions(p):
    m = len(p)
    np.testing.assert_allclose(bonferroni(p), [min(1, m * value) for value in p])
    ordered = sorted(p)
    steps = [min(1, max((m - j) * ordered[j] for j in range(i + 1))) for i in range(m)]
    np.testing.assert_allclose(sorted(holm(p)), steps)
    assert np.all(holm(p) <= bonferroni(p) + 1e-12)


def test_corrections_count_all_pairs_of_a_call():
    pairs = paper_pairs(["random", "a", "lrp"])
    found = compare({"lrp": A, "a": B, "random": C}, pairs, units=range(25))
    assert [(c.first, c.second) for c in found] == [("a", "random"), ("lrp", "random"), ("lrp", "a")]
    for c in found:
        assert c.t_bonferroni == pytest.approx(min(1, 3 * c.t_p))


def test_the_difference_has_the_interval_of_the_paired_test():
    (found,) = compare({"a": A, "b": B}, [("a", "b")], units=range(25))
    known = stats.ttest_rel(A, B).confidence_interval()
    assert (found.difference, found.low, found.high) == pytest.approx(((A - B).mean(), known.low, known.high))
    (few,) = compare({"a": A[:7], "b": B[:7]}, [("a", "b")], units=range(7))
    assert few.difference == pytest.approx((A - B)[:7].mean())
    assert np.isnan([few.low, few.high, few.t_p]).all()


def test_the_best_method_is_better_only_if_it_is_surely_and_by_enough():
    clear = best_method({"lrp": A, "random": C}, units=range(25))
    assert (clear.method, clear.better, clear.n, clear.runner_up) == ("lrp", True, 25, "random")
    assert clear.lead.estimate == pytest.approx((C - A).mean())
    assert str(clear.lead) in str(clear)
    close = best_method({"lrp": A, "ig": A + RNG.normal(0.02, 0.1, 25), "random": C}, units=range(25))
    assert not close.better
    assert {close.method, close.runner_up} == {"lrp", "ig"}
    assert best_method({"lrp": A}, units=range(25)).runner_up is None


def test_a_tiny_difference_is_no_better_however_small_its_p():
    """An AUPC lower by 0.00007 on every slide is significant, and both are printed as 0.269."""
    aupc = {"lrp": A, "ig": A + np.abs(RNG.normal(6.6e-5, 3e-5, 25))}
    found = best_method(aupc, units=range(25))
    assert found.p < 0.001
    assert not found.better
    assert "0.01" in str(found)
    assert str(found.lead) in str(found)
    assert best_method(aupc, units=range(25), smallest=1e-5).better
    with pytest.raises(XmilError, match="smallest"):
        best_method(aupc, units=range(25), smallest=float("nan"))


def test_few_cases_have_no_interval_and_nothing_is_better():
    aupc = {"lrp": np.arange(14) * 0.01, "ig": 0.5 + np.arange(14) * 0.02}
    few = best_method(aupc, units=np.arange(14) // 2)
    assert (few.n, few.units, few.better, few.lead.exists) == (14, 7, False, False)
    assert "no interval: 7 cases, and 8 are needed" in str(few)
    (test,) = compare(aupc, [("lrp", "ig")], units=np.arange(14) // 2)
    assert test.difference == pytest.approx(-few.lead.estimate)
    assert np.isnan([test.low, test.t_p, test.t_holm, test.wilcoxon_p, test.cohens_d]).all()
    assert str(few).startswith("No method can be called better")
    assert best_method(aupc, units=np.arange(14)).better
    assert not bootstrap_mean(A[:7], units=range(7)).exists
    assert bootstrap_mean(A[:8], units=range(8)).exists
    assert str(bootstrap_mean(A[:7], units=range(7))) == f"{A[:7].mean():.3f} [no interval]"


def test_degenerate_differences_are_decided():
    (same,) = compare({"a": A, "b": A}, [("a", "b")], units=range(25))
    assert (same.t_p, same.wilcoxon_p, same.cohens_d, same.rank_biserial) == (1.0, 1.0, 0.0, 0.0)
    (shift,) = compare({"a": np.ones(8), "b": np.zeros(8)}, [("a", "b")], units=range(8))
    assert shift.t_p == 0.0
    assert shift.cohens_d == np.inf
    (none,) = compare({"a": [np.nan, 1.0], "b": [1.0, np.nan]}, [("a", "b")], units=range(2))
    assert none.n == 0
    assert np.isnan(none.t_holm)


def test_errors():
    with pytest.raises(XmilError, match="one value for each slide"):
        compare({"a": [1.0], "b": [1.0, 2.0]}, [("a", "b")], units=range(1))
    with pytest.raises(XmilError, match="Unknown method 'c'"):
        compare({"a": [1.0]}, [("a", "c")], units=range(1))
    with pytest.raises(XmilError, match="range"):
        holm([1.5])
    with pytest.raises(XmilError, match="one unit for each value"):
        compare({"a": A, "b": B}, [("a", "b")], units=["c"])
    with pytest.raises(XmilError, match="finite values"):
        bootstrap_mean([1.0, np.nan], units=range(2))


CASES, SLIDES = 20, 5
UNITS = np.repeat(np.arange(CASES), SLIDES)


def null_differences(rng: np.random.Generator, icc: float = 0.7) -> np.ndarray:
    """Differences of two equal methods on five slides of each case, correlated within cases."""
    case, slide = rng.normal(size=CASES), rng.normal(size=CASES * SLIDES)
    return np.sqrt(icc) * case[UNITS] + np.sqrt(1 - icc) * slide


def test_equal_methods_differ_as_rarely_as_the_level_says():
    """With slides as the unit about every fourth of these cohorts has a significant difference."""
    rng, zeros = np.random.default_rng(0), np.zeros(CASES * SLIDES)
    t = wilcoxon = flips = covered = better = 0
    for seed in range(200):
        d = null_differences(rng)
        (c,) = compare({"a": d, "b": zeros}, [("a", "b")], units=UNITS)
        t, wilcoxon = t + (c.t_p < 0.05), wilcoxon + (c.wilcoxon_p < 0.05)
        better += best_method({"a": d, "b": zeros}, units=UNITS).better
        flips += sign_flip_p(d, units=UNITS, rng=rng, draws=400) < 0.05
        interval = bootstrap_mean(d, units=UNITS, draws=400, seed=seed)
        covered += interval.low <= 0 <= interval.high
    assert max(t, wilcoxon, flips, better) <= 17
    assert covered >= 180


def test_few_units_have_all_their_flips_counted():
    rng = np.random.default_rng(0)
    assert sign_flip_p([0.1, 0.2, 0.3], units="abc", rng=rng) == 2 / 8
    assert sign_flip_p([0.1, 0.2, 0.3], units="abc", rng=rng, two_sided=False) == 1 / 8
    assert sign_flip_p([0.3, 0.1, -0.1], units="abc", rng=rng) == 6 / 8  # sums of 5, 3, 3 and 1 tenths
    assert sign_flip_p([0.0, 0.0], units="ab", rng=rng) == 1.0


def test_a_unit_counts_once():
    """Copies of a slide in its case change neither tests nor intervals."""
    (once,) = compare({"a": A, "b": B}, [("a", "b")], units=range(25))
    (many,) = compare(
        {"a": np.repeat(A, 3), "b": np.repeat(B, 3)}, [("a", "b")], units=np.repeat(range(25), 3)
    )
    assert (many.n, many.units, once.n, once.units) == (75, 25, 25, 25)
    assert (many.t_p, many.wilcoxon_p) == pytest.approx((once.t_p, once.wilcoxon_p))
    interval, copies = (
        bootstrap_mean(np.repeat(A, k), units=np.repeat(range(25), k), seed=3) for k in (1, 3)
    )
    assert (interval.low, interval.high) == pytest.approx((copies.low, copies.high))
    assert "25 slides of 5 cases" in str(best_method({"a": A, "b": B}, units=np.arange(25) // 5))


def test_shuffles_exchange_whole_units_of_a_stratum():
    units, strata = list("aabbccdd"), [0, 0, 0, 0, 1, 1, 1, 1]
    values = [1.0, 1.0, -1.0, -1.0, 2.0, 4.0, -3.0, -3.0]
    rows = shuffle_values(values, units=units, rng=np.random.default_rng(0), draws=80, strata=strata)
    assert rows.shape == (80, 8)
    assert {tuple(row) for row in rows[:, :4]} == {(1, 1, -1, -1), (-1, -1, 1, 1)}
    means = {tuple(row) for row in rows[:, 4:].reshape(80, 2, 2).mean(axis=2)}
    assert means == {(3, -3), (-3, 3)}
    assert len({tuple(row) for row in rows}) == 8  # and the two values of c change places


def test_units_of_other_sizes_exchange_means_of_their_own_spread():
    """Means of one value and of nine: after the shuffle, too, those of one lie farther out."""
    rng = np.random.default_rng(0)
    units = [f"one {i}" for i in range(40)] + [f"nine {i // 9}" for i in range(360)]
    rows = shuffle_values(rng.normal(size=400), units=units, rng=rng, draws=200)
    single, many = rows[:, :40].std(), rows[:, 40:].reshape(200, 40, 9).mean(axis=2).std()
    assert single == pytest.approx(1.0, abs=0.2)
    assert many == pytest.approx(1 / 3, abs=0.1)


def test_permutations_of_a_site_that_means_nothing_find_as_little_as_they_should():
    rng, hits = np.random.default_rng(1), 0
    site = np.repeat(np.arange(CASES) % 2, SLIDES)
    weights = np.where(site == 1, 1 / (site == 1).sum(), -1 / (site == 0).sum())
    for _ in range(100):
        y = null_differences(rng)
        hits += permutation_p(lambda rows: np.abs(rows @ weights), y, units=UNITS, rng=rng, draws=200) < 0.05
    assert hits <= 10


def test_bootstrap_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    inside = 0
    for i in range(200):
        found = bootstrap_mean(rng.normal(1.0, 1.0, size=40), units=range(40), draws=400, seed=i)
        inside += found.low <= 1.0 <= found.high
    assert 0.88 <= inside / 200 <= 0.99


def test_bootstrap_edges():
    one = bootstrap_mean([0.3, 0.5], units=["a", "a"])
    assert one.estimate == pytest.approx(0.4)
    assert np.isnan(one.low)
    values = np.array([1.0, 2.0, 9.0])
    assert bootstrap({"median": lambda w: median(w, values)}, units="abc")["median"].estimate == 2.0
    assert unit_means([1.0, 2.0, 3.0], ["b", "a", "b"]).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("group", [False, True])
def test_survival_is_tested_by_every_order_of_the_units(group):
    """All orders of seven units: the score is the sum over events of x less its mean over those at risk."""
    rng = np.random.default_rng(3)
    times, events = np.array([1.0, 2, 2, 3, 4, 5, 6]), np.array([1, 1, 1, 0, 1, 1, 0], dtype=bool)
    x = np.arange(7) % 2 == 0 if group else rng.normal(size=7) + 0.3 * times

    def score(values):
        return abs(sum(values[i] - values[times >= times[i]].mean() for i in np.flatnonzero(events)))

    own = score(x.astype(float))
    exact = np.mean([score(np.array(order, dtype=float)) >= own - 1e-9 for order in permutations(x)])
    assert hazard_p(x, times, events, units=range(7)) == pytest.approx(exact, abs=0.02)
    twice = [np.repeat(values, 2) for values in (x, times, events)]
    again = hazard_p(*twice, units=np.repeat(range(7), 2).tolist())  # two slides of a patient are one patient
    assert again == hazard_p(x, times, events, units=range(7))
    assert np.isnan(hazard_p(x, times, np.zeros(7), units=range(7)))


@pytest.mark.parametrize("slides", [1, 5])
def test_survival_is_found_in_few_null_cohorts(slides):
    """Of 100 cohorts of 20 patients at most 10 have p < 0.05."""
    low = np.zeros(2)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        own, times, events = rng.normal(size=20), rng.exponential(size=20), rng.random(20) < 0.7
        units = np.repeat(range(20), slides)
        x = own[units] + rng.normal(size=len(units))
        p = hazard_p(x, times[units], events[units], units=units.tolist())
        _, halves = median_halves(x, times[units], events[units], units=units.tolist())
        low += np.array([p, halves]) < 0.05
    assert (low <= 10).all()
