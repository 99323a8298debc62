"""Planted confounders: labels and evidence by their slow definitions, and variants that change instances."""

from __future__ import annotations

import numpy as np
import pytest

from xmil.bench.confounders import CONFOUNDERS
from xmil.toy.instances import load_instances
from xmil.toy.variants import STRENGTH, VARIANTS, WEAK, with_variants


def slow(task, bag):
    """Label and evidence for class 1 of a bag of (digit, variant) pairs."""
    kinds = [None if code < 10 else task.variants[code // 10 - 1] for code in bag]
    if task.name == "planted_site":
        signs = {"site_b_strong": 1, "site_a_strong": -1}
        return int(any(k.startswith("site_b") for k in kinds)), [signs.get(k, 0) for k in kinds]
    return int(any(kinds)), [int(k is not None) for k in kinds]


@pytest.mark.parametrize("task", CONFOUNDERS, ids=lambda task: task.name)
def test_labels_and_evidence_follow_the_definition(task):
    codes = task.draw(np.random.default_rng(0), 60, 8)
    labels, evidence = task.label(codes), task.evidence(codes)
    for bag, label, given in zip(codes.tolist(), labels, evidence, strict=True):
        expected, support = slow(task, bag)
        assert label == expected
        np.testing.assert_array_equal(given, [[-s for s in support], support])


def test_a_site_keeps_to_its_bags_and_agrees_with_the_digits_in_four_of_five():
    task = next(t for t in CONFOUNDERS if t.name == "planted_site")
    codes = task.draw(np.random.default_rng(1), 3000, 12)
    second = codes // 10 > 2
    assert (second.all(axis=1) | ~second.any(axis=1)).all()
    cause = (codes % 10 == 8).any(axis=1)
    assert abs((task.label(codes) == cause).mean() - 0.8) < 0.03


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("source", ["digits", "onehot"])
def test_a_variant_changes_every_instance_and_no_digit(name, source):
    plain = load_instances(source)
    both = with_variants(plain, (name,), 0)
    n = len(plain.digits)
    np.testing.assert_array_equal(both.features[:n], plain.features)
    np.testing.assert_array_equal(both.digits[n:], plain.digits)
    assert (both.features[n:] != plain.features).any(axis=1).all()


def test_planted_images_are_encoded_again():
    plain = load_instances("digits")
    both = with_variants(plain, ("blur",), 0)
    n = len(plain.digits)
    np.testing.assert_array_equal(both.features[n:], plain.encode(both.images[n:]))
    middle = both.images[n, 3, 3]
    assert middle == np.rint(plain.images[0, 2:5, 2:5].mean())


def test_a_weak_site_effect_is_a_quarter_of_a_strong_one():
    plain = load_instances("onehot")
    n = len(plain.digits)
    both = with_variants(plain, ("site_a_weak", "site_a_strong"), 0)
    weak, strong = both.features[n : 2 * n] - plain.features, both.features[2 * n :] - plain.features
    np.testing.assert_allclose(weak, WEAK * strong, atol=1e-5)
    spread = np.linalg.norm(plain.features - plain.features.mean(axis=0), axis=1).mean()
    np.testing.assert_allclose(np.linalg.norm(strong, axis=1), STRENGTH * spread, rtol=1e-4)
