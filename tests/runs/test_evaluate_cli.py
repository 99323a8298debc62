"""`xmil evaluate` from end to end: tables, figures, certificates, bad files, kill and resume."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import xmil
from tests.runs.cohorts import arm, environment, make_trap, script, trap_command
from xmil.cli._app import run
from xmil.evaluate import summarise
from xmil.storage import read_explanations

D = 6
METHODS = "lrp,attention,random"


def make_cohort(folder: Path, n_slides: int, *, n: int = 25, mislabelled: int = 1) -> Path:
    """A trained model and slides whose first instances carry the class; the last label is wrong."""
    rng = np.random.default_rng(0)
    (folder / "features").mkdir(parents=True)
    lines = ["slide_id,label"]
    for i in range(n_slides):
        x = rng.normal(size=(n, D)).astype(np.float32)
        x[:5, i % 2] += 4
        coords = [[100 * (k % 5), 100 * (k // 5)] for k in range(n)]
        bag = xmil.Bag(x, coords=coords, patch_size=100, slide_id=f"s{i}")
        xmil.write_bag(bag, folder / "features" / f"s{i}.h5")
        wrong = i >= n_slides - mislabelled
        lines.append(f"s{i},{('a', 'b')[(i + wrong) % 2]}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    model = xmil.create_model(
        "attnmil", in_dim=D, n_classes=2, dim=4, attention_dim=2, seed=0, class_names=("a", "b")
    )
    with torch.no_grad():  # reads feature 0 for class a and feature 1 for class b
        model.instance[0][0].weight.zero_()
        model.instance[0][0].weight[0, 0] = model.instance[0][0].weight[1, 1] = 1.0
        model.instance[0][0].bias.zero_()
        model.classifier.weight.zero_()
        model.classifier.weight[0, 0] = model.classifier.weight[1, 1] = 4.0
        model.classifier.weight[0, 1] = model.classifier.weight[1, 0] = -4.0
        model.classifier.bias.zero_()
    xmil.save_model(model, folder / "model.safetensors")
    return folder


def command(folder: Path, *more: str, out: str = "out", methods: str = METHODS) -> list[str]:
    paths = ["--model", f"{folder}/model.safetensors", "--features", f"{folder}/features"]
    paths += ["--cohort", f"{folder}/cohort.csv", "--out", f"{folder}/{out}", "--methods", methods]
    return ["evaluate", *paths, "--orders", "5", *more]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = make_cohort(tmp_path_factory.mktemp("cohort"), 6)
    assert run(command(folder)) == 0
    return folder


def test_annotations_are_compared_with_what_was_measured(tmp_path, capsys):
    """A run of evaluate has scores, too."""
    folder = make_cohort(tmp_path, 3)
    ring = [[0, 0], [500, 0], [500, 100], [0, 100], [0, 0]]  # the five patches that decide
    polygon = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}, "properties": {}}
    (folder / "drawn").mkdir()
    for name in ("s0", "s1"):
        (folder / "drawn" / f"{name}.geojson").write_text(json.dumps(polygon))
    assert run(command(folder, methods="lrp")) == 0
    words = ["study", "agreement", f"{folder}/out", "--annotations"]
    assert run([*words, f"{folder}/nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert run([*words, f"{folder}/drawn"]) == 0
    assert "agreement.csv" in capsys.readouterr().out
    with (folder / "out" / "agreement.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["slide_id"], row["method"]) for row in rows] == [("s0", "lrp"), ("s1", "lrp")]
    assert [(float(row["auroc"]) > 0.95, float(row["pointing"]), row["marked"]) for row in rows] == [
        (True, 1.0, "5")
    ] * 2
    assert (folder / "out" / "results.parquet").is_file()


def test_files_and_tables(done, capsys):
    out = done / "out"
    names = {path.name for path in out.iterdir()}
    assert {"run.json", "failures.csv", "results.parquet", "faithfulness.png", "statistics.csv"} <= names
    assert {f"summary.{suffix}" for suffix in ("txt", "csv", "md", "tex")} <= names
    rows = pq.read_table(out / "results.parquet").to_pylist()
    assert len(rows) == 6 * 3 * 2
    text = (out / "summary.txt").read_text()
    assert "3 methods on 5 slides." in text
    assert "take slides as independent" in text  # the cohort has no case_id
    assert "Left out: 1 misclassified by arg max." in text
    assert "lrp has the lowest mean AUPC" in text
    assert "no interval: 5 slides, and 8 are needed" in text
    assert r"\textbf{" not in (out / "summary.tex").read_text()
    settings = json.loads((out / "run.json").read_text())
    assert settings["settings"]["methods"] == METHODS.split(",")
    assert settings["versions"]["xmil"] == xmil.__version__


def test_rows_are_what_the_functions_give(done):
    model = xmil.load_model(done / "model.safetensors")
    bag = xmil.read_bag(done / "features" / "s3.h5")
    rows = pq.read_table(done / "out" / "results" / "s3.parquet").to_pylist()
    e = xmil.explain(model, bag, method="lrp")
    for mode in ("remove", "mask"):
        (row,) = [r for r in rows if (r["method"], r["mode"]) == ("lrp", mode)]
        curve = xmil.flip(model, bag, e.scores, target=1, mode=mode)
        np.testing.assert_allclose(row["morf"], curve.values)
        assert row["at_zero"] == pytest.approx(curve.at_zero)
        assert row["flipped"] == curve.flipped
        assert row["predicted"] == row["target"] == 1
    (first,) = [r for r in rows if (r["method"], r["mode"]) == ("lrp", "remove")]
    assert first["srg"] == pytest.approx(xmil.srg(model, bag, e.scores, target=1))
    assert first["flipped_at_zero"]


def test_explanations_and_certificates(done):
    stored = read_explanations(done / "out" / "slides" / "s0.parquet")
    assert [e.method for e in stored] == METHODS.split(",")
    certificate = json.loads((done / "out" / "certificates" / "s0.json").read_text())
    assert len(certificate["random_band"]["mean"]) == 101
    verdicts = {m["method"]: m["verdict"] for m in certificate["methods"]}
    assert verdicts["lrp"] == "better"
    assert {m["orders"] for m in certificate["methods"]} == {200}
    assert (done / "out" / "certificates" / "s0.png").stat().st_size > 10_000


def test_summary_counts_every_slide_without_labels(done):
    rows = pq.read_table(done / "out" / "results.parquet").to_pylist()
    bare = [{**row, "correct": None, "label": None} for row in rows]
    assert summarise(bare, cases=None).slides == 6
    assert summarise(bare, cases=None).auroc is None
    mixed = [{**row, "correct": None} if row["slide_id"] == "s0" else row for row in rows]
    found = summarise(mixed, cases=None)
    assert (found.slides, found.misclassified, found.unlabelled) == (4, 1, 1)


def test_a_second_call_recomputes_nothing_and_other_settings_are_refused(done, capsys):
    before = {path: path.stat().st_mtime_ns for path in (done / "out" / "results").iterdir()}
    assert run(command(done)) == 0
    assert "0 measured, 6 already done" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in (done / "out" / "results").iterdir()}
    assert run(command(done, "--steps", "10")) == 2
    error = capsys.readouterr().err
    assert error.startswith("xmil: error:")
    assert "steps 100" in error
    assert len(error.splitlines()) == 1


def test_bad_slides_are_recorded_and_tried_again(tmp_path, capsys):
    folder = make_cohort(tmp_path, 4)
    good = (folder / "features" / "s1.h5").read_bytes()
    (folder / "features" / "s1.h5").write_bytes(b"not a feature file")
    bag = xmil.read_bag(folder / "features" / "s2.h5")
    nan = bag.features.copy()
    nan[3, 1] = np.nan
    (folder / "features" / "s2.h5").unlink()
    np.save(folder / "features" / "s2.npy", nan)
    assert run(command(folder, "--modes", "remove")) == 1
    with (folder / "out" / "failures.csv").open() as stream:
        failed = {row["slide_id"]: row["error"] for row in csv.DictReader(stream)}
    assert set(failed) == {"s1", "s2"}
    assert "row 3" in failed["s2"]
    assert "2 measured" in capsys.readouterr().out
    (folder / "features" / "s1.h5").write_bytes(good)
    assert run(command(folder, "--modes", "remove")) == 1
    assert "1 measured, 2 already done" in capsys.readouterr().out
    assert "s1" not in (folder / "out" / "failures.csv").read_text()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--methods", "lpr"], "Did you mean 'lrp'"),
        (["--methods", "logits"], "cannot explain attnmil"),
        (["--modes", "drop"], "Unknown mode 'drop'"),
        (["--orders", "1"], "orders"),
        (["--label", "grade"], "Unknown column 'grade'"),
        (["--device", "tpu"], "Unknown device"),
        (["--truth", "/nowhere"], "no such folder"),
    ],
)
def test_bad_arguments_are_one_line_and_code_two(done, capsys, more, words):
    assert run(command(done, *more, out="other")) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
    assert not (done / "other").exists()


def test_nothing_left_is_code_two(tmp_path, capsys):
    folder = make_cohort(tmp_path, 2)
    for path in (folder / "features").iterdir():
        path.write_bytes(b"damaged")
    assert run(command(folder)) == 2
    assert "failures.csv says why" in capsys.readouterr().err


def test_ground_truth_of_every_kind(tmp_path, capsys):
    folder = make_cohort(tmp_path, 4, mislabelled=0)
    truth = folder / "truth"
    truth.mkdir()
    box = [[0, 0], [500, 0], [500, 100], [0, 100], [0, 0]]  # the first five patches
    polygon = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [box]}, "properties": {}}
    (truth / "s1.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": [polygon]}))
    values = [1] * 5 + [0] * 20
    np.save(truth / "s3.npy", np.array(values))
    (truth / "s0.csv").write_text("evidence\n" + "\n".join(str(-v) for v in values) + "\n")
    from matplotlib.image import imsave

    mask = np.zeros((5, 5))
    mask[0] = 1
    imsave(truth / "s2.png", mask, cmap="gray")
    arguments = command(folder, "--truth", str(truth), "--config", "mask_downsample=100", "--modes", "remove")
    assert run(arguments) == 0
    rows = pq.read_table(folder / "out" / "results.parquet").to_pylist()
    lrp = {row["slide_id"]: row for row in rows if row["method"] == "lrp"}
    for slide in ("s0", "s1", "s3"):
        assert lrp[slide]["auprc2"] > 0.9, slide
    assert lrp["s1"]["pointing"] == 1.0
    assert lrp["s1"]["mass"] > 0.5
    assert lrp["s2"]["auprc2"] is not None  # marks class 1, the slide is of class 0: evidence against
    assert "AUPRC-2" in (folder / "out" / "summary.txt").read_text()
    np.save(truth / "s3.npy", np.array(values[::-1]))  # only its own slide is measured again
    (truth / "s1.geojson").unlink()
    before = {path.stem: path.stat().st_mtime_ns for path in (folder / "out" / "results").iterdir()}
    assert run(arguments) == 0
    after = {path.stem: path.stat().st_mtime_ns for path in (folder / "out" / "results").iterdir()}
    assert {slide for slide in after if after[slide] != before[slide]} == {"s1", "s3"}


def test_ground_truth_on_a_slide_with_a_bounds_offset(tmp_path):
    """QuPath counts from the scanned bounds: the file says where they are, or the slide does."""
    from tests.slides.squares import write_scn

    folder = make_cohort(tmp_path, 2, mislabelled=0)
    bounds = (500, 300, 400, 400)
    (folder / "wsi").mkdir()
    write_scn(folder / "wsi" / "s1.scn", (1200, 900), np.zeros((0, 4), int), mpp=0.5, bounds=bounds)
    box = [[-500, -300], [0, -300], [0, -200], [-500, -200], [-500, -300]]  # the first five patches
    polygon = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [box]}, "properties": {}}
    plain = {"type": "FeatureCollection", "features": [polygon]}
    ours = {**plain, "xmil": {"origin": [500, 300]}}
    pointing = {}
    for name, content, more in (
        ("without", plain, ()),
        ("slides", plain, ("--slides", str(folder / "wsi"))),
        ("header", ours, ()),
    ):
        truth = folder / name
        truth.mkdir()
        (truth / "s1.geojson").write_text(json.dumps(content))
        arguments = command(folder, "--truth", str(truth), "--modes", "remove", "--restart", *more)
        assert run(arguments) == 0
        rows = pq.read_table(folder / "out" / "results.parquet").to_pylist()
        pointing[name] = [
            row.get("pointing") for row in rows if row["method"] == "lrp" and row["slide_id"] == "s1"
        ]
    assert pointing["without"] != [1.0]
    assert pointing["slides"] == pointing["header"] == [1.0]


@pytest.mark.full  # as a killed run of `explain` does, in test_broken_runs.py
def test_a_killed_run_goes_on(tmp_path, capsys):
    """Killed by the worker that meets the third slide; its workers end with it."""
    folder = make_trap(tmp_path, 4, slide=2)
    arguments = ["evaluate", *trap_command(folder)[1:], "--methods", "lrp,random", "--modes", "remove"]
    arguments += ["--steps", "10", "--orders", "3"]
    arm(folder, "SIGKILL", "parent")
    killed = subprocess.run(
        script([*arguments, "--workers", "2"]), env=environment(), capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    results = folder / "run" / "results"
    before = {path.name: path.stat().st_mtime_ns for path in results.glob("*.parquet")}
    assert len(before) < 4
    assert run(arguments) == 0
    assert f"{4 - len(before)} measured, {len(before)} already done" in capsys.readouterr().out
    after = {path.name: path.stat().st_mtime_ns for path in results.glob("*.parquet")}
    assert len(after) == 4
    assert {name: after[name] for name in before} == before
    assert not list((folder / "run").rglob("*.part"))
