"""Predictions from drawn patches: the means over draws that belong to the slide and the seed."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

import xmil
from tests.runs.cohorts import make_cohort
from xmil.cli._app import run
from xmil.core.errors import InputError
from xmil.runs.predict import draw_samples
from xmil.runs.requests import PredictRequest


def sampling(instances: int = 0, repetitions: int = 1, seed: int = 0) -> PredictRequest:
    options = {"instances": instances, "repetitions": repetitions, "seed": seed}
    return PredictRequest.build(model="m.pt", features="features", out="out", **options)


def test_draws() -> None:
    bag = xmil.Bag(np.arange(20, dtype=np.float32)[:, None], slide_id="s")
    found = draw_samples(bag, sampling(6, 3, seed=1))
    again = draw_samples(bag, sampling(6, 3, seed=1))
    rows = [part.features[:, 0] for part in found]
    for one, other in zip(rows, again, strict=True):
        np.testing.assert_array_equal(one, other.features[:, 0])
        assert len(set(one)) == 6
        assert (np.diff(one) > 0).all()
    assert len({tuple(one) for one in rows}) == 3
    other_slide = xmil.Bag(bag.features, slide_id="t")
    assert tuple(draw_samples(other_slide, sampling(6, 1, seed=1))[0].features[:, 0]) != tuple(rows[0])
    assert draw_samples(bag, sampling(20, 4)) == [bag]
    assert draw_samples(bag, sampling()) == [bag]


@pytest.mark.parametrize(("instances", "repetitions"), [(-1, 1), (0, 3), (4, 0)])
def test_what_cannot_be_drawn(instances: int, repetitions: int) -> None:
    with pytest.raises(InputError, match="parameter of predict"):
        sampling(instances, repetitions)


def test_predictions_are_the_means_over_draws(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 2)
    asked = [
        "--config",
        "instances=5",
        "--config",
        "repetitions=4",
        "--config",
        "seed=2",
        "--out",
        str(tmp_path / "told"),
    ]
    places = ["--model", str(folder / "m0.safetensors"), "--features", str(folder / "features")]
    assert run(["predict", *places, *asked]) == 0
    model = xmil.load_model(folder / "m0.safetensors")
    for row in csv.DictReader((tmp_path / "told" / "predictions.csv").read_text().splitlines()):
        bag = xmil.read_bag(folder / "features" / f"{row['slide_id']}.h5")
        draws = draw_samples(bag, sampling(5, 4, seed=2))
        with torch.no_grad():
            logits = torch.cat([model(torch.from_numpy(part.features)[None]) for part in draws]).mean(dim=0)
        expected = torch.softmax(logits, dim=0)[1]
        assert float(row["p:pos"]) == pytest.approx(float(expected), abs=1e-4)
