"""Faithfulness of many bags at once against flip curves one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import xmil
from xmil.bench import Block, Exam, grade_faithfulness, keep_correct, method_entry
from xmil.evaluate import Flips, necessity, redrawn, sufficiency
from xmil.evaluate.statistics import spearman


@pytest.fixture(params=["attnmil", "transmil"])
def exam(request, rng):
    params = {"dim": 16} if request.param == "attnmil" else {"dim": 16, "heads": 2}
    model = xmil.create_model(request.param, in_dim=6, n_classes=3, seed=1, **params)
    x = torch.from_numpy(rng.normal(size=(4, 11, 6)).astype(np.float32) * 3)
    labels = model(x).argmax(dim=1).numpy()
    block = Block(x, labels, None, tuple("abcd"))
    return Exam("drawn", request.param, 0, 7, 3, model, (block,))


@pytest.mark.parametrize("name", ["lrp", "constant", "random"])
def test_every_measure_is_that_of_a_single_bag(exam, name):
    entry = method_entry(name)
    (block,) = exam.blocks
    scores = entry.scores(exam, block)
    found = grade_faithfulness(exam, entry, [scores])
    for i in range(len(block)):
        s, target = scores[i, block.labels[i]].double().numpy(), int(block.labels[i])
        bag = xmil.Bag(block.x[i].numpy(), slide_id=block.names[i])
        flips = Flips(exam.model, bag, target=target)
        both = [(s, "morf"), (s, "lerf")]
        morf, lerf = flips.curves(both, steps="each", over_ties=True)
        hidden = Flips(exam.model, bag, target=target, mode="mask")
        (masked,) = hidden.curves(both[:1], steps="each", over_ties=True)
        assert found["aupc"][i] == pytest.approx(morf.aupc, abs=1e-5)
        assert found["srg"][i] == pytest.approx(lerf.aupc - morf.aupc, abs=1e-5)
        assert found["aupc_mask"][i] == pytest.approx(masked.aupc, abs=1e-5)
        if name != "constant":
            kept = sufficiency(exam.model, block.x[i], s, target=target)
            lost = necessity(exam.model, block.x[i], s, target=target)
            assert (found["sufficiency"][i], found["necessity"][i]) == pytest.approx((kept, lost), abs=1e-5)
        assert found["flipped_at_zero"][i] == (morf.flipped_at_zero and bool((s <= 0).any()))
        assert found["needed"][i] == (1.0 if morf.flipped is None else morf.flipped / 11)
        least = xmil.minimal_set(exam.model, block.x[i], target=target, evaluations=500).upper
        if least is None:
            assert np.isnan(found["minimal"][i])
        else:
            assert found["minimal"][i] == pytest.approx(min(least / 11 / found["needed"][i], 1.0))


def test_randomisation_is_the_mean_rank_correlation(exam):
    entry = method_entry("lrp")
    (block,) = exam.blocks
    found = grade_faithfulness(exam, entry, [entry.scores(exam, block)])["randomisation"]
    for i, target in enumerate(block.labels.tolist()):
        models = [exam.model, *(redrawn(exam.model, seed=7 + k) for k in range(2))]
        first, *rest = [xmil.explain(m, block.x[i], target=target).scores for m in models]
        slow = np.mean([abs(spearman(first, other)) for other in rest])
        assert found[i] == pytest.approx(slow, abs=0.02)  # near ties may swap ranks between batch sizes


def test_what_ignores_the_model_fails_the_randomisation(exam):
    for name in ("random", "constant"):
        entry = method_entry(name)
        values = grade_faithfulness(exam, entry, [entry.scores(exam, b) for b in exam.blocks])
        np.testing.assert_allclose(values["randomisation"], 1.0)


def test_only_bags_that_are_classified_right(exam):
    (block,) = exam.blocks
    wrong = block.labels.copy()
    wrong[1] = (wrong[1] + 1) % 3
    mixed = Exam("m", "m", 0, 0, 3, exam.model, (Block(block.x, wrong, None, block.names),))
    assert keep_correct(mixed, 10).blocks[0].names == ("a", "c", "d")
    assert keep_correct(mixed, 2).blocks[0].names == ("a", "c")


def test_scores_without_an_order_gain_nothing(exam):
    """All orders of equal scores count, so that none of them is lucky."""
    entry = method_entry("constant")
    (block,) = exam.blocks
    values = grade_faithfulness(exam, entry, [entry.scores(exam, block)])
    np.testing.assert_array_equal(values["srg"], 0.0)
    for i, target in enumerate(block.labels.tolist()):
        flips = Flips(exam.model, block.x[i], target=target)
        alone = flips.values_of([np.arange(11) == k for k in range(11)])  # a tenth of 11 is one of them
        assert abs(values["sufficiency"][i] - np.mean(alone)) < np.ptp(alone) / 8
