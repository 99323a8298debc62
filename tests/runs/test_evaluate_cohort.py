"""`xmil evaluate` on what `xmil train` leaves: its folder, its label column, its cases."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import xmil
from tests.training.cohorts import config_of, write_cohort
from xmil.cli._app import run
from xmil.data.bags import join_bags
from xmil.storage import read_explanations
from xmil.training.train import train


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two slides a case, labels under a name of their own, one model trained by case."""
    folder = write_cohort(tmp_path_factory.mktemp("cohort"), n=20, slides_per_case=2)
    table = folder / "cohort.csv"
    table.write_text(table.read_text().replace(",label,", ",HPV,", 1))
    train(config_of(folder, data={"label": "HPV", "by": "case"}, train={"epochs": 8}))
    return folder


def command(folder: Path, *more: str, model: str = "out", out: str = "told") -> list[str]:
    paths = ["--model", f"{folder}/{model}", "--features", f"{folder}/features"]
    paths += ["--cohort", f"{folder}/cohort.csv", "--out", f"{folder}/{out}"]
    return ["evaluate", *paths, "--methods", "lrp,random", "--orders", "3", "--steps", "10", *more]


@pytest.fixture(scope="module")
def by_case(folder):
    assert run(command(folder, "--config", "by=case", "--split", "test", out="cases")) == 0
    return folder / "cases"


def test_a_case_is_one_bag(folder, by_case):
    found = pq.read_table(by_case / "results.parquet").to_pylist()
    assert {row["slide_id"] for row in found} == {"c8", "c9", "c18", "c19"}
    bags = [xmil.read_bag(folder / "features" / f"s8_{k}.h5") for k in range(2)]
    bag, parts = join_bags(bags, name="c8")
    model = xmil.load_model(folder / "out" / "model" / "model.safetensors")
    with torch.no_grad():
        predicted = int(model(torch.from_numpy(bag.features)[None])[0].argmax())
    e = xmil.explain(model, bag, method="lrp")
    curve = xmil.flip(model, bag, e.scores, target=predicted, steps=10)
    (row,) = [r for r in found if (r["slide_id"], r["method"], r["mode"]) == ("c8", "lrp", "remove")]
    np.testing.assert_allclose(row["morf"], curve.values, rtol=1e-5)
    for k in range(2):
        stored = read_explanations(by_case / "slides" / f"s8_{k}.parquet")[0]
        np.testing.assert_allclose(stored.scores, e.scores[parts[k]], rtol=1e-4, atol=1e-6)


def test_the_table_has_every_slide_with_its_time(by_case):
    table = rows(by_case / "slides.csv")
    assert [row["slide_id"] for row in table[:2]] == ["s8_0", "s8_1"]
    assert {row["case_id"] for row in table[:2]} == {"c8"}
    assert len(table) == 8
    assert all(float(row["seconds"]) > 0 for row in table)
    certificate = json.loads((by_case / "certificates" / "s8_0.json").read_text())
    assert certificate["n"] == sum(int(row["n"]) for row in table[:2])


def test_cases_are_the_unit_of_tests_and_intervals(folder, by_case):
    text = (by_case / "summary.txt").read_text()
    (row, *_) = rows(by_case / "summary.csv")
    assert row["n"] == row["cases"]
    assert f"on {2 * int(row['n'])} slides of {row['n']} cases." in text
    assert run(command(folder, "--split", "test", "--modes", "remove", out="slides")) == 0
    text = (folder / "slides" / "summary.txt").read_text()
    (cell,) = [
        row
        for row in rows(folder / "slides" / "summary.csv")
        if (row["method"], row["measure"]) == ("lrp", "aupc")
    ]
    (comparison,) = rows(folder / "slides" / "statistics.csv")
    assert comparison["units"] == cell["cases"]
    assert int(cell["cases"]) < int(cell["n"])  # two slides a case
    assert f"2 methods on {cell['n']} slides of {cell['cases']} cases." in text
    assert f"over {cell['n']} slides of {cell['cases']} cases" in text
    assert "Tests and intervals are over cases" in text


def test_one_slide_has_no_spread(folder, tmp_path):
    (tmp_path / "features").mkdir()
    source = min((folder / "features").glob("*.h5"))
    (tmp_path / "features" / source.name).write_bytes(source.read_bytes())
    words = ["evaluate", "--model", f"{folder}/out", "--features", f"{tmp_path}/features", "--steps", "5"]
    assert run([*words, "--methods", "lrp,random", "--modes", "remove", "--out", f"{tmp_path}/told"]) == 0
    table = (tmp_path / "told" / "summary.txt").read_text().split("remove:")[0]
    assert "±" not in table
    assert {row["std"] for row in rows(tmp_path / "told" / "summary.csv")} == {"nan"}


