"""What outputs mean: numbers, ensembles, tables and words of each task."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xmil.core.errors import UnsupportedError
from xmil.core.task import TASKS
from xmil.methods import survival_risk

LOGITS = st.lists(st.floats(-30, 30), min_size=1, max_size=5)
NAMES = ["a", "b", "c"]


def test_every_task_is_there() -> None:
    assert list(TASKS) == ["classification", "cox", "multilabel", "regression", "survival"]


@settings(deadline=None)
@given(LOGITS)
def test_probabilities(z: list[float]) -> None:
    chances = TASKS["classification"].numbers([z])
    assert chances.sum() == pytest.approx(1)
    assert chances.shape == (1, max(2, len(z)))
    np.testing.assert_allclose(TASKS["multilabel"].numbers([z]), 1 / (1 + np.exp(-np.array([z]))))


@settings(deadline=None)
@given(st.lists(st.floats(-7, 7), min_size=1, max_size=4))  # beyond, 1 - p has lost its digits
def test_log_odds_are_those_of_the_probabilities(z: list[float]) -> None:
    task = TASKS["classification"]
    p = task.numbers([z])
    np.testing.assert_allclose(task.log_odds([z]), np.log(p / (1 - p)), atol=1e-4)


@settings(deadline=None)
@given(LOGITS)
def test_the_risk_is_minus_the_sum_of_the_survival_curve(z: list[float]) -> None:
    alive, expected = 1.0, 0.0
    for logit in z:
        alive *= 1 - 1 / (1 + np.exp(-logit))
        expected -= alive
    assert TASKS["survival"].numbers(z)[0] == pytest.approx(expected, rel=1e-9)
    explained = survival_risk(torch.tensor([z], dtype=torch.float64))
    assert float(explained) == pytest.approx(expected, rel=1e-9)


def test_large_logits_do_not_overflow() -> None:
    assert TASKS["classification"].numbers([800.0, -800.0]).tolist() == [1.0, 0.0]
    assert TASKS["multilabel"].numbers([-800.0]).tolist() == [0.0]
    assert TASKS["survival"].numbers([-800.0, 800.0]).tolist() == [-1.0]


def test_ensembles_average_outputs_and_risks() -> None:
    """Classes and values: those of the mean outputs. Risks: the mean of the models' risks."""
    each = np.array([[2.0, -1.0, 0.0], [-3.0, 0.5, 4.0]])
    mean = each.mean(axis=0)
    for name in ("classification", "multilabel", "regression"):
        np.testing.assert_allclose(TASKS[name].answer(each), TASKS[name].numbers(mean))
    task = TASKS["survival"]
    risks = [float(task.numbers(z)[0]) for z in each]
    assert float(task.answer(each)[0]) == pytest.approx(np.mean(risks))
    assert abs(float(task.numbers(mean)[0]) - np.mean(risks)) > 0.01
    assert float(task.spread(each[None])[0]) == pytest.approx(np.std(risks, ddof=1))


@pytest.mark.parametrize(
    ("task", "outputs", "label", "cells"),
    [
        ("classification", [0.0, 1.0, -1.0], 2, {"label": "c", "predicted": "b", "correct": False}),
        ("multilabel", [1.0, -1.0, 1.0], (1, 0, 1), {"label": "a+c", "predicted": "a+c", "correct": True}),
        ("regression", [1.5, 0.0, 2.0], (1.0, 2.0, 3.0), {"label:a": 1.0, "value:c": 2.0}),
        ("survival", [0.0, 0.0, 0.0], (7.0, False), {"time": 7.0, "event": False, "risk": -0.875}),
        ("survival", [0.0, 0.0, 0.0], None, {"time": None, "event": None, "S:b": 0.25}),
    ],
)
def test_tables(task: str, outputs: list[float], label: object, cells: dict[str, object]) -> None:
    meaning, each = TASKS[task], np.array([[outputs]])
    columns = {
        **meaning.describe_truth([label], NAMES),
        **meaning.describe(each, NAMES),
        **meaning.describe_outputs(each, NAMES),
        "correct": meaning.correct(each, [label]),
    }
    for key, value in cells.items():
        assert columns[key] == [value if not isinstance(value, float) else pytest.approx(value)], key


@pytest.mark.parametrize(
    ("task", "label", "text"),
    [
        ("classification", 1, "b"),
        ("multilabel", (0, 1, 1), "b+c"),
        ("regression", 2.5, 2.5),
        ("regression", (1.0, 2.5, 3.0), "1;2.5;3"),
        ("cox", (12.0, True), "12"),
        ("cox", (12.5, False), "12.5+"),
        ("survival", None, None),
    ],
)
def test_a_label_in_one_cell(task: str, label: object, text: object) -> None:
    assert TASKS[task].label_text(label, NAMES) == text


def test_names() -> None:
    assert TASKS["classification"].target_names(2, ["HPV-", "HPV+"]) == ("HPV-", "HPV+")
    assert TASKS["multilabel"].target_names(3) is None
    assert TASKS["classification"].names(1) == ["0", "1"]
    assert TASKS["classification"].names(3, ["only", "two"]) == ["0", "1", "2"]
    assert TASKS["survival"].names(2, None, (12.0,)) == ["0-12", "12+"]
    assert TASKS["survival"].number_names(["0-12", "12+"]) == ["risk"]
    assert TASKS["cox"].names(1) == ["risk"]
    assert [TASKS[name].count_targets(1) for name in TASKS] == [2, 1, 1, 1, 2]


def test_words() -> None:
    assert TASKS["classification"].ends("HPV+") == ("speaks against HPV+", "supports HPV+")
    assert TASKS["survival"].ends("risk") == ("lowers the risk", "raises the risk")
    assert TASKS["regression"].short_ends("TMB") == ("lowers TMB", "raises TMB")


def test_what_has_no_classes_decides_nothing() -> None:
    assert TASKS["cox"].decisions([[3.0], [-1.0]], 0).tolist() == [0, 0]
    assert TASKS["multilabel"].decisions([[3.0, -1.0], [-1.0, 2.0]], 1).tolist() == [0, 1]
    assert TASKS["classification"].decisions([[3.0], [-1.0]], 1).tolist() == [1, 0]
    with pytest.raises(UnsupportedError, match="no classes"):
        TASKS["survival"].log_odds([0.0])
