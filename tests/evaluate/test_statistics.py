"""Paired tests against SciPy's own paired forms, corrections against their definitions, degenerate input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from xmil.core.errors import XmilError
from xmil.evaluate.statistics import best_method, bonferroni, compare, holm, paper_pairs

RNG = np.random.default_rng(0)
A, B, C = RNG.uniform(size=(3, 25))
C = C + 0.8


def test_tests_are_the_paired_ones():
    (found,) = compare({"a": A, "b": B}, [("a", "b")])
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
    found = compare({"lrp": A, "a": B, "random": C}, pairs)
    assert [(c.first, c.second) for c in found] == [("a", "random"), ("lrp", "random"), ("lrp", "a")]
    for c in found:
        assert c.t_bonferroni == pytest.approx(min(1, 3 * c.t_p))


def test_best_method_and_its_significance():
    clear = best_method({"lrp": A, "random": C})
    assert (clear.method, clear.significant, clear.n) == ("lrp", True, 25)
    close = best_method({"lrp": A, "ig": A + RNG.normal(0.001, 0.1, 25), "random": C})
    assert not close.significant
    assert close.runner_up in ("lrp", "ig")
    assert "not significantly lower" in str(close)
    assert "nothing to compare" in str(best_method({"lrp": A}))
    assert "too few slides" in str(best_method({"lrp": [0.1], "ig": [0.2]}))


def test_degenerate_differences_are_decided():
    (same,) = compare({"a": A, "b": A}, [("a", "b")])
    assert (same.t_p, same.wilcoxon_p, same.cohens_d, same.rank_biserial) == (1.0, 1.0, 0.0, 0.0)
    (shift,) = compare({"a": np.ones(3), "b": np.zeros(3)}, [("a", "b")])
    assert shift.t_p == 0.0
    assert shift.cohens_d == np.inf
    (none,) = compare({"a": [np.nan, 1.0], "b": [1.0, np.nan]}, [("a", "b")])
    assert none.n == 0
    assert np.isnan(none.t_holm)


def test_errors():
    with pytest.raises(XmilError, match="one value for each slide"):
        compare({"a": [1.0], "b": [1.0, 2.0]}, [("a", "b")])
    with pytest.raises(XmilError, match="Unknown method 'c'"):
        compare({"a": [1.0]}, [("a", "c")])
    with pytest.raises(XmilError, match="range"):
        holm([1.5])
