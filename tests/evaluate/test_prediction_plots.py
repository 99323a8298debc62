"""Figures of predictions: drawn for the cases that plots break on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from scipy.stats import binomtest

from xmil.evaluate import (
    calibration_bins,
    draw_calibration,
    draw_roc,
    draw_survival,
    draw_values,
    median_halves,
)
from xmil.evaluate.statistics import Interval

UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))


def looks_drawn(path: Path) -> bool:
    """A picture with more than one colour in it."""
    picture = imread(path)
    return picture.shape[0] > 300 and len(np.unique(picture[..., :3].reshape(-1, 3), axis=0)) > 3


@pytest.mark.parametrize("labels", [[True, False, True], [True, True, True], [False]])
def test_roc(labels: list[bool], tmp_path: Path) -> None:
    positive, scores = np.array(labels), np.linspace(0, 1, len(labels))
    draw_roc(
        {"tumour": (positive, scores)}, {"tumour": UNKNOWN}, tmp_path / "roc.png", units=["a"] * len(labels)
    )
    assert looks_drawn(tmp_path / "roc.png")


def test_a_band_needs_an_interval(tmp_path: Path, rng: np.random.Generator, monkeypatch) -> None:
    """One positive case of 50: the AUROC has no interval, so its curve has no band."""
    bands = []
    monkeypatch.setattr("matplotlib.axes.Axes.fill_between", lambda *_, **about: bands.append(about))
    curves = {"tumour": (np.arange(50) < 1, rng.random(50))}
    for area in (UNKNOWN, Interval(0.5, 0.2, 0.8)):
        draw_roc(curves, {"tumour": area}, tmp_path / "roc.png", units=range(50))
    assert len(bands) == 1


def test_roc_of_many_classes(tmp_path: Path, rng: np.random.Generator) -> None:
    curves = {str(c): (rng.random(50) < 0.3, rng.random(50)) for c in range(12)}
    draw_roc(curves, dict.fromkeys(curves, UNKNOWN), tmp_path / "roc.png", units=range(50))
    assert looks_drawn(tmp_path / "roc.png")


@pytest.mark.parametrize("chances", [[0.0, 1.0], [0.5], [0.999, 1.0, 0.2]])
def test_calibration(chances: list[float], tmp_path: Path) -> None:
    hits = np.array([True] * len(chances))
    draw_calibration(
        hits, np.array(chances), UNKNOWN, tmp_path / "c.png", what="HPV+", units=range(len(hits))
    )
    assert looks_drawn(tmp_path / "c.png")


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [0.5, 2.0, 1e6]])
def test_values(values: list[float], tmp_path: Path) -> None:
    metrics = {"mae": UNKNOWN, "r2": UNKNOWN}
    shown = np.array(values)
    draw_values(shown, shown, metrics, tmp_path / "v.png", name="Ki67", units=range(len(values)))
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
    draw_survival(
        np.array(times),
        np.array(events, dtype=bool),
        np.array(risks),
        UNKNOWN,
        tmp_path / "s.png",
        units=range(len(times)),
    )
    assert looks_drawn(tmp_path / "s.png")


def test_a_patient_counts_once_in_the_survival_curves(rng: np.random.Generator) -> None:
    times, events, risks = rng.exponential(size=20), rng.random(20) < 0.6, rng.normal(size=20)
    once, p = median_halves(risks, times, events, units=range(20))
    shift = np.tile([-0.3, 0.3], 20)  # two slides of a case, whose mean risk is the case's
    each = (np.repeat(risks, 2) + shift, np.repeat(times, 2), np.repeat(events, 2))
    twice, again = median_halves(*each, units=np.repeat(range(20), 2))
    assert again == pytest.approx(p)
    assert [(c.n, c.slides) for c in (*once, *twice)] == [(10, 10), (10, 10), (10, 20), (10, 20)]
    for a, b in zip(once, twice, strict=True):
        np.testing.assert_allclose([a.share, a.low, a.high], [b.share, b.low, b.high])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # how lifelines calls pandas
def test_survival_curves_are_those_of_lifelines(rng: np.random.Generator) -> None:
    lifelines = pytest.importorskip("lifelines", reason="the extra 'insight' is not installed")
    from lifelines.statistics import logrank_test

    times, events, risks = rng.exponential(size=30).round(1) + 0.1, rng.random(30) < 0.6, rng.normal(size=30)
    curves, p = median_halves(risks, times, events, units=range(30))
    high = risks > np.median(risks)
    halves = (times[high], times[~high], events[high], events[~high])
    assert p == pytest.approx(logrank_test(*halves).p_value, abs=0.05)
    for curve, rows in zip(curves, (high, ~high), strict=True):
        known = lifelines.KaplanMeierFitter().fit(times[rows], events[rows])
        share = known.survival_function_at_times(curve.times).to_numpy()
        np.testing.assert_allclose(curve.share, share, atol=1e-12)
        band = known.confidence_interval_survival_function_.to_numpy()
        inside = (share > 0) & (share < 1)
        np.testing.assert_allclose(np.stack([curve.low, curve.high], axis=1)[inside], band[inside], atol=1e-9)
    few, _ = median_halves(risks[:14], times[:14], events[:14], units=range(14))
    assert np.isnan(np.concatenate([c.low for c in few])).all()  # seven cases have no interval


def test_calibration_bars_count_cases(rng: np.random.Generator) -> None:
    hits, chances = rng.random(60) < 0.5, rng.random(60)
    alone = np.array(calibration_bins(hits, chances, range(60)))
    for mean, share, low, high in alone:
        inside = np.minimum((chances * 10).astype(int), 9) == int(mean * 10)
        known = binomtest(int(hits[inside].sum()), int(inside.sum())).proportion_ci(method="wilson")
        assert (share, low, high) == pytest.approx((hits[inside].mean(), known.low, known.high))
    cases = np.repeat(np.arange(60), 3).tolist()
    thrice = np.array(calibration_bins(np.repeat(hits, 3), np.repeat(chances, 3), cases))
    np.testing.assert_allclose(thrice, alone)
