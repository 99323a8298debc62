"""Measures against their definitions and scikit-learn, for one bag and for many at once."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import average_precision_score, ndcg_score, roc_auc_score

from xmil.core.errors import InputError
from xmil.evaluate import MEASURES, auprc2, average_precision, score_bag, score_evidence


def slow_average_precision(labels, scores):
    """Sum over falling thresholds of the recall gained times the precision reached."""
    area, recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = [label for label, score in zip(labels, scores, strict=True) if score >= threshold]
        reached = sum(chosen) / sum(labels)
        area += (reached - recall) * sum(chosen) / len(chosen)
        recall = reached
    return area


def slow_auroc(labels, scores):
    """The share of positive-negative pairs in the right order, ties counting half."""
    pairs = [
        (p > q) + (p == q) / 2
        for p, a in zip(scores, labels, strict=True)
        for q, b in zip(scores, labels, strict=True)
        if a and not b
    ]
    return sum(pairs) / len(pairs)


def slow_two_sided(evidence, scores, measure):
    halves = [([e > 0 for e in evidence], scores), ([e < 0 for e in evidence], [-s for s in scores])]
    values = [measure(labels, ranked) for labels, ranked in halves if any(labels) and not all(labels)]
    return sum(values) / len(values) if values else math.nan


bags = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.lists(st.sampled_from([-1, 0, 1]), min_size=n, max_size=n),
        st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0]), min_size=n, max_size=n),
    )
)


@settings(deadline=None)
@given(bags)
def test_two_sided_measures_follow_their_definition(bag):
    evidence, scores = bag
    measures = score_bag(evidence, scores)
    assert measures["auprc2"] == auprc2(evidence, scores) or math.isnan(measures["auprc2"])
    for name, slow in (("auprc2", slow_average_precision), ("auroc2", slow_auroc)):
        assert measures[name] == pytest.approx(slow_two_sided(evidence, scores, slow), nan_ok=True)


@settings(deadline=None)
@given(bags)
def test_measures_are_those_of_scikit_learn_and_scipy(bag):
    evidence, scores = bag
    measures = score_bag(evidence, scores)
    for name, library in (("auprc2", average_precision_score), ("auroc2", roc_auc_score)):
        assert measures[name] == pytest.approx(slow_two_sided(evidence, scores, library), nan_ok=True)
    if len(set(evidence)) == 1:
        assert all(math.isnan(measures[name]) for name in ("ndcg", "pearson", "spearman"))
        return
    gains = np.array(evidence) - min(evidence)
    assert measures["ndcg"] == pytest.approx(ndcg_score([gains], [scores]))
    for name, library in (("pearson", pearsonr), ("spearman", spearmanr)):
        expected = 0.0 if len(set(scores)) == 1 else library(evidence, scores).statistic
        assert measures[name] == pytest.approx(expected, abs=1e-12)
    labels = [e > 0 for e in evidence]
    expected = average_precision_score(labels, scores) if any(labels) else math.nan
    assert average_precision(labels, scores) == pytest.approx(expected, nan_ok=True)


def test_batches_keep_their_shape():
    rng = np.random.default_rng(0)
    evidence, scores = rng.integers(-1, 2, (2, 3, 4, 9)), rng.normal(size=(2, 3, 4, 9))
    batch = score_evidence(torch.from_numpy(evidence), torch.from_numpy(scores))
    assert list(batch) == list(MEASURES)
    for name, values in batch.items():
        assert values.shape == (2, 3, 4)
        for place in np.ndindex(2, 3, 4):
            expected = score_bag(evidence[place], scores[place])[name]
            assert float(values[place]) == pytest.approx(expected, nan_ok=True)


def test_lengths_that_differ_and_nan_are_refused():
    with pytest.raises(InputError, match="one length"):
        score_bag([1, 0], [1.0])
    with pytest.raises(InputError, match="finite"):
        auprc2([1, 0], [1.0, math.nan])
    with pytest.raises(InputError, match="finite"):
        score_evidence(torch.tensor([[1, 0]]), torch.tensor([[1.0, math.nan]]))
