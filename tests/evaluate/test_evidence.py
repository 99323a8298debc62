"""The measures of one bag against their definitions, and those of many bags against those of one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xmil.core.errors import InputError
from xmil.evaluate import evidence as one
from xmil.evaluate.evidence_batch import MEASURES, score_evidence


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
    assert one.auprc2(evidence, scores) == pytest.approx(
        slow_two_sided(evidence, scores, slow_average_precision), nan_ok=True
    )
    assert one.auroc2(evidence, scores) == pytest.approx(
        slow_two_sided(evidence, scores, slow_auroc), nan_ok=True
    )


@settings(deadline=None)
@given(st.lists(bags, min_size=1, max_size=4))
def test_many_bags_score_as_one_by_one(many):
    for evidence, scores in many:
        found = score_evidence(torch.tensor([evidence]), torch.tensor([scores]))
        for name in MEASURES:
            expected = getattr(one, name)(evidence, scores)
            assert float(found[name][0]) == pytest.approx(expected, abs=1e-12, nan_ok=True), name


def test_batches_keep_their_shape():
    rng = np.random.default_rng(0)
    evidence, scores = rng.integers(-1, 2, (2, 3, 4, 9)), rng.normal(size=(2, 3, 4, 9))
    found = score_evidence(torch.from_numpy(evidence), torch.from_numpy(scores))
    expected = [
        [[one.auprc2(e, s) for e, s in zip(es, ss, strict=True)] for es, ss in zip(ess, sss, strict=True)]
        for ess, sss in zip(evidence, scores, strict=True)
    ]
    np.testing.assert_allclose(found["auprc2"], expected)


@pytest.mark.parametrize("measure", [getattr(one, name) for name in MEASURES])
def test_lengths_that_differ_and_nan_are_refused(measure):
    with pytest.raises(InputError, match="one length"):
        measure([1, 0], [1.0])
    with pytest.raises(InputError, match="finite"):
        measure([1, 0], [1.0, math.nan])


def test_batches_with_nan_are_refused():
    with pytest.raises(InputError, match="finite"):
        score_evidence(torch.tensor([[1, 0]]), torch.tensor([[1.0, math.nan]]))


def test_ndcg_of_the_worst_order_is_below_the_best():
    assert one.ndcg([1, 0, -1], [3, 2, 1]) == 1.0
    assert one.ndcg([1, 0, -1], [1, 2, 3]) < 0.7
    assert math.isnan(one.ndcg([0, 0], [1, 2]))
