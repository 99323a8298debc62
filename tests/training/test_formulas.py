"""Losses, measures, bins and schedules against slow versions written from their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from xmil.core.errors import InputError
from xmil.training.config import Loss, Optim, make_config
from xmil.training.fit import bag_weights, cox_loss, hazard_nll, make_loss, measure
from xmil.training.loop import lr_factor
from xmil.training.training_set import Goal, Targets, make_goal


def goal_of(task, values, outputs, names=None):
    values = np.asarray(values, dtype=float)
    return Goal(task, outputs, names, values, values)


def test_hazard_likelihood_by_hand():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(8, 4)) * 2
    bins, events = rng.integers(0, 4, size=8), rng.integers(0, 2, size=8)
    expected = []
    for row, y, e in zip(z, bins, events, strict=True):
        h = 1 / (1 + np.exp(-row))
        alive = math.prod(1 - h[t] for t in range(y))  # through the bins before y
        expected.append(-math.log(alive * h[y]) if e else -math.log(alive * (1 - h[y])))
    targets = torch.tensor(np.stack([bins, events], axis=1)).double()
    np.testing.assert_allclose(hazard_nll(torch.tensor(z), targets), expected, rtol=1e-10)
    halved = hazard_nll(torch.tensor(z), targets, alpha=0.5)
    np.testing.assert_allclose(halved, np.where(events == 1, expected, np.array(expected) / 2), rtol=1e-10)


def test_cox_partial_likelihood_by_hand():
    rng = np.random.default_rng(1)
    r, times, events = rng.normal(size=7), np.array([3.0, 1, 4, 1, 5, 9, 2]), np.array([1, 1, 0, 1, 0, 1, 1])
    expected = [
        -(r[i] - math.log(sum(math.exp(r[j]) for j in range(7) if times[j] >= times[i]))) if events[i] else 0
        for i in range(7)
    ]
    found = cox_loss(torch.tensor(r)[:, None], torch.tensor(np.stack([times, events], axis=1)))
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    weights = bag_weights(goal_of("cox", np.stack([times, events], axis=1), 1), np.arange(7), Loss())
    assert weights.tolist() == events.tolist()


def test_auc_of_two_and_of_more_classes():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(3)
    z, labels = rng.normal(size=(40, 3)), np.arange(40) % 3
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    found = measure(z, np.arange(40), goal_of("classification", labels[:, None], 3))
    assert found["auc"] == pytest.approx(roc_auc_score(labels, p, multi_class="ovr"))
    two = measure(z[:, :2], np.arange(40), goal_of("classification", (labels > 0)[:, None], 2))
    assert two["auc"] == pytest.approx(roc_auc_score(labels > 0, z[:, 1] - z[:, 0]))
    assert two["accuracy"] == pytest.approx(((z[:, 1] > z[:, 0]) == (labels > 0)).mean())


def test_regression_measures():
    truth, guess = np.array([1.0, 2, 4, 8]), np.array([1.5, 2, 3, 7])
    found = measure(guess[:, None], np.arange(4), goal_of("regression", truth[:, None], 1))
    assert found["mae"] == pytest.approx(0.625)
    assert found["r2"] == pytest.approx(1 - 2.25 / ((truth - truth.mean()) ** 2).sum())
    assert found["spearman"] == pytest.approx(1.0)


def test_balanced_weights_give_each_class_the_same_total():
    goal = goal_of("classification", np.array([0, 0, 0, 1, 1, 0])[:, None], 2, ("a", "b"))
    weights = bag_weights(goal, np.arange(4), Loss(class_weights="balanced"))  # three of a, one of b
    assert weights[:3].sum() == pytest.approx(2.0)
    assert weights[3].item() == pytest.approx(2.0)
    assert bag_weights(goal, np.arange(4), Loss(class_weights=[1.0, 5.0])).tolist() == [1, 1, 1, 5, 5, 1]
    with pytest.raises(InputError, match=r"2 numbers\. Got 3"):
        bag_weights(goal, np.arange(4), Loss(class_weights=[1.0, 1.0, 1.0]))
    with pytest.raises(InputError, match="is for classification"):
        bag_weights(goal_of("regression", [[1.0]], 1), np.arange(1), Loss(class_weights="balanced"))
    with pytest.raises(InputError, match="is for regression"):
        make_loss(goal, Loss(name="mae"))


def test_bins_and_reference_come_from_the_training_bags_alone():
    values = np.array([[1, 1], [2, 1], [3, 1], [4, 1], [100, 1], [2.5, 0]], dtype=float)
    targets = Targets("survival", values)
    goal = make_goal(targets, np.arange(4), make_config({"task": "survival"}))
    assert goal.time_bins == (1.75, 2.5, 3.25)
    assert goal.values[:, 0].tolist() == [0, 1, 2, 3, 3, 2]
    regression = Targets("regression", values[:, :1], ("value",))
    assert make_goal(regression, np.arange(4), make_config({"task": "regression"})).reference == 2.5
    with pytest.raises(InputError, match="too few different event times"):
        make_goal(targets, np.array([0, 5]), make_config({"task": "survival"}))
    with pytest.raises(InputError, match="No training bag has an event"):
        make_goal(targets, np.array([5]), make_config({"task": "cox", "train": {"batch": 4}}))


def test_a_class_without_training_bags_is_refused():
    targets = Targets("classification", np.array([[0.0], [0], [1]]), ("a", "b"))
    with pytest.raises(InputError, match="'b' has no bag in the training set"):
        make_goal(targets, np.arange(2), make_config({}))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "step", "step_epochs": 2, "gamma": 0.5}, [1, 1, 0.5, 0.5]),
        (
            {"schedule": "step", "step_epochs": 1, "gamma": 0.1, "lr": 1.0, "min_lr": 0.05},
            [1, 0.1, 0.05, 0.05],
        ),
        ({"schedule": "constant", "warmup_epochs": 2}, [0.5, 1, 1, 1]),
        (
            {"schedule": "cosine"},
            [1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2],
        ),
    ],
)
def test_schedules(settings, expected):
    found = [lr_factor(epoch, Optim(**settings), epochs=4) for epoch in range(4)]
    np.testing.assert_allclose(found, expected)
