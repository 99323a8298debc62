"""Runs of models without a background: the mean of the run's own slides, kept with the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import xmil
from tests.runs.cohorts import command, make_cohort, scores, write_slide
from xmil.cli._app import run
from xmil.data import read_bag
from xmil.runs import ensemble
from xmil.storage import read_explanations


@pytest.fixture
def cohort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ensemble, "ENOUGH", 5)
    return make_cohort(tmp_path, 6)


def by_hand(folder: Path, slide: str, **params: object) -> np.ndarray:
    net = xmil.load_model(folder / "m0.safetensors")
    net.background = xmil.background(folder / "features")
    return xmil.explain(net, read_bag(folder / "features" / f"{slide}.h5"), target="pos", **params).scores


def test_patches_are_measured_against_the_mean_of_the_folder(
    cohort: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(cohort, "--target", "pos")) == 0
    assert "against the mean of 120 patches of the slides of this run" in capsys.readouterr().out
    found = scores(cohort / "run")
    np.testing.assert_array_equal(found["s003.parquet", "lrp:pos"], by_hand(cohort, "s003"))
    assert np.abs(found["s003.parquet", "lrp:pos"] - by_hand(cohort, "s003", preset="exact")).max() > 1e-4
    e = xmil.Explanation.load(cohort / "run" / "slides" / "s003.parquet", method="lrp", target="pos")
    assert e.params["baseline"] == "mean of 120 patches"
    assert e.audit is not None
    assert abs(e.audit.baseline) > 0


def test_other_processes_have_the_same(cohort: Path) -> None:
    assert run(command(cohort, "--target", "pos")) == 0
    assert run(command(cohort, "--target", "pos", "--workers", "2", out="two")) == 0
    here, there = scores(cohort / "run"), scores(cohort / "two")
    assert all(np.array_equal(here[key], there[key]) for key in here)


def test_a_run_that_grows_keeps_its_background(cohort: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def explained(*more: str) -> str:
        paths = ["--features", str(cohort / "features"), "--out", str(cohort / "run")]
        assert run(["explain", "--model", str(cohort / "m0.safetensors"), *paths, *more]) == 0
        return capsys.readouterr().out

    explained()
    first = (cohort / "run" / "background.npz").read_bytes()
    write_slide(cohort / "features" / "s999.h5", np.random.default_rng(9), 20)
    assert "6 already done" in explained()
    assert (cohort / "run" / "background.npz").read_bytes() == first
    assert "6 already done" not in explained("--restart")
    assert (cohort / "run" / "background.npz").read_bytes() != first


def test_what_is_asked_for_comes_first(cohort: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = command(cohort, "--target", "pos", "--background", "none", out="none")
    assert run(none) == 0
    exact = by_hand(cohort, "s003", preset="exact")
    np.testing.assert_array_equal(scores(cohort / "none")["s003.parquet", "lrp:pos"], exact)
    assert not (cohort / "none" / "background.npz").exists()
    shutil.copytree(cohort / "features", cohort / "few", ignore=lambda _, names: sorted(names)[2:])
    assert run(command(cohort, "--target", "pos", "--background", str(cohort / "few"), out="few-run")) == 0
    assert f"mean of 40 patches of {cohort / 'few'}" in capsys.readouterr().out
    assert run(command(cohort, "--background", str(cohort / "nowhere"), out="no")) == 2
    assert "nowhere: no such file or folder of features" in capsys.readouterr().err


def test_a_source_that_is_asked_for_is_never_ignored(
    cohort: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(cohort)) == 0
    few, narrow = cohort / "few", cohort / "narrow"
    shutil.copytree(cohort / "features", few, ignore=lambda _, names: sorted(names)[2:])
    assert run(command(cohort, "--background", str(few))) == 2  # the folder holds a run against another
    assert "background" in capsys.readouterr().err
    narrow.mkdir()
    write_slide(narrow / "s.h5", np.random.default_rng(0), 5, width=3)
    assert run(command(cohort, "--background", str(narrow), out="other")) == 2
    assert "no readable features of width 12" in capsys.readouterr().err
    (cohort / "run" / "background.npz").write_bytes(b"PK\x03\x04 cut off")
    assert run(command(cohort)) == 0  # made again, the same


def test_the_models_own_background_stays(cohort: Path) -> None:
    net = xmil.load_model(cohort / "m0.safetensors")
    net.background = xmil.background(np.ones((5, 12), np.float32))
    xmil.save_model(net, cohort / "m0.safetensors")
    assert run(command(cohort)) == 0
    assert not (cohort / "run" / "background.npz").exists()


def test_few_slides_have_none_and_the_run_grows_without(
    cohort: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ensemble, "ENOUGH", 7)
    assert run(command(cohort)) == 0
    assert not (cohort / "run" / "background.npz").exists()
    monkeypatch.setattr(ensemble, "ENOUGH", 6)  # as if there were more slides now
    assert run(command(cohort)) == 0
    told = capsys.readouterr().out
    assert "began without a background" in told
    assert "6 already done" in told
    assert not (cohort / "run" / "background.npz").exists()


def test_evaluate_measures_what_explain_gives(cohort: Path) -> None:
    assert run(command(cohort, "--target", "pos")) == 0
    words = ["--model", str(cohort / "m0.safetensors"), "--features", str(cohort / "features")]
    steps = ["--methods", "lrp", "--steps", "4", "--orders", "2", "--modes", "remove"]
    assert run(["evaluate", *words, "--out", str(cohort / "measured"), *steps]) == 0
    for name in ("s001", "s002"):
        [e] = read_explanations(cohort / "measured" / "slides" / f"{name}.parquet")
        if e.target.name == "pos":
            np.testing.assert_array_equal(e.scores, scores(cohort / "run")[f"{name}.parquet", "lrp:pos"])
