"""Runs of 0.2.0 open, draw, export, take further methods and verify; unfinished ones ask for --restart."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import xmil
from tests.runs.cohorts import scores
from tests.runs.runs_of_0_2 import commands, copy_runs
from tests.viewer.asking import ask
from xmil.cli._app import run
from xmil.runs.verify import verify_run
from xmil.viewer.app import create_app
from xmil.viewer.collection import Collection

KINDS = {
    "explain": "explain",
    "contexts": "explain",
    "interactions": "explain",
    "over_slides": "explain",
    "over_slides/tiles": "tile",
    "over_slides/features": "embed",
    "over_slides/heatmaps": "heatmap",
    "evaluate": "evaluate",
    "predict": "predict",
    "tile": "tile",
    "embed": "embed",
    "inside": "inside",
    "insight": "insight",
    "train": "train",
    "bench": "bench",
    "drawn": "explain",
    "drawn/heatmaps": "heatmap",
    "drawn/pale": "heatmap",
}
EXPLAINED = {"explain": 3, "contexts": 3, "interactions": 3, "over_slides": 2, "evaluate": 2, "drawn": 3}
RESULTS = {  # files that a repeated command leaves alone
    "explain": ["slides/*.parquet"],
    "contexts": ["slides/*.parquet"],
    "interactions": ["slides/*.parquet", "interactions/*.parquet"],
    "over_slides": ["slides/*.parquet", "features/*.h5", "tiles/patches/*.h5"],
    "evaluate": ["slides/*.parquet", "results/*.parquet", "certificates/*"],
    "tile": ["patches/*.h5", "contours_geojson/*", "visualization/*"],
    "embed": ["*.h5"],
    "inside": ["*.npz"],
    "train": ["model/model.safetensors", "model/log.csv"],
}
UNFINISHED = {"unfinished": 2, "added": 3}  # slides that the killed command left


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of all runs for tests that only read."""
    return copy_runs(tmp_path_factory.mktemp("of_0.2") / "runs")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Copies of all runs."""
    return copy_runs(tmp_path / "runs")


def repeat(root: Path, name: str, *more: str) -> int:
    """The command of a run once more, in its folder."""
    return run([*commands(root)[name], "--out", str(root / name), *more])


def is_clean(folder: Path) -> bool:
    return verify_run(xmil.open_run(folder)) == [] and run(["verify", str(folder)]) == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def results(root: Path, name: str) -> dict[str, tuple[bytes, int]]:
    """The files that a repeated command should not touch: content and time."""
    paths = [path for pattern in RESULTS[name] for path in (root / name).glob(pattern)]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def check_scores(before: Mapping[tuple[str, str], np.ndarray], folder: Path) -> None:
    """Every score of before is there and has the same value."""
    after = scores(folder)
    assert before.keys() <= after.keys()
    for key, values in before.items():
        np.testing.assert_array_equal(after[key], values)


@pytest.mark.parametrize("name", KINDS)
def test_a_run_opens(untouched: Path, name: str) -> None:
    opened = xmil.open_run(untouched / name)
    assert (opened.kind, opened.is_finished, opened.failed) == (KINDS[name], True, {})
    if opened.kind not in ("train", "bench"):
        assert len(list(opened)) in (2, 3)
        assert len(opened.table()) == len(list(opened))
    assert repr(opened).startswith("Run(")


def test_tables_have_their_rows(untouched: Path) -> None:
    explained = xmil.open_run(untouched / "explain").table()
    assert list(explained["slide_id"]) == ["s0", "s1", "s2"]
    assert list(explained["label"]) == ["neg", "pos", "neg"]
    assert np.allclose(explained["p:neg"] + explained["p:pos"], 1, atol=1e-5)
    assert list(xmil.open_run(untouched / "tile").table()["n"]) == [
        len(xmil.read_bag(untouched / "embed" / f"{slide}.h5")) for slide in ("s0", "s1")
    ]
    assert len(xmil.open_run(untouched / "train").table()) == 1


@pytest.mark.parametrize("name", EXPLAINED)
def test_explanations_are_read(untouched: Path, name: str) -> None:
    opened = xmil.open_run(untouched / name)
    assert list(opened) == [f"s{i}" for i in range(EXPLAINED[name])]
    for slide in opened:
        e = opened.explanation(slide, method="lrp")
        features = untouched / ("over_slides/features" if name == "over_slides" else "data/features")
        assert len(e) == len(xmil.read_bag(features / f"{slide}.h5"))
        assert np.isfinite(e.scores).all()
        assert e.audit is not None


def test_scores_are_those_of_today(untouched: Path) -> None:
    """The model and features beside the run give them."""
    opened = xmil.open_run(untouched / "explain")
    model = xmil.load_model(untouched / "data" / "model.safetensors")
    for slide in opened:
        for method in ("lrp", "attention"):
            e = opened.explanation(slide, method=method)
            path = untouched / "data" / "features" / f"{slide}.h5"
            again = xmil.explain(model, path, method=method, target=e.target, check=False)
            np.testing.assert_allclose(e.scores, again.scores, rtol=1e-4, atol=1e-7)


def test_what_lies_beside_explanations_is_read(untouched: Path) -> None:
    pairs = xmil.open_run(untouched / "interactions").interactions("s0")
    assert len(pairs.pairs) == 6  # of four patches
    certificate = xmil.open_run(untouched / "evaluate").certificate("s0")
    assert certificate is not None
    assert {row["method"] for row in certificate["methods"]} == {"lrp", "attention"}
    verdict = xmil.open_run(untouched / "explain").verdict
    assert verdict is not None
    assert verdict.kind == "cannot tell"


@pytest.mark.parametrize("name", KINDS)
def test_verify_finds_nothing(untouched: Path, name: str) -> None:
    assert is_clean(untouched / name)
    assert run(["verify", str(untouched / name), "--quick"]) == 0


@pytest.mark.parametrize("way", ["changed", "cut", "removed"])
def test_verify_finds_a_damaged_slide(root: Path, way: str) -> None:
    path = root / "explain" / "slides" / "s1.parquet"
    content = path.read_bytes()
    if way == "changed":
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif way == "cut":
        path.write_bytes(content[:-9])
    else:
        path.unlink()
    faults = verify_run(xmil.open_run(root / "explain"))
    assert {fault.what for fault in faults} == {"slides/s1.parquet"}
    assert run(["verify", str(root / "explain")]) == 1


@pytest.mark.parametrize("name", ["explain", "over_slides", "evaluate"])
def test_the_viewer_opens_it(untouched: Path, name: str) -> None:
    app = create_app(Collection([untouched / name], slides=untouched / "data" / "slides"))
    slides = ask(app, "/api/run.json").json["slides"]
    assert [line.get("error") for line in slides] == [None] * EXPLAINED[name]
    assert ask(app, "/api/slides/0/evidence-0.bin").status == 200


@pytest.mark.parametrize("name", KINDS)
def test_inspect_opens_it(untouched: Path, name: str) -> None:
    assert run(["inspect", str(untouched / name)]) == 0


def test_reading_changes_nothing(root: Path) -> None:
    before = contents(root)
    for name in ("explain", "over_slides", "train"):
        assert is_clean(root / name)
        assert run(["inspect", str(root / name)]) == 0
        xmil.open_run(root / name).table()
    ask(create_app(Collection([root / "explain"])), "/api/run.json")
    assert contents(root) == before


@pytest.mark.parametrize("name", RESULTS)
def test_the_same_command_has_nothing_to_do(root: Path, name: str) -> None:
    before = results(root, name)
    assert before
    assert repeat(root, name) == 0
    assert results(root, name) == before
    assert is_clean(root / name)


@pytest.mark.parametrize("name", ["predict", "insight"])
def test_a_repeated_summary_says_the_same(root: Path, name: str) -> None:
    before = xmil.open_run(root / name).table()
    assert repeat(root, name) == 0
    assert xmil.open_run(root / name).table().equals(before)
    assert is_clean(root / name)


@pytest.mark.parametrize("name", ["explain", "interactions", "over_slides", "drawn"])
def test_a_further_method_is_added(root: Path, name: str) -> None:
    before = scores(root / name)
    assert repeat(root, name, "--methods", "lrp,gxi") == 0
    check_scores(before, root / name)
    opened = xmil.open_run(root / name)
    for slide in opened:
        assert np.isfinite(opened.explanation(slide, method="gxi").scores).all()
    assert len(list(opened)) == EXPLAINED[name]
    assert is_clean(root / name)


def test_a_further_slide_is_added(root: Path) -> None:
    features = root / "data" / "features"
    with (root / "data" / "cohort.csv").open("a") as stream:
        stream.write("s3,c3,pos,val,b\n")
    shutil.copy(features / "s0.h5", features / "s3.h5")
    before = results(root, "explain")
    assert repeat(root, "explain") == 0
    assert {path: facts for path, facts in results(root, "explain").items() if path in before} == before
    assert list(xmil.open_run(root / "explain")) == ["s0", "s1", "s2", "s3"]
    assert is_clean(root / "explain")


def test_other_settings_are_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(root / "explain")
    assert repeat(root, "explain", "--config", "seed=1") == 2
    assert "--restart" in capsys.readouterr().err
    assert contents(root / "explain") == before


@pytest.mark.parametrize("name", ["drawn/heatmaps", "drawn/pale"])
def test_pictures_of_the_same_style_are_drawn_into_the_folder(root: Path, name: str) -> None:
    assert repeat(root, name) == 0
    assert len(list((root / name / "map").glob("*.png"))) == 3
    assert repeat(root, name, "--to", "png,geojson") == 0
    assert len(list((root / name).rglob("*.geojson"))) == 3
    assert is_clean(root / name)
    assert is_clean(root / "drawn")


def test_pictures_of_another_style_are_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(root / "drawn")
    words = commands(root)["drawn/pale"]
    assert run(words) == 2  # into RUN/heatmaps, whose pictures have the default style
    assert "--restart" in capsys.readouterr().err
    assert contents(root / "drawn" / "heatmaps" / "map") == {
        path: content for path, content in before.items() if "/heatmaps/map/" in path
    }
    assert is_clean(root / "drawn")
    assert run([*words, "--restart"]) == 0
    assert is_clean(root / "drawn")


def test_a_run_without_pictures_is_drawn(root: Path) -> None:
    words = ["--slides", str(root / "data" / "slides"), "--names", "s0,s1", "--size", "60"]
    assert run(["heatmap", str(root / "interactions"), *words, "--pictures", "overlay"]) == 0
    assert len(list((root / "interactions" / "heatmaps" / "overlay").glob("*.png"))) == 2
    assert is_clean(root / "interactions")


@pytest.mark.parametrize("name", ["explain", "contexts", "over_slides", "drawn"])
def test_a_run_is_exported(root: Path, name: str) -> None:
    assert run(["export", str(root / name), "--to", "qupath,csv"]) == 0
    assert len(list((root / name / "export").rglob("*.csv"))) >= EXPLAINED[name]
    assert is_clean(root / name)


@pytest.mark.parametrize("name", UNFINISHED)
def test_an_unfinished_run_asks_for_a_restart(
    root: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(root / name)
    assert len(scores(root / name)) >= UNFINISHED[name]
    assert repeat(root, name) == 2
    assert "--restart" in capsys.readouterr().err
    assert contents(root / name) == before


@pytest.mark.parametrize("name", UNFINISHED)
def test_an_unfinished_run_can_be_restarted(root: Path, name: str) -> None:
    before = scores(root / name)
    assert repeat(root, name, "--restart") == 0
    opened = xmil.open_run(root / name)
    assert (list(opened), opened.failed, opened.is_finished) == (["s0", "s1", "s2"], {}, True)
    check_scores(before, root / name)
    assert len(scores(root / name)) == 6  # of two methods
    assert list((root / name).rglob(".*.part")) == []
    assert is_clean(root / name)
