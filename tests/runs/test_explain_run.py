"""`xmil explain` over a cohort: what it writes, how it goes on, cases, ensembles, tasks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

import xmil
from tests.runs.cohorts import NAMES, bytes_of, command, make_cohort, make_model, scores, table, write_slide
from xmil.cli._app import run
from xmil.data import join_bags, read_bag
from xmil.runs.summary import outliers
from xmil.storage import read_explanations, read_header


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_cohort(tmp_path_factory.mktemp("cohort"), 10, models=3)
    assert run(command(folder, "--methods", "lrp,single", "--target", "all", out="all")) == 0
    return folder


def test_scores_are_those_of_explain(cohort: Path) -> None:
    net = xmil.load_model(cohort / "m0.safetensors")
    found = scores(cohort / "all")
    assert len(found) == 10 * 2 * 2
    for (name, column), values in found.items():
        method, target = column.split(":")
        bag = read_bag(cohort / "features" / name.replace(".parquet", ".h5"))
        np.testing.assert_array_equal(values, xmil.explain(net, bag, method=method, target=target).scores)
    e = xmil.Explanation.load(cohort / "all" / "slides" / "s003.parquet", method="lrp", target="pos")
    assert (e.bag, e.patch_size, e.mpp) == ("s003", 256, 0.5)
    assert e.audit is not None


def test_the_folder_says_what_was_done(cohort: Path) -> None:
    about = json.loads((cohort / "all" / "run.json").read_text())
    assert (about["kind"], about["task"], about["class_names"]) == ("explain", "classification", list(NAMES))
    assert about["methods"] == ["lrp", "single"]
    assert about["targets"] == ["all"]
    assert about["model"]["spec"]["name"] == "attnmil"
    assert about["model"]["spec"]["encoder"] == "uni_v2"
    rows = table(cohort / "all" / "slides.csv")
    net = xmil.load_model(cohort / "m0.safetensors")
    for row in rows:
        logits = xmil.explain(net, read_bag(row["features"])).logits.astype(float)
        chances = np.exp(logits) / np.exp(logits).sum()
        np.testing.assert_allclose([float(row["p:neg"]), float(row["p:pos"])], chances, rtol=1e-5)
        assert row["predicted"] == NAMES[int(chances.argmax())]
        assert row["correct"] == str(row["predicted"] == row["label"])
        assert (row["n"], row["label"]) == ("20", NAMES[int(row["slide_id"][1:]) // 2 % 2])
        assert float(row["seconds"]) > 0
    assert [row["slide_id"] for row in rows] == [f"s{i:03}" for i in range(10)]
    assert table(cohort / "all" / "failures.csv") == []


def test_the_summary_is_what_all_scores_together_give(cohort: Path) -> None:
    found = scores(cohort / "all")
    for row in table(cohort / "all" / "summary" / "scales.csv"):
        pooled = np.concatenate([v for (_, column), v in found.items() if column == row["explanation"]])
        for key, level in (("q01", 1), ("q25", 25), ("q50", 50), ("q95", 95)):
            assert float(row[key]) == pytest.approx(np.percentile(pooled, level), rel=1e-5)
        assert float(row["mean"]) == pytest.approx(pooled.mean(dtype=float), rel=1e-4, abs=1e-9)
        assert float(row["std"]) == pytest.approx(pooled.std(dtype=float), rel=1e-4)
        assert (int(row["slides"]), int(row["patches"])) == (10, 200)
        first, third = np.percentile(pooled, [25, 75])
        high = min(pooled.max(), third + 1.5 * (third - first))
        assert float(row["whisker_high"]) == pytest.approx(high, rel=1e-5)
    top = [row for row in table(cohort / "all" / "summary" / "top.csv") if row["explanation"] == "lrp:pos"]
    assert len(top) == 100
    best = max((v.max(), name) for (name, column), v in found.items() if column == "lrp:pos")
    assert float(top[0]["score"]) == pytest.approx(best[0], rel=1e-5)
    assert top[0]["slide_id"] == best[1].removesuffix(".parquet")
    bag = read_bag(cohort / "features" / f"{top[0]['slide_id']}.h5")
    assert bag.coords is not None
    assert [int(top[0]["x0"]), int(top[0]["y0"])] == bag.coords[int(top[0]["index"])].tolist()
    assert top[0]["edge"] == "256"


def test_a_restart_keeps_no_verdict_of_the_maps_it_replaced(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 2)
    assert run(command(folder, "--config", "check=2")) == 0
    assert xmil.open_run(folder / "run").verdict is not None
    assert run(command(folder, "--config", "check=none", "--restart")) == 0
    assert xmil.open_run(folder / "run").verdict is None


def test_a_summary_is_made_again_only_where_files_changed(tmp_path: Path) -> None:
    """Never stale, never missing: with a table lost or changed, or with other explanations."""
    folder = make_cohort(tmp_path, 4)
    again = command(folder, "--target", "pos")
    assert run(again) == 0
    summary = folder / "run" / "summary"
    whole = {path.name: path.read_bytes() for path in summary.iterdir()}

    def made() -> bool:
        """Whether a run makes the summary."""
        before = (summary / "scales.csv").stat().st_ino
        assert run(again) == 0
        return (summary / "scales.csv").stat().st_ino != before

    assert not made()
    (summary / "top.csv").unlink()
    assert made()
    (summary / "top.csv").write_text("changed")
    assert made()
    assert {path.name: path.read_bytes() for path in summary.iterdir()} == whole
    assert not made()
    write_slide(folder / "features" / "s001.h5", np.random.default_rng(5), 20)
    assert made()
    other = folder / "other"
    assert run(command(folder, "--target", "pos", out="other")) == 0
    ours, theirs = (table(place / "summary" / "scales.csv") for place in (folder / "run", other))
    assert ours == theirs


def test_a_slide_unlike_the_others_is_named(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 12)
    odd = folder / "features" / "s005.h5"
    bag = read_bag(odd)
    xmil.write_bag(xmil.Bag(bag.features * 30, coords=bag.coords, patch_size=256), odd)
    assert run(command(folder, "--target", "pos")) == 0
    far = table(folder / "run" / "summary" / "outliers.csv")
    assert {("s005", "iqr"), ("s005", "peak")} <= {(row["slide_id"], row["measure"]) for row in far}
    assert all(abs(float(row["robust_z"])) > 3.5 for row in far)


def test_slides_of_a_usual_cohort_do_not_stand_out() -> None:
    """Numbers of patches and ranges of scores spread over factors of ten; that makes no outliers."""
    flagged, slides = 0, 24
    for seed in range(50):
        rng = np.random.default_rng(seed)
        usual = {
            f"s{i}": {
                "mean": rng.normal(),
                "iqr": rng.lognormal(),
                "peak": rng.lognormal(),
                "n": rng.lognormal(8, 1),
            }
            for i in range(slides)
        }
        flagged += len({row[0] for row in outliers("lrp:1", usual)})
        usual["s3"]["peak"] = 1e6
        assert "s3" in {row[0] for row in outliers("lrp:1", usual)}
    assert flagged / (50 * slides) < 0.02


def test_a_second_call_computes_nothing_and_a_changed_slide_is_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cohort(tmp_path, 6)
    assert run(command(folder)) == 0
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "run" / "slides").iterdir()}
    seconds = [row["seconds"] for row in table(folder / "run" / "slides.csv")]
    assert run(command(folder)) == 0
    assert "0 explained, 6 already done, 0 failed" in capsys.readouterr().out
    assert before == {path.name: path.stat().st_mtime_ns for path in (folder / "run" / "slides").iterdir()}
    assert [row["seconds"] for row in table(folder / "run" / "slides.csv")] == seconds
    write_slide(folder / "features" / "s002.h5", np.random.default_rng(5), 20)
    (folder / "run" / "slides" / "s004.parquet").write_bytes(b"PAR1")  # damaged by something else
    assert run(command(folder)) == 0
    assert "2 explained, 4 already done" in capsys.readouterr().out
    after = {path.name: path.stat().st_mtime_ns for path in (folder / "run" / "slides").iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"s002.parquet", "s004.parquet"}


def test_other_settings_are_refused_by_name_and_restart_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cohort(tmp_path, 3, models=2)
    assert run(command(folder)) == 0
    kept = bytes_of(folder / "run")
    assert run(command(folder, "--config", "seed=3")) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "seed 0, not 3" in error
    assert run(command(folder, models=2)) == 2
    assert "models" in capsys.readouterr().err
    assert bytes_of(folder / "run") == kept
    mine = folder / "run" / "slides" / "s001.svs"
    mine.write_text("not of a run")
    assert run(command(folder, "--methods", "gxi", "--restart")) == 0
    assert mine.exists()
    mine.unlink()
    assert {column for _, column in scores(folder / "run")} <= {"gxi:neg", "gxi:pos"}
    assert run(["evaluate", *command(folder, "--restart")[1:]]) == 2
    assert "holds a run of `xmil explain`" in capsys.readouterr().err


def test_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_cohort(tmp_path, 4)
    assert run(command(folder, "--target", "predicted,label,pos:neg")) == 0
    rows = {row["slide_id"]: row for row in table(folder / "run" / "slides.csv")}
    net = xmil.load_model(folder / "m0.safetensors")
    for name, row in rows.items():
        found = read_explanations(folder / "run" / "slides" / f"{name}.parquet")
        expected = dict.fromkeys([row["predicted"], row["label"], "pos-vs-neg"])
        assert [str(e.target) for e in found] == list(expected)
        z = xmil.explain(net, read_bag(row["features"])).logits
        assert found[-1].output == pytest.approx(z[1] - z[0], rel=1e-5)
    for target, reason in (
        ("tumour", "Unknown class 'tumour'"),
        ("7", "must be one of 0 (neg), 1 (pos). Got 7 instead"),
        ("pos:pos", "contrasts class 1 with itself"),
        ("", "nothing to explain"),
    ):
        assert run(command(folder, "--target", target, out="other")) == 2
        assert reason in capsys.readouterr().err
    bare = ["explain", "--model", str(folder / "m0.safetensors"), "--features", str(folder / "features")]
    assert run([*bare, "--out", str(folder / "bare"), "--target", "label"]) == 2
    assert "needs a --cohort" in capsys.readouterr().err
    assert run([*bare, "--out", str(folder / "bare")]) == 0
    assert [row["label"] for row in table(folder / "bare" / "slides.csv")] == [""] * 4
    assert not (folder / "other").exists()


def test_a_slide_without_a_label_fails_alone(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 3)
    text = (folder / "cohort.csv").read_text().replace("s001,c0,neg", "s001,c0,")
    (folder / "cohort.csv").write_text(text)
    assert run(command(folder, "--target", "label")) == 1
    (row,) = table(folder / "run" / "failures.csv")
    assert row["slide_id"] == "s001"
    assert "no label" in row["error"]


def test_a_case_is_one_bag_and_its_scores_go_to_its_slides(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 5)
    write_slide(folder / "features" / "s001.h5", np.random.default_rng(7), 33)
    for i in range(2):
        with h5py.File(folder / "features" / f"s00{i}.h5", "a") as file:
            file["coords"].attrs.update({"level0_width": 5000 + i, "level0_height": 4000})
    assert run(command(folder, "--config", "by=case", "--target", "pos")) == 0
    net = xmil.load_model(folder / "m0.safetensors")
    bags = [read_bag(folder / "features" / f"s00{i}.h5") for i in range(2)]
    joined, rows = join_bags(bags, name="c0")
    whole = xmil.explain(net, joined, target="pos")
    for i, part in enumerate(rows):
        e = xmil.Explanation.load(folder / "run" / "slides" / f"s00{i}.parquet")
        np.testing.assert_array_equal(e.scores, whole.scores[part])
        np.testing.assert_array_equal(e.coords, bags[i].coords)
        assert e.slide_size == (5000 + i, 4000)
        assert (e.bag, e.output) == (f"s00{i}", pytest.approx(whole.output))
        about = read_header(folder / "run" / "slides" / f"s00{i}.parquet")["provenance"]["case"]
        assert about == {"name": "c0", "slides": ["s000", "s001"], "instances": 53}
    found = table(folder / "run" / "slides.csv")
    assert [row["case_id"] for row in found] == ["c0", "c0", "c1", "c1", "c2"]
    assert found[0]["p:pos"] == found[1]["p:pos"] != found[2]["p:pos"]
    (folder / "run" / "slides" / "s001.parquet").unlink()
    assert run(command(folder, "--config", "by=case", "--target", "pos")) == 0
    assert len(bytes_of(folder / "run")) == 5


def test_an_ensemble_is_the_mean_with_its_spread(cohort: Path) -> None:
    arguments = ("--methods", "lrp,attention", "--target", "predicted,pos")
    assert run(command(cohort, *arguments, out="folds", models=3)) == 0
    nets = [xmil.load_model(cohort / f"m{i}.safetensors") for i in range(3)]
    rows = {row["slide_id"]: row for row in table(cohort / "folds" / "slides.csv")}
    for name, row in rows.items():
        bag = read_bag(row["features"])
        each = [xmil.explain(net, bag, target="pos") for net in nets]
        e = xmil.Explanation.load(cohort / "folds" / "slides" / f"{name}.parquet", method="lrp", target="pos")
        stacked = np.stack([one.scores for one in each]).astype(float)
        np.testing.assert_allclose(e.scores, stacked.mean(axis=0), rtol=1e-5, atol=1e-8)
        assert e.spread is not None
        np.testing.assert_allclose(e.spread, stacked.std(axis=0, ddof=1), rtol=1e-4, atol=1e-8)
        logits = np.stack([one.logits for one in each]).mean(axis=0)
        np.testing.assert_allclose(e.logits, logits, rtol=1e-5)
        assert row["predicted"] == NAMES[int(logits.argmax())]
        assert e.audit is not None
        total = sum(value for key, value in e.audit.as_dict().items() if key != "output")
        assert total == pytest.approx(e.output, abs=1e-6)
    assert len(json.loads((cohort / "folds" / "run.json").read_text())["models"]) == 3


def test_models_of_an_ensemble_must_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_cohort(tmp_path, 2)
    make_model(folder / "m1.safetensors", class_names=("a", "b"))
    assert run(command(folder, models=2)) == 2
    assert "m1.safetensors: its class_names is ('a', 'b')" in capsys.readouterr().err


def test_features_of_another_encoder_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cohort(tmp_path, 3)
    make_model(folder / "m0.safetensors", encoder="conch_v15")
    assert run(command(folder)) == 0
    out = capsys.readouterr().out
    assert "trained on features of 'conch_v15', but 3 slides have those of 'uni_v2'" in out


@pytest.mark.parametrize(
    ("task", "spec", "column", "word"),
    [
        ("regression", {"n_classes": 1, "reference": 0.3}, "lrp:value", "value"),
        ("survival", {"n_classes": 4}, "lrp:risk", "risk"),
        ("cox", {"n_classes": 1}, "lrp:risk", "risk"),
    ],
)
def test_models_without_classes(
    tmp_path: Path, task: str, spec: dict[str, float], column: str, word: str
) -> None:
    folder = make_cohort(tmp_path, 2)
    make_model(folder / "m0.safetensors", task=task, **spec)
    (folder / "cohort.csv").write_text("slide_id,label\ns000,0.5\ns001,1.5\n")
    assert run(command(folder)) == 0
    assert {name for _, name in scores(folder / "run")} == {column}
    e = read_explanations(folder / "run" / "slides" / "s000.parquet")[0]
    assert e.audit is not None
    assert abs(e.audit.other) < 1e-4 * max(1.0, abs(e.output))
    row = table(folder / "run" / "slides.csv")[0]
    reference = float(spec.get("reference", 0))
    assert float(row[word]) == pytest.approx(e.output + reference, rel=1e-4, abs=1e-5)
    assert (row["predicted"], row["correct"]) == ("", "")
    assert run(command(folder, "--target", "label", out="other")) == 2


def test_parameters_of_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_cohort(tmp_path, 2)
    assert (
        run(command(folder, "--methods", "lrp,ig", "--param", "lrp.preset=paper", "--param", "ig.steps=7"))
        == 0
    )
    found = read_explanations(folder / "run" / "slides" / "s000.parquet")
    assert [e.params.get("preset", e.params.get("steps")) for e in found] == ["paper", 7]
    capsys.readouterr()
    for more, reason in (
        (("--param", "ig.steps"), "METHOD.NAME=VALUE"),
        (("--param", "lrp.epsilom=1"), "Did you mean 'epsilon'"),
        (("--param", "gxi.a=1"), "not among the methods"),
        (("--param", "lrp.preset=papre"), "Did you mean 'paper'"),
        (("--methods", "lrpp"), "Did you mean 'lrp'"),
        (("--methods", "logits"), "cannot explain attnmil"),
        (("--config", "output=logits"), "Did you mean 'logit'"),
        (("--config", "memory=much"), "a size such as 500MB"),
        (("--config", "by=patient"), "by must be one of"),
        (("--engine", "rya"), "Did you mean 'ray'"),
    ):
        assert run(command(folder, *more, out="other")) == 2
        error = capsys.readouterr().err.strip()
        assert reason in error, error
        assert len(error.splitlines()) == 1


def test_little_memory_gives_the_same_scores(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 2, instances=210, model="transmil")
    methods = ("--methods", "single,one_removed", "--target", "pos")
    assert run(command(folder, *methods, out="much")) == 0
    assert run(command(folder, *methods, "--config", "memory=4MB", out="little")) == 0
    much, little = scores(folder / "much"), scores(folder / "little")
    for key, values in much.items():
        np.testing.assert_allclose(values, little[key], atol=1e-5)


def test_only_one_run_writes_into_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fcntl = pytest.importorskip("fcntl")
    folder = make_cohort(tmp_path, 2)
    (folder / "run").mkdir()
    with (folder / "run" / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert run(command(folder)) == 2
    assert "another run is writing there" in capsys.readouterr().err
    assert run(command(folder)) == 0


def test_two_hundred_slides_with_five_broken_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], full: bool
) -> None:
    count = 200 if full else 60
    folder = make_cohort(tmp_path, count, instances=5)
    features, rng = folder / "features", np.random.default_rng(1)
    whole = (features / "s010.h5").read_bytes()
    (features / "s010.h5").write_bytes(whole[: len(whole) // 2])  # truncated
    holes = rng.normal(size=(5, 12)).astype(np.float32)
    holes[3, 4] = np.nan
    np.save(features / "s020.npy", holes)
    (features / "s020.h5").unlink()
    write_slide(features / "s030.h5", rng, 5, width=13)
    (features / "s040.h5").unlink()
    os.mkfifo(features / "s040.h5")  # unreadable even for root
    np.save(features / "s050.npy", np.zeros((0, 12), np.float32))
    (features / "s050.h5").unlink()
    assert run(command(folder)) == 1
    assert f"{count - 5} explained, 0 already done, 5 failed" in capsys.readouterr().out
    failed = {row["slide_id"]: row["error"] for row in table(folder / "run" / "failures.csv")}
    assert set(failed) == {"s010", "s020", "s030", "s040", "s050"}
    assert "s010.h5" in failed["s010"]
    assert "row 3" in failed["s020"]
    assert "width 13" in failed["s030"]
    assert "s040.h5" in failed["s040"]
    assert "no patches" in failed["s050"]
    assert len(bytes_of(folder / "run")) == len(table(folder / "run" / "slides.csv")) == count - 5
    (features / "s010.h5").write_bytes(whole)  # mended: it is tried again
    assert run(command(folder)) == 1
    assert f"1 explained, {count - 5} already done, 4 failed" in capsys.readouterr().out


def test_when_every_slide_fails_nothing_was_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_cohort(tmp_path, 2)
    for path in (folder / "features").iterdir():
        path.write_bytes(b"\x89HDF\r\n\x1a\n broken")
    assert run(command(folder)) == 2
    assert "No slide could be explained" in capsys.readouterr().err
    assert len(table(folder / "run" / "failures.csv")) == 2
    shutil.rmtree(folder / "features")
    assert run(command(folder)) == 2
