"""Figures of predictions: drawn for the cases that plots break on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from xmil.evaluate.measures import Interval
from xmil.evaluate.prediction_plots import draw_calibration, draw_roc, draw_survival, draw_values

UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))


def looks_drawn(path: Path) -> bool:
    """A picture with more than one colour in it."""
    picture = imread(path)
    return picture.shape[0] > 300 and len(np.unique(picture[..., :3].reshape(-1, 3), axis=0)) > 3


@pytest.mark.parametrize("labels", [[True, False, True], [True, True, True], [False]])
def test_roc(labels: list[bool], tmp_path: Path) -> None:
    positive, scores = np.array(labels), np.linspace(0, 1, len(labels))
    draw_roc(
        {"tumour": (positive, scores)}, {"tumour": UNKNOWN}, tmp_path / "roc.png", cases=["a"] * len(labels)
    )
    assert looks_drawn(tmp_path / "roc.png")


def test_roc_of_many_classes(tmp_path: Path, rng: np.random.Generator) -> None:
    curves = {str(c): (rng.random(50) < 0.3, rng.random(50)) for c in range(12)}
    draw_roc(curves, dict.fromkeys(curves, UNKNOWN), tmp_path / "roc.png")
    assert looks_drawn(tmp_path / "roc.png")


@pytest.mark.parametrize("chances", [[0.0, 1.0], [0.5], [0.999, 1.0, 0.2]])
def test_calibration(chances: list[float], tmp_path: Path) -> None:
    hits = np.array([True] * len(chances))
    draw_calibration(hits, np.array(chances), UNKNOWN, tmp_path / "c.png", what="HPV+")
    assert looks_drawn(tmp_path / "c.png")


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [0.5, 2.0, 1e6]])
def test_values(values: list[float], tmp_path: Path) -> None:
    metrics = {"mae": UNKNOWN, "r2": UNKNOWN}
    draw_values(np.array(values), np.array(values), metrics, tmp_path / "v.png", name="Ki67")
    assert looks_drawn(tmp_path / "v.png")


@pytest.mark.parametrize(
    ("times", "events", "risks"),
    [
        ([1.0, 2.0, 3.0, 4.0], [1, 0, 1, 1], [3.0, 1.0, 2.0, 0.0]),
        ([1.0, 2.0, 3.0], [0, 0, 0], [3.0, 1.0, 2.0]),  # nobody had the event
        ([1.0, 2.0, 3.0], [1, 1, 0], [1.0, 1.0, 1.0]),  # all risks are equal
        ([5.0], [1], [0.3]),
        ([2.0, 2.0], [1, 1], [0.3, 0.4]),
    ],
)
def test_survival(times: list[float], events: list[int], risks: list[float], tmp_path: Path) -> None:
    draw_survival(np.array(times), np.array(events, dtype=bool), np.array(risks), UNKNOWN, tmp_path / "s.png")
    assert looks_drawn(tmp_path / "s.png")
