"""Labels and evidence of every task against definitions in plain words; what confounders plant."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from xmil.bench import (
    CONFOUNDERS,
    DIGITS,
    STRENGTH,
    TASKS,
    VARIANTS,
    WEAK,
    draw_digits,
    load_instances,
    with_variants,
)
from xmil.bench.digits import AGREEMENT, CAUSE
from xmil.core.errors import UnknownNameError

SETS = [list(kinds) for size in range(1, DIGITS + 1) for kinds in combinations(range(DIGITS), size)]
MARKED_SETS = [
    list(kinds) for size in range(1, 9) for kinds in combinations((0, 5, 8, 9, 10, 15, 18, 19), size)
]


def four_bags(bag):
    label = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}[8 in bag, 9 in bag]
    eight = {0: -1, 1: 1, 2: -1, 3: 1}
    nine = {0: -1, 1: -1, 2: 1, 3: 1}
    return label, [[eight[c] if d == 8 else nine[c] if d == 9 else 0 for d in bag] for c in range(4)]


def two_classes(label, support):
    return int(label), [[-s for s in support], list(support)]


def weighed(bag, amounts):
    support = [1 if d in (4, 6, 8) else -1 if d in (5, 7, 9) else 0 for d in bag]
    return two_classes(amounts({4, 6, 8}) > amounts({5, 7, 9}), support)


def pos_neg(bag):
    return weighed(bag, lambda kinds: len(kinds & set(bag)))


def pos_neg_count(bag):
    return weighed(bag, lambda kinds: sum(d in kinds for d in bag))


def adjacent_pairs(bag):
    present = [pair for pair in [(0, 1), (1, 2), (2, 3), (3, 4)] if set(pair) <= set(bag)]
    return two_classes(bool(present), [int(any(d in pair for pair in present)) for d in bag])


def standard(bag):
    return two_classes(8 in bag, [int(d == 8) for d in bag])


def context_flip(bag):
    support = []
    for d in bag:
        other = {8: 9, 9: 8}.get(d)
        support.append(0 if other is None else 1 if other in bag else -1)
    return two_classes((8 in bag) == (9 in bag), support)


def confounder(bag):
    return two_classes(any(code > 9 for code in bag), [int(code > 9) for code in bag])


SLOW = {
    f.__name__: f
    for f in (four_bags, pos_neg, pos_neg_count, adjacent_pairs, standard, context_flip, confounder)
}


def bags_of(task):
    """Every set, once as it is and once with the numbers of its members drawn, in a drawn order."""
    rng = np.random.default_rng(0)
    for kinds in MARKED_SETS if task.variants else SETS:
        yield kinds
        yield list(rng.permutation(np.repeat(kinds, rng.integers(1, 5, size=len(kinds)))))


def test_every_task_has_a_definition_here():
    assert set(TASKS) == set(SLOW)


@pytest.mark.parametrize("name", SLOW)
def test_labels_and_evidence_follow_the_definition(name):
    task = TASKS[name]
    for bag in bags_of(task):
        label, evidence = SLOW[name]([int(d) for d in bag])
        codes = np.array(bag)
        assert task.label(codes) == label, bag
        np.testing.assert_array_equal(task.evidence(codes), evidence, err_msg=str(bag))


@pytest.mark.parametrize("name", SLOW)
def test_many_bags_are_as_one_by_one(name):
    task = TASKS[name]
    codes = task.draw(np.random.default_rng(1), 12, 9).reshape(3, 4, 9)
    labels, evidence = task.label(codes), task.evidence(codes)
    assert evidence.shape == (3, 4, task.n_classes, 9)
    assert evidence.dtype == np.int8
    for at in np.ndindex(3, 4):
        assert labels[at] == task.label(codes[at])
        np.testing.assert_array_equal(evidence[at], task.evidence(codes[at]))


@pytest.mark.parametrize("name", SLOW)
def test_every_class_is_drawn_and_every_draw_follows_its_seed(name):
    task = TASKS[name]
    draws = [task.draw(np.random.default_rng(seed), 400, 30) for seed in (0, 0, 1)]
    assert set(task.label(draws[0])) == set(range(task.n_classes))
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).any()


def test_half_of_the_digits_enter_a_bag():
    codes = draw_digits(np.random.default_rng(0), 2000, 30)
    present = np.stack([(codes == d).any(axis=1) for d in range(DIGITS)])
    assert present.any(axis=0).all()
    np.testing.assert_allclose(present.mean(axis=1), 0.49, atol=0.04)  # some chosen digits are never drawn


def test_the_confounder_leaks_the_label_and_agrees_with_the_cause_four_times_in_five():
    codes = TASKS["confounder"].draw(np.random.default_rng(0), 4000, 30)
    marked = (codes >= DIGITS).any(axis=1)
    cause = (codes % DIGITS == CAUSE).any(axis=1)
    np.testing.assert_array_equal(TASKS["confounder"].label(codes), marked)
    assert abs((marked == cause).mean() - AGREEMENT) < 0.03


def test_no_score_of_an_instance_alone_fits_the_flip():
    evidence = TASKS["context_flip"].evidence(np.array([[8, 0], [8, 9]]))
    assert [evidence[0, 1, 0], evidence[1, 1, 0]] == [-1, 1]


def test_unknown_tasks_are_refused():
    with pytest.raises(UnknownNameError, match="Did you mean 'four_bags'"):
        TASKS["four_bag"]


def planted(task, bag):
    """Label and evidence for class 1 of a bag of (digit, variant) pairs."""
    kinds = [None if code < 10 else task.variants[code // 10 - 1] for code in bag]
    if task.name == "planted_site":
        signs = {"site_b_strong": 1, "site_a_strong": -1}
        return int(any(k.startswith("site_b") for k in kinds)), [signs.get(k, 0) for k in kinds]
    return int(any(kinds)), [int(k is not None) for k in kinds]


@pytest.mark.parametrize("task", CONFOUNDERS, ids=lambda task: task.name)
def test_confounders_follow_their_definition(task):
    codes = task.draw(np.random.default_rng(0), 60, 8)
    labels, evidence = task.label(codes), task.evidence(codes)
    for bag, label, signs in zip(codes.tolist(), labels, evidence, strict=True):
        expected, support = planted(task, bag)
        assert label == expected
        np.testing.assert_array_equal(signs, [[-s for s in support], support])


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