def test_certificates_say_how_few_patches_decide(by_case):
    deciding = json.loads((by_case / "certificates" / "s9_1.json").read_text())["deciding"]
    if deciding["upper"] is None:
        assert deciding["instances"] is None
    else:
        assert len(deciding["instances"]) == deciding["upper"] >= deciding["lower"] >= 1
    assert deciding["kind"] == "flip"


def test_certificates_name_the_classes(by_case):
    certificate = json.loads((by_case / "certificates" / "s9_1.json").read_text())
    assert (certificate["label"], certificate["label_name"]) == (1, "pos")
    assert certificate["predicted_name"] == ("neg", "pos")[certificate["predicted"]]
    assert certificate["slides"] == ["s9_0", "s9_1"]


def test_the_label_column_of_the_training_is_the_default(folder, by_case):
    assert {row["label"] for row in rows(by_case / "slides.csv")} == {"neg", "pos"}
    places = ["--features", f"{folder}/features", "--cohort", f"{folder}/cohort.csv", "--split", "test"]
    assert run(["predict", "--model", f"{folder}/out", *places, "--out", f"{folder}/predicted"]) == 0
    assert json.loads((folder / "predicted" / "metrics.json").read_text())["labelled"] == 8


def test_cases_of_the_training_are_said(folder, by_case, capsys):
    header, *lines = (folder / "cohort.csv").read_text().splitlines()
    few = [line for line in lines if line.split(",")[1] in ("c0", "c1", "c2", "c8")]
    (folder / "few.csv").write_text("\n".join([header, *few]) + "\n")
    asked = command(folder, "--split", "train,test", "--modes", "remove")
    capsys.readouterr()
    assert run([word.replace("cohort.csv", "few.csv") for word in asked]) == 0
    said = capsys.readouterr().out
    assert "warning: 6 of the 8 bags here were in the training of a model" in said
    assert "AUROC" in said
    assert "Test AUROC" not in said
    assert "6 of the 8 bags" in json.loads((folder / "told" / "run.json").read_text())["warnings"][0]
    assert json.loads((by_case / "run.json").read_text())["warnings"] == []


def test_an_ensemble_is_refused_by_its_files(folder, capsys):
    train(
        config_of(folder, out=str(folder / "folds"), data={"label": "HPV", "folds": 2}, train={"epochs": 1})
    )
    capsys.readouterr()
    assert run(command(folder, model="folds", out="other")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "takes one model" in line
    assert "fold0/model.safetensors" in line
    assert "fold1/model.safetensors" in line
    assert not (folder / "other").exists()


def test_what_files_lack_can_be_given(folder):
    places = ["--mpp", "0.5", "--patch-size", "224", "--split", "test", "--modes", "remove"]
    assert run(command(folder, *places, out="placed")) == 0
    assert read_explanations(folder / "placed" / "slides" / "s8_0.parquet")[0].mpp == 0.5
    assert run(command(folder, "--mpp", "0.25", *places[2:], out="placed")) == 2


@pytest.mark.parametrize("task", ["survival", "cox"])
def test_times_and_events_of_the_training_are_the_default(tmp_path, task):
    folder = write_cohort(tmp_path, n=20)
    table = folder / "cohort.csv"
    table.write_text(table.read_text().replace(",time,event,", ",os_months,os_event,", 1))
    data = {"time": "os_months", "event": "os_event"}
    train(config_of(folder, task=task, data=data, loss={"bins": 2}, train={"epochs": 1, "batch": 8}))
    places = ["--features", f"{folder}/features", "--cohort", str(table), "--out", f"{folder}/told"]
    assert run(["predict", "--model", f"{folder}/out", *places]) == 0
    assert json.loads((folder / "told" / "metrics.json").read_text())["labelled"] == 20


def test_a_case_that_lacks_a_slide_is_named(tmp_path, capsys):
    folder = write_cohort(tmp_path, n=20, slides_per_case=2)
    train(config_of(folder, data={"by": "case"}, train={"epochs": 1}))
    (folder / "features" / "s8_1.h5").unlink()
    capsys.readouterr()
    assert run(command(folder, "--config", "by=case", "--split", "test", "--modes", "remove")) == 0
    assert "c8 (without s8_1)" in capsys.readouterr().out
    assert json.loads((folder / "told" / "run.json").read_text())["incomplete_cases"] == {"c8": ["s8_1"]}


def test_the_viewer_finds_the_curves_of_a_case(by_case):
    from xmil.viewer.collection import ShownRun

    methods = ShownRun(by_case).certificate("s8_1")["methods"]
    assert len(methods[0]["morf"]) == 11
