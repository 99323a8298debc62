"""`xmil explain --contexts --interactions`: what the run's folder then holds."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

import xmil
from tests.runs.cohorts import command, make_cohort
from xmil.cli._app import run
from xmil.core.errors import InputError
from xmil.data import read_bag

ASKED = ("--methods", "shapley,lrp", "--param", "lrp.contexts=6", "--config", "interactions=4", "--target",
"1",
         "--param", "shapley.permutations=8", "--config", "seed=3")  # fmt: skip


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_cohort(tmp_path_factory.mktemp("beyond"), 2, models=2)
    assert run(command(folder, *ASKED)) == 0
    return folder


def test_scores_carry_their_errors(cohort: Path) -> None:
    net = xmil.load_model(cohort / "m0.safetensors")
    bag = read_bag(cohort / "features" / "s001.h5")
    seed = [3, crc32(b"s001")]
    opened = xmil.open_run(cohort / "run")
    e = opened.explanation("s001", method="lrp")
    direct = xmil.explain(net, bag, method="lrp", target=1, contexts=6, seed=seed)
    np.testing.assert_array_equal(e.scores, direct.scores)
    np.testing.assert_array_equal(e.stable, direct.stable)
    assert any("means over 6 sub-bags" in line for line in e.warnings)
    shapley = opened.explanation("s001", method="shapley")
    direct = xmil.explain(net, bag, method="shapley", target=1, permutations=8, seed=seed)
    np.testing.assert_array_equal(shapley.stderr, direct.stderr)


def test_the_cost_is_said_once(cohort: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = ("--methods", "shapley,lrp", "--param", "shapley.exact=false")
    assert run(command(cohort, *asked, out="cost")) == 0
    said = [line for line in caplog.messages if line.startswith("shapley:")]
    assert len(said) == 2  # of two slides: before the first, and after its first orders
    assert re.fullmatch(r"shapley: \d+ patches on attnmil, 64 to 1000 permutations: about \d+ s.*", said[0])
    assert re.fullmatch(r"shapley: about \d+ permutations for the precision of 0.01, \d+ s in all", said[1])


def test_pairs_are_in_the_folder(cohort: Path) -> None:
    net = xmil.load_model(cohort / "m0.safetensors")
    found = xmil.open_run(cohort / "run").interactions("s000")
    bag = read_bag(cohort / "features" / "s000.h5")
    direct = xmil.interactions(net, bag, target=1, top=4, seed=[3, crc32(b"s000")])
    np.testing.assert_array_equal(found.pairs, direct.pairs)
    np.testing.assert_allclose(found.values, direct.values)
    assert found.lines().shape == (6, 4)
    assert sorted(path.name for path in (cohort / "run" / "interactions").iterdir()) == [
        "s000.1.parquet", "s001.1.parquet",
    ]  # fmt: skip


def test_pairs_are_drawn_and_go_to_qupath(cohort: Path) -> None:
    drawn = ["heatmap", str(cohort / "run"), "--methods", "lrp", "--pictures", "overlay", "--names", "s000"]
    lines, plain = cohort / "lines", cohort / "plain"
    assert run([*drawn, "--out", str(lines)]) == 0
    assert run([*drawn, "--out", str(plain), "--config", "pairs=0"]) == 0
    pairs = xmil.open_run(cohort / "run").interactions("s000")
    assert pairs.sure.any()
    found = json.loads((lines / "pairs" / f"s000.{pairs.target}.geojson").read_text())
    ends = np.array([np.ravel(feature["geometry"]["coordinates"]) for feature in found["features"]])
    np.testing.assert_allclose(ends, pairs.lines())
    name = f"s000.lrp.{pairs.target}.png"
    assert (lines / "overlay" / name).read_bytes() != (plain / "overlay" / name).read_bytes()
    assert not (plain / "pairs").exists()
    pairs.save(cohort / "run" / "interactions" / "s000.1.parquet")  # newer: what shows it is drawn again
    assert run([*drawn, "--out", str(lines)]) == 0
    assert xmil.open_run(lines).table()["files"].tolist() == [3]
    assert run([*drawn, "--out", str(plain), "--config", "pairs=-1"]) == 2


def test_it_goes_on_and_begins_anew(cohort: Path) -> None:
    shutil.copytree(cohort / "run", cohort / "again")
    pairs = cohort / "again" / "interactions" / "s000.1.parquet"
    before = pairs.stat().st_mtime_ns
    assert run(command(cohort, *ASKED, out="again")) == 0
    assert pairs.stat().st_mtime_ns == before
    assert run(command(cohort, "--methods", "lrp", "--restart", out="again")) == 0
    assert not pairs.exists()
    with pytest.raises(InputError, match="none fit for 's000'"):
        xmil.open_run(cohort / "again").interactions("s000")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--methods", "attention", "--param", "attention.contexts=8"), "contexts"),
        (("--config", "interactions=4", "--config", "by=case"), "of one slide"),
        (("--config", "interactions=1"), "two patches or more"),
    ],
)
def test_what_cannot_be(
    cohort: Path, more: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(cohort, *more, out="never")) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_an_ensemble_has_no_pairs_in_common(cohort: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command(cohort, "--config", "interactions=4", out="never", models=2)) == 2
    assert "leave out --config interactions=" in " ".join(capsys.readouterr().err.split())


def test_vectors_are_in_the_slides_files(tmp_path: Path) -> None:
    """Relevance of each feature, of one model and as the mean of two; its sums are the scores."""
    folder = make_cohort(tmp_path, 1, models=2)
    models = [folder / "m0.safetensors", folder / "m1.safetensors"]
    bag = read_bag(folder / "features" / "s000.h5")
    each = [
        xmil.explain(xmil.load_model(path), bag, method="lrp", target=1, feature_level=True)
        for path in models
    ]
    one = xmil.explain_slides(
        models[0],
        folder / "features",
        out=tmp_path / "one",
        methods=["lrp", "single"],
        target=1,
        params={"lrp": {"feature_level": True}},
    )
    found = one.explanation("s000", method="lrp")
    np.testing.assert_array_equal(found.relevance, each[0].relevance)
    np.testing.assert_allclose(found.relevance.sum(axis=1), found.scores, rtol=1e-4, atol=1e-6)
    assert one.explanation("s000", method="single").relevance is None
    two = xmil.explain_slides(
        models, folder / "features", out=tmp_path / "two", target=1, params={"lrp": {"feature_level": True}}
    )
    mean = (each[0].relevance + each[1].relevance) / 2
    np.testing.assert_allclose(two.explanation("s000", method="lrp").relevance, mean, rtol=1e-5, atol=1e-7)


def test_vectors_are_for_methods_that_have_them(cohort: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command(cohort, "--methods", "single", "--param", "lrp.feature_level=true", "--restart")) == 2
    assert "is for 'lrp'" in " ".join(capsys.readouterr().err.split())
