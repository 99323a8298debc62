"""One default under one name: a run measures against the checkpoint or what is named, never its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import xmil
from tests.runs.cohorts import command, make_cohort, scores, table, write_slide
from xmil.cli._app import run
from xmil.data import read_bag
from xmil.storage import read_explanations

KEY = "s003.parquet", "lrp:pos"


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    return make_cohort(tmp_path, 6)


def by_hand(folder: Path, **params: object) -> xmil.Explanation:
    net = xmil.load_model(folder / "m0.safetensors")
    return xmil.explain(net, read_bag(folder / "features" / "s003.h5"), target="pos", **params)


def stored(folder: Path, out: str = "run", method: str = "lrp") -> xmil.Explanation:
    path = folder / out / "slides" / "s003.parquet"
    return xmil.Explanation.load(path, method=method, target="pos")


def give_background(folder: Path) -> None:
    net = xmil.load_model(folder / "m0.safetensors")
    net.background = xmil.background(np.ones((5, 12), np.float32))
    xmil.save_model(net, folder / "m0.safetensors")


def test_the_folder_does_not_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slide has one map: in Python, in a run of 2 slides and in one of 60."""
    folder = make_cohort(tmp_path, 60, instances=6)
    assert run(command(folder, "--target", "pos")) == 0
    assert "no background" in capsys.readouterr().out
    few = tmp_path / "few"
    few.mkdir()
    for name in ("s003.h5", "s004.h5"):
        shutil.copy(folder / "features" / name, few / name)
    paths = ["--features", str(few), "--out", str(tmp_path / "two"), "--target", "pos"]
    assert run(["explain", "--model", str(folder / "m0.safetensors"), *paths]) == 0
    alone = by_hand(folder)
    for out in ("run", "two"):
        np.testing.assert_array_equal(scores(folder / out)[KEY], alone.scores)
    assert not (folder / "run" / "background.npz").exists()
    assert stored(folder).params["baseline"] is None
    assert alone.params["baseline"] is None


def test_what_was_measured_against_is_written_down(cohort: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command(cohort, "--target", "pos", "--methods", "lrp,one_added")) == 0
    words = "lrp without a background; one_added beside patches of the bag"
    assert {row["measured"] for row in table(cohort / "run" / "slides.csv")} == {words}
    give_background(cohort)
    assert run(command(cohort, "--target", "pos", "--methods", "lrp,one_added", out="own")) == 0
    lrp, added = "the mean of 5 patches of the checkpoint", "patches of the checkpoint"
    words = f"lrp compared with {lrp}; one_added beside {added}"
    assert {row["measured"] for row in table(cohort / "own" / "slides.csv")} == {words}
    capsys.readouterr()
    for path in ("own", "own/slides/s003.parquet", "m0.safetensors"):
        assert run(["inspect", str(cohort / path)]) == 0
        assert "mean of 5 patches" in capsys.readouterr().out
    figure = xmil.heatmap(stored(cohort, "own"), picture="panel")
    assert any(
        "mean of 5 patches of the checkpoint" in text.get_text()
        for text in figure.findobj()
        if hasattr(text, "get_text")
    )


def test_a_named_background_takes_the_place_of_the_models_own(
    cohort: Path, capsys: pytest.CaptureFixture[str], full: bool
) -> None:
    give_background(cohort)
    few = cohort / "few"
    shutil.copytree(cohort / "features", few, ignore=lambda _, names: sorted(names)[2:])
    named = command(cohort, "--target", "pos", "--methods", "lrp,one_added", "--background", str(few))
    assert run(named) == 0
    assert "40 patches" in capsys.readouterr().out
    for method in ("lrp", "one_added"):
        e = by_hand(cohort, method=method, background=few, **stored_seed(stored(cohort, method=method)))
        np.testing.assert_array_equal(stored(cohort, method=method).scores, e.scores)
        assert stored(cohort, method=method).params["background"] == e.params["background"]
        assert e.params["background"].startswith("user ")
    assert np.abs(stored(cohort).scores - by_hand(cohort).scores).max() > 1e-4
    if full:
        two = [*named[:-1], str(few), "--workers", "2"]
        two[two.index(str(cohort / "run"))] = str(cohort / "two")
        assert run(two) == 0
        here, there = scores(cohort / "run"), scores(cohort / "two")
        assert all(np.array_equal(here[key], there[key]) for key in here)


def stored_seed(e: xmil.Explanation) -> dict[str, object]:
    return {"seed": e.params["seed"]} if "seed" in e.params else {}


def test_every_slide_of_a_background_counts_alike(tmp_path: Path) -> None:
    large, small = np.zeros((900, 3)), np.ones((30, 3))
    background = xmil.background([large, small], keep=40)
    np.testing.assert_allclose(background.mean, 0.5)
    assert background.patches[:, 0].sum() == 20
    assert xmil.background([large, small], keep=100).patches[:, 0].sum() == 30  # all that it has


def test_a_run_that_grows_keeps_its_background(cohort: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = cohort / "few"
    shutil.copytree(cohort / "features", few, ignore=lambda _, names: sorted(names)[2:])

    def explained(*more: str) -> str:
        paths = ["--features", str(cohort / "features"), "--out", str(cohort / "run")]
        assert run(["explain", "--model", str(cohort / "m0.safetensors"), *paths, *more]) == 0
        return capsys.readouterr().out

    explained("--background", str(few))
    first = (cohort / "run" / "background.npz").read_bytes()
    write_slide(cohort / "features" / "s999.h5", np.random.default_rng(9), 20)
    write_slide(few / "s999.h5", np.random.default_rng(9), 20)
    assert "6 already done" in explained()
    assert (cohort / "run" / "background.npz").read_bytes() == first
    assert "6 already done" not in explained("--restart", "--background", str(few))
    assert (cohort / "run" / "background.npz").read_bytes() != first


def test_a_source_that_is_named_is_never_ignored(cohort: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command(cohort)) == 0
    few, narrow = cohort / "few", cohort / "narrow"
    shutil.copytree(cohort / "features", few, ignore=lambda _, names: sorted(names)[2:])
    assert run(command(cohort, "--background", str(few))) == 2  # the folder holds a run without
    assert "background" in capsys.readouterr().err
    narrow.mkdir()
    write_slide(narrow / "s.h5", np.random.default_rng(0), 5, width=3)
    assert run(command(cohort, "--background", str(narrow), out="other")) == 2
    assert "width 12" in capsys.readouterr().err
    assert run(command(cohort, "--background", str(cohort / "nowhere"), out="no")) == 2
    error = capsys.readouterr().err
    assert "--background" in error
    assert "nowhere" in error


def test_evaluate_measures_what_explain_gives(cohort: Path) -> None:
    background = ["--background", str(cohort / "features")]
    assert run(command(cohort, "--target", "pos", *background)) == 0
    words = ["--model", str(cohort / "m0.safetensors"), "--features", str(cohort / "features"), *background]
    steps = ["--methods", "lrp", "--steps", "4", "--orders", "2", "--modes", "remove"]
    assert run(["evaluate", *words, "--out", str(cohort / "measured"), *steps]) == 0
    for name in ("s001", "s002"):
        [e] = read_explanations(cohort / "measured" / "slides" / f"{name}.parquet")
        if e.target.name == "pos":
            np.testing.assert_array_equal(e.scores, scores(cohort / "run")[f"{name}.parquet", "lrp:pos"])
