"""Cohorts that do not quite fit: folds with bins of their own, missing and empty slides, foreign labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import xmil
from tests.runs.cohorts import command, make_cohort, make_model, table, write_slide
from xmil.cli._app import run
from xmil.core.errors import InputError
from xmil.core.task import TASKS
from xmil.data import read_bag
from xmil.storage import read_explanations, write_explanations
from xmil.viewer.collection import Collection
from xmil.viewer.features import CaseBags
from xmil.viewer.whatif import WhatIf

BINS = ((4.0, 8.0), (5.0, 9.0))


def survival_folds(folder: Path, *, bins: tuple[tuple[float, ...], ...] = BINS) -> Path:
    """Four slides of two cases with times and events, and a survival model for each cut of time."""
    make_cohort(folder, 4)
    rows = ["slide_id,case_id,time,event", "s000,c0,3,1", "s001,c0,3,1", "s002,c1,7.5,0", "s003,c1,,"]
    (folder / "cohort.csv").write_text("\n".join(rows) + "\n")
    for seed, cut in enumerate(bins):
        path = folder / f"m{seed}.safetensors"
        make_model(path, seed=seed, task="survival", n_classes=3, time_bins=cut)
    return folder


def predict(folder: Path, *more: str, models: int = 1, out: str = "predicted") -> list[str]:
    return ["predict", *command(folder, *more, out=out, models=models)[1:], "--config", "draws=5"]


def test_bins_that_folds_cut_for_themselves_have_no_times_in_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = survival_folds(tmp_path)
    assert run(command(folder, "--target", "predicted,all,bin2:0", models=2)) == 0
    assert "time bins (4, 8; 5, 9)" in capsys.readouterr().out
    found = read_explanations(folder / "run" / "slides" / "s000.parquet")
    names = ["risk", "bin0", "bin1", "bin2", "bin2-vs-bin0"]
    assert sorted(e.column for e in found) == sorted(f"lrp:{name}" for name in names)
    nets = [xmil.load_model(folder / f"m{i}.safetensors") for i in range(2)]
    bag = read_bag(folder / "features" / "s000.h5")
    each = [xmil.explain(net, bag, target=1).scores for net in nets]
    second = next(e for e in found if e.column == "lrp:bin1")
    np.testing.assert_allclose(second.scores, np.mean(each, axis=0), atol=1e-6)
    spec = json.loads((folder / "run" / "run.json").read_text())["model"]["spec"]
    assert spec["time_bins"] is None
    assert run(command(folder, "--target", "4-8", models=2, out="named")) == 2
    said = capsys.readouterr().err
    assert "Unknown class '4-8'" in said
    assert "time bins" in said
    assert run(command(folder, "--target", "predicted", models=2, out="risk")) == 0
    assert "time bins" not in capsys.readouterr().out  # the risk needs no names


def test_bins_that_folds_share_keep_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = survival_folds(tmp_path, bins=(BINS[0], BINS[0]))
    assert run(command(folder, "--target", "4-8", models=2)) == 0
    assert "warning" not in capsys.readouterr().out
    assert read_explanations(folder / "run" / "slides" / "s000.parquet")[0].column == "lrp:4-8"


def test_the_risk_of_an_ensemble_is_the_mean_of_risks_everywhere(tmp_path: Path) -> None:
    folder = survival_folds(tmp_path)
    for again in range(2):  # the second run finds its slides done
        assert run(command(folder, models=2)) == 0
        rows = table(folder / "run" / "slides.csv")
        for row in rows:
            (e,) = read_explanations(folder / "run" / "slides" / f"{row['slide_id']}.parquet")
            assert float(row["risk"]) == pytest.approx(e.output, rel=1e-5), again
    assert run(predict(folder, models=2)) == 0
    said = pq.read_table(folder / "predicted" / "predictions.parquet").to_pylist()
    for row, other in zip(said, rows, strict=True):
        assert row["risk"] == pytest.approx(float(other["risk"]), rel=1e-5)
        assert row["risk"] == pytest.approx(-sum(row[f"S:bin{i}"] for i in range(3)))
    nets = [xmil.load_model(folder / f"m{i}.safetensors") for i in range(2)]
    bag = read_bag(folder / "features" / "s002.h5")
    assert said[2]["risk"] == pytest.approx(
        np.mean([xmil.explain(net, bag).output for net in nets]), rel=1e-5
    )


def test_the_viewer_shows_the_risk_of_the_tables(tmp_path: Path) -> None:
    folder = survival_folds(tmp_path)
    assert run(command(folder, models=2)) == 0
    models = [folder / f"m{i}.safetensors" for i in range(2)]
    shown = Collection([folder / "run"], features=[folder / "features"])
    ask = WhatIf(shown, CaseBags(shown), models).ask
    mean_outputs = TASKS["survival"].numbers(np.array([shown.evidence(k, 0).logits for k in range(4)]))
    for key, row in enumerate(table(folder / "run" / "slides.csv")):
        risk = pytest.approx(float(row["risk"]), rel=1e-5)
        (found,) = shown.describe(key)["sets"]
        assert (found["value"], found["classes"], found["noun"]) == (risk, ["risk"], "Risk")
        assert mean_outputs[key, 0] != risk
        answer = ask(key, {"run": 0, "remove": []})
        assert (answer["before"], answer["labels"], answer["sentence"]) == ([risk], ["risk"], None)
        left = read_bag(folder / "features" / f"{row['slide_id']}.h5").features[5:]
        risks = [xmil.explain(xmil.load_model(path), left).output for path in models]
        without = ask(key, {"run": 0, "remove": [[0, 5]]})
        assert without["after"] == [pytest.approx(np.mean(risks), rel=1e-5)]


def test_a_run_that_did_not_keep_its_models_outputs_shows_the_risk_of_its_table(tmp_path: Path) -> None:
    """Runs of earlier versions have the mean outputs alone, whose risk is another number."""
    folder = survival_folds(tmp_path)
    assert run(command(folder, models=2)) == 0
    path = folder / "run" / "slides" / "s000.parquet"
    write_explanations(read_explanations(path), path)  # without each model's outputs
    shown = Collection([folder / "run"])
    risk = float(table(folder / "run" / "slides.csv")[0]["risk"])
    assert shown.describe(0)["sets"][0]["value"] == risk
    (folder / "run" / "slides.csv").unlink()
    assert Collection([folder / "run"]).describe(0)["sets"][0]["value"] is None


def test_times_and_events_are_columns(tmp_path: Path) -> None:
    folder = survival_folds(tmp_path)
    assert run(command(folder)) == 0
    found = [(r["label"], r["time"], r["event"]) for r in table(folder / "run" / "slides.csv")]
    assert found == [("3", "3.0", "True"), ("3", "3.0", "True"), ("7.5+", "7.5", "False"), ("", "", "")]


@pytest.mark.parametrize("which", ["explain", "predict"])
def test_cases_without_all_their_slides_are_named(
    which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cohort(tmp_path, 6)
    for name in ("s001", "s004", "s005"):  # half of c0, all of c2
        (folder / "features" / f"{name}.h5").unlink()
    make = {"explain": command, "predict": predict}[which]
    assert run(make(folder, "--config", "by=case", out="run")) == 0
    said = capsys.readouterr().out
    assert (
        "warning: 1 case has slides without features; only its other slides are used: c0 (without s001)"
        in said
    )
    about = json.loads((folder / "run" / "run.json").read_text())
    assert about["without_features"] == ["s001", "s004", "s005"]
    assert about["incomplete_cases"] == {"c0": ["s001"]}
    assert run(make(folder, out="slides")) == 0
    assert "warning" not in capsys.readouterr().out  # by slide no bag is incomplete
    about = json.loads((folder / "slides" / "run.json").read_text())
    assert (len(about["without_features"]), about["incomplete_cases"]) == (3, {})


def test_a_case_that_lost_a_slide_is_explained_again(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 2)
    assert run(command(folder, "--config", "by=case", "--target", "pos")) == 0
    whole = xmil.Explanation.load(folder / "run" / "slides" / "s000.parquet").output
    (folder / "features" / "s001.h5").unlink()
    assert run(command(folder, "--config", "by=case", "--target", "pos")) == 0
    net = xmil.load_model(folder / "m0.safetensors")
    alone = xmil.explain(net, read_bag(folder / "features" / "s000.h5"), target="pos").output
    found = xmil.Explanation.load(folder / "run" / "slides" / "s000.parquet").output
    assert found == pytest.approx(alone) != pytest.approx(whole)


@pytest.mark.parametrize("which", ["explain", "predict"])
def test_a_part_that_is_empty_or_not_finite_is_named(which: str, tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 6)
    write_slide(folder / "features" / "s001.h5", np.random.default_rng(0), 0)
    bad = read_bag(folder / "features" / "s003.h5")
    values = bad.features.copy()
    values[2, 1] = np.nan
    xmil.write_bag(xmil.Bag(values, coords=bad.coords, patch_size=256), folder / "features" / "s003.h5")
    make = {"explain": command, "predict": predict}[which]
    assert run(make(folder, "--config", "by=case", out="run")) == 1
    failed = {row["slide_id"]: row["error"] for row in table(folder / "run" / "failures.csv")}
    assert set(failed) == {"s000", "s001", "s002", "s003"}
    assert f"Case 'c0': {folder / 'features' / 's001.h5'} has no patches" in failed["s000"]
    file = folder / "features" / "s003.h5"
    assert f"Case 'c1': features of {file} are not finite (NaN or inf) in 1 of 20 rows" in failed["s002"]
    assert "row 2" in failed["s002"]


@pytest.mark.parametrize("which", ["explain", "predict"])
def test_a_foreign_label_is_named_and_counts_as_unknown(
    which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cohort(tmp_path, 8)
    text = (folder / "cohort.csv").read_text()
    (folder / "cohort.csv").write_text(text.replace("s005,c2,neg", "s005,c2,unknown"))
    make = {"explain": command, "predict": predict}[which]
    assert run(make(folder, out="run")) == 0
    said = capsys.readouterr().out
    expected = "the model does not know (neg, pos): 'unknown' of s005. They count as unlabelled."
    assert expected in said
    name = {"explain": "slides.csv", "predict": "predictions.csv"}[which]
    labels = {row["slide_id"]: row["label"] for row in table(folder / "run" / name)}
    assert (labels["s005"], labels["s004"], labels["s007"]) == ("", "neg", "pos")


def test_outliers_take_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_cohort(tmp_path, 12)
    for name, factor in (("s005", 30), ("s007", 50)):
        path = folder / "features" / f"{name}.h5"
        bag = read_bag(path)
        xmil.write_bag(xmil.Bag(bag.features * factor, coords=bag.coords, patch_size=256), path)
    assert run(command(folder, "--methods", "lrp,gxi", "--target", "all")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "outliers.csv" in line]
    far = {row["slide_id"] for row in table(folder / "run" / "summary" / "outliers.csv")}
    assert {"s005", "s007"} <= far
    assert len(lines) == 1
    assert ", ".join(sorted(far)) in lines[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--methods", "gxi", "--param", "lrp.preset=released"],
            "--param lrp.preset is for 'lrp', which is not among the methods",
        ),
        (["--methods", "lrp", "--param", "ig.steps=7"], "--param ig.steps is for 'ig'"),
        (["--workers", "-1"], "--workers must be an int in the range [0, inf). Got -1 instead."),
        (["--workers", "2.5"], ". Try 'xmil explain --help'."),
    ],
)
def test_messages_name_the_option(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cohort(tmp_path, 1)
    assert run(command(folder, *more)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("run", [xmil.explain_slides, xmil.predict_slides, xmil.evaluate_slides])
def test_a_run_is_not_written_among_the_features(run: Any, tmp_path: Path) -> None:
    (tmp_path / "features").mkdir()
    bag = xmil.Bag(np.random.default_rng(0).normal(size=(5, 4)), slide_id="a")
    xmil.write_bag(bag, tmp_path / "features" / "a.h5")
    model = xmil.create_model("attnmil", in_dim=4, n_classes=2, dim=4, seed=0)
    xmil.save_model(model, tmp_path / "m.safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "features")
    with pytest.raises(InputError, match="is the folder of"):
        run(tmp_path / "m.safetensors", tmp_path / "features", out=tmp_path / "link")
    assert [path.name for path in (tmp_path / "features").iterdir()] == ["a.h5"]
