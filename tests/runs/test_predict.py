"""`xmil predict` from end to end: every task, ensembles, cases, bad files, other encoders."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import xmil
from xmil.cli._app import run
from xmil.data.inspection import inspect_run
from xmil.evaluate import c_index
from xmil.storage import read_explanations

D, N = 6, 24
TASKS = {
    "classes": {"n_classes": 2, "class_names": ("HPV-", "HPV+"), "encoder": "uni"},
    "one": {"n_classes": 1, "class_names": ("HPV-", "HPV+")},
    "three": {"n_classes": 3},
    "labels": {"n_classes": 2, "task": "multilabel", "class_names": ("mut_a", "mut_b")},
    "value": {"n_classes": 1, "task": "regression", "class_names": ("score",), "reference": 1.0},
    "values": {"n_classes": 2, "task": "regression", "class_names": ("score", "age")},
    "survival": {"n_classes": 3, "task": "survival", "time_bins": (4.0, 8.0)},
    "cox": {"n_classes": 1, "task": "cox"},
}


def save_models(folder: Path) -> None:
    for name, settings in TASKS.items():
        for seed in range(3):
            model = xmil.create_model("meanpool", in_dim=D, dim=8, seed=seed, **settings)
            xmil.save_model(model, folder / f"{name}{seed}.safetensors")


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides in pairs of one case; the first feature says everything."""
    folder = tmp_path_factory.mktemp("predict")
    (folder / "features").mkdir()
    rng = np.random.default_rng(0)
    rows = [["slide_id", "case_id", "label", "grade", "mut_a", "mut_b", "score", "age", "time", "event"]]
    for i in range(N):
        s = rng.normal() if i % 2 == 0 else s  # noqa: F821  # the slides of a case share their truth
        x = rng.normal(size=(int(rng.integers(3, 12)), D)).astype(np.float32) + np.float32(s)
        xmil.write_bag(xmil.Bag(x, slide_id=f"s{i}", encoder="UNI"), folder / "features" / f"s{i}.h5")
        truth = ["HPV+" if s > 0 else "HPV-", int(np.digitize(s, [-0.5, 0.5])), int(s > 0.2), int(s < 0)]
        rows.append(
            [f"s{i}", f"c{i // 2}", *truth, f"{s:.4f}", 60 + i // 2, f"{5 + s:.3f}", i // 2 % 3 and 1]
        )
    with (folder / "cohort.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    save_models(folder)
    return folder


def command(folder: Path, model: str, out: Path, *more: str) -> list[str]:
    models = [part for name in model.split(",") for part in ("--model", f"{folder}/{name}.safetensors")]
    where = ["--features", f"{folder}/features", "--cohort", f"{folder}/cohort.csv", "--out", str(out)]
    return ["predict", *models, *where, "--config", "draws=50", *more]


def outputs(folder: Path, model: str, slides: list[str]) -> np.ndarray:
    net = xmil.load_model(folder / f"{model}.safetensors")
    bags = [xmil.read_bag(folder / "features" / f"{slide}.h5").features for slide in slides]
    with torch.no_grad():
        return net(torch.from_numpy(np.concatenate(bags))[None])[0].double().numpy()


def table(out: Path) -> list[dict[str, object]]:
    rows = pq.read_table(out / "predictions.parquet").to_pylist()
    with (out / "predictions.csv").open(newline="") as stream:
        written = list(csv.DictReader(stream))
    assert [row["slide_id"] for row in written] == [row["slide_id"] for row in rows]
    assert list(written[0]) == list(rows[0])
    return rows


def test_classes(cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command(cohort, "classes0", tmp_path)) == 0
    rows = table(tmp_path)
    assert [row["slide_id"] for row in rows] == [f"s{i}" for i in range(N)]
    assert (rows[5]["case_id"], rows[5]["n"]) == ("c2", len(xmil.read_bag(cohort / "features" / "s5.h5")))
    z = outputs(cohort, "classes0", ["s5"])
    p = np.exp(z) / np.exp(z).sum()
    assert [rows[5]["p:HPV-"], rows[5]["p:HPV+"]] == pytest.approx(p)
    assert [rows[5]["logit:HPV-"], rows[5]["logit:HPV+"]] == pytest.approx(z)
    assert rows[5]["predicted"] == ("HPV-", "HPV+")[int(p.argmax())]
    assert all(row["correct"] == (row["label"] == row["predicted"]) for row in rows)
    assert "spread" not in rows[0]
    report = json.loads((tmp_path / "metrics.json").read_text())
    right = np.mean([row["correct"] for row in rows])
    assert report["metrics"]["accuracy"]["estimate"] == pytest.approx(right)
    assert (report["labelled"], report["cases"], report["interval"]["drawn"]) == (N, N // 2, "cases")
    assert sum(report["confusion"]["HPV+"].values()) == report["classes"]["HPV+"]
    assert json.loads((tmp_path / "run.json").read_text())["kind"] == "predict"
    assert (tmp_path / "failures.csv").read_text() == "slide_id,error\n"
    for name in ("roc.png", "calibration.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    said = capsys.readouterr().out
    assert inspect_run(tmp_path).facts["predictions"] == N
    assert "AUROC" in said
    assert "24 with a label, of 12 cases" in said
    assert "warning" not in said  # "UNI" and "uni" are one encoder


def test_one_logit_has_two_classes(cohort: Path, tmp_path: Path) -> None:
    assert run(command(cohort, "one0", tmp_path)) == 0
    row = table(tmp_path)[0]
    z = outputs(cohort, "one0", ["s0"])[0]
    assert row["p:HPV+"] == pytest.approx(1 / (1 + np.exp(-z)))
    assert row["logit:HPV+"] == pytest.approx(z)
    assert "logit:HPV-" not in row


def test_numbered_classes_of_another_column(cohort: Path, tmp_path: Path) -> None:
    assert run(command(cohort, "three0", tmp_path, "--label", "grade")) == 0
    rows = table(tmp_path)
    assert {row["label"] for row in rows} <= {"0", "1", "2"}
    metrics = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    each = [metrics[f"auroc:{c}"]["estimate"] for c in range(3)]
    assert metrics["auroc"]["estimate"] == pytest.approx(np.mean(each))


def test_labels(cohort: Path, tmp_path: Path) -> None:
    assert run(command(cohort, "labels0", tmp_path)) == 0
    row = table(tmp_path)[3]
    p = 1 / (1 + np.exp(-outputs(cohort, "labels0", ["s3"])))
    assert [row["p:mut_a"], row["p:mut_b"]] == pytest.approx(p)
    assert row["predicted"] == "+".join(
        name for name, v in zip(("mut_a", "mut_b"), p, strict=True) if v > 0.5
    )
    assert (tmp_path / "roc.png").is_file()


def test_values(cohort: Path, tmp_path: Path) -> None:
    assert run(command(cohort, "value0", tmp_path)) == 0
    rows = table(tmp_path)
    assert rows[7]["value"] == pytest.approx(outputs(cohort, "value0", ["s7"])[0])
    metrics = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    error = np.mean([abs(row["value"] - row["label"]) for row in rows])
    assert metrics["mae"]["estimate"] == pytest.approx(error)
    assert (tmp_path / "values.png").is_file()


def test_a_value_without_a_name_is_the_label(cohort: Path, tmp_path: Path) -> None:
    xmil.save_model(
        xmil.create_model("meanpool", in_dim=D, n_classes=1, task="regression", seed=0),
        tmp_path / "m.safetensors",
    )
    (tmp_path / "cohort.csv").write_text("slide_id,label\ns0,1.5\ns1,2.5\n")
    where = ["--features", f"{cohort}/features", "--cohort", f"{tmp_path}/cohort.csv"]
    arguments = ["predict", "--model", f"{tmp_path}/m.safetensors", *where, "--out", f"{tmp_path}/out"]
    assert run(arguments) == 0
    assert [row["label"] for row in table(tmp_path / "out")] == [1.5, 2.5]


def test_several_values(cohort: Path, tmp_path: Path) -> None:
    assert run(command(cohort, "values0", tmp_path)) == 0
    rows = table(tmp_path)
    assert [rows[2]["value:score"], rows[2]["value:age"]] == pytest.approx(outputs(cohort, "values0", ["s2"]))
    assert rows[2]["label:age"] == 61
    assert "r2:age" in json.loads((tmp_path / "metrics.json").read_text())["metrics"]


@pytest.mark.parametrize("task", ["survival", "cox"])
def test_risks_are_those_explained(task: str, cohort: Path, tmp_path: Path) -> None:
    assert run(command(cohort, f"{task}0", tmp_path)) == 0
    rows = table(tmp_path)
    model = xmil.load_model(cohort / f"{task}0.safetensors")
    e = xmil.explain(model, xmil.read_bag(cohort / "features" / "s9.h5"))
    assert rows[9]["risk"] == pytest.approx(e.output, abs=1e-6)
    found = json.loads((tmp_path / "metrics.json").read_text())["metrics"]["c_index"]["estimate"]
    columns = [[row[name] for row in rows] for name in ("time", "event", "risk")]
    assert found == pytest.approx(c_index(*columns))
    if task == "survival":
        alive = [rows[9][f"S:{name}"] for name in ("0-4", "4-8", "8+")]
        assert -sum(alive) == pytest.approx(rows[9]["risk"])
    assert (tmp_path / "survival.png").is_file()


def test_an_ensemble_is_the_mean_with_its_spread(cohort: Path, tmp_path: Path) -> None:
    assert run(command(cohort, "classes0,classes1,classes2", tmp_path)) == 0
    row = table(tmp_path)[4]
    z = np.stack([outputs(cohort, f"classes{m}", ["s4"]) for m in range(3)])
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    assert [row["logit:HPV-"], row["logit:HPV+"]] == pytest.approx(z.mean(axis=0))
    chosen = int(z.mean(axis=0).argmax())
    assert row["spread"] == pytest.approx(p[:, chosen].std(ddof=1))
    report = json.loads((tmp_path / "metrics.json").read_text())
    assert len(report["each_model"]) == 3
    alone = tmp_path / "alone"
    assert run(command(cohort, "classes1", alone)) == 0
    single = json.loads((alone / "metrics.json").read_text())["metrics"]["auroc"]["estimate"]
    assert report["each_model"][1]["metrics"]["auroc"] == pytest.approx(single)


def test_the_folder_of_a_training_run_is_an_ensemble(cohort: Path, tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    trained.mkdir()
    for m in range(2):
        (trained / f"fold{m}.safetensors").write_bytes((cohort / f"cox{m}.safetensors").read_bytes())
    (trained / "best.json").write_text('{"models": ["fold0.safetensors", "fold1.safetensors"]}')
    where = ["--features", f"{cohort}/features", "--out", str(tmp_path / "out")]
    assert run(["predict", "--model", str(trained), *where]) == 0
    row = table(tmp_path / "out")[0]
    expected = np.mean([outputs(cohort, f"cox{m}", ["s0"])[0] for m in range(2)])
    assert row["risk"] == pytest.approx(expected)
    assert not (tmp_path / "out" / "survival.png").exists()  # no cohort: nothing to measure against
    (trained / "best.json").write_text("{}")
    assert run(["predict", "--model", str(trained), *where]) == 2


def test_models_that_do_not_agree_are_refused(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(cohort, "classes0,three0", tmp_path)) == 2
    assert "must agree" in capsys.readouterr().err


def test_one_bag_for_a_case(cohort: Path, tmp_path: Path) -> None:
    assert run(command(cohort, "value0", tmp_path, "--config", "by=case")) == 0
    rows = table(tmp_path)
    assert len(rows) == N // 2
    assert (rows[1]["slide_id"], rows[1]["case_id"]) == ("s2;s3", "c1")
    assert rows[1]["value"] == pytest.approx(outputs(cohort, "value0", ["s2", "s3"])[0], rel=1e-5)


def test_workers_give_the_same(cohort: Path, tmp_path: Path) -> None:
    for name, more in {"here": [], "processes": ["--workers", "2"]}.items():
        assert run(command(cohort, "survival0", tmp_path / name, *more)) == 0
    here, there = ((tmp_path / name / "predictions.csv").read_bytes() for name in ("here", "processes"))
    assert here == there


def test_bad_files_are_named_and_the_rest_goes_on(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features = tmp_path / "features"
    features.mkdir()
    good = (cohort / "features" / "s0.h5").read_bytes()
    for i in range(4):
        (features / f"s{i}.h5").write_bytes(good)
    (features / "s1.h5").write_bytes(good[: len(good) // 2])
    xmil.write_bag(xmil.Bag(np.ones((3, D + 1)), slide_id="s2"), features / "s2.h5")
    where = ["--features", str(features), "--out", str(tmp_path / "out")]
    assert run(["predict", "--model", f"{cohort}/cox0.safetensors", *where]) == 1
    assert [row["slide_id"] for row in table(tmp_path / "out")] == ["s0", "s3"]
    with (tmp_path / "out" / "failures.csv").open(newline="") as stream:
        failed = {row["slide_id"]: row["error"] for row in csv.DictReader(stream)}
    assert set(failed) == {"s1", "s2"}
    assert f"width {D}" in failed["s2"]
    assert "2 predicted, 2 failed" in capsys.readouterr().out
    for name in ("s0", "s3"):
        (features / f"{name}.h5").unlink()
    assert run(["predict", "--model", f"{cohort}/cox0.safetensors", *where]) == 2
    assert "failures.csv says why" in capsys.readouterr().err
    assert not (tmp_path / "out" / "predictions.csv").exists()  # those of the earlier run are gone


def test_features_of_another_encoder_are_warned_of(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = xmil.create_model("meanpool", in_dim=D, n_classes=1, task="cox", encoder="conch_v15")
    xmil.save_model(model, tmp_path / "m.safetensors")
    where = ["--features", f"{cohort}/features", "--out", str(tmp_path / "out")]
    assert run(["predict", "--model", f"{tmp_path}/m.safetensors", *where]) == 0
    said = capsys.readouterr().out
    assert "trained on features of 'conch_v15', but 24 slides have those of 'UNI'" in said
    assert "conch_v15" in json.loads((tmp_path / "out" / "metrics.json").read_text())["warnings"][0]


def test_cases_seen_in_training_are_warned_of(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = tmp_path / "trained"
    for m in range(2):
        (trained / f"grid0-fold{m}").mkdir(parents=True)
        model = (cohort / f"cox{m}.safetensors").read_bytes()
        (trained / f"grid0-fold{m}" / "model.safetensors").write_bytes(model)
    (trained / "run.json").write_text('{"kind": "train"}')
    rows = [f"s{i},c{i // 2},{'test' if i < 4 else f'fold{i // 2 % 2}'}" for i in range(N)]
    (trained / "cohort.csv").write_text("\n".join(["slide_id,case_id,split", *rows]) + "\n")
    models = [f"--model={trained}/grid0-fold{m}/model.safetensors" for m in range(2)]
    where = ["--features", f"{cohort}/features", "--cohort", f"{cohort}/cohort.csv", "--config", "draws=5"]
    assert run(["predict", *models, *where, "--out", str(tmp_path / "both")]) == 0
    assert f"{N - 4} of the {N} bags here were in the training of a model" in capsys.readouterr().out
    assert run(["predict", models[0], *where, "--out", str(tmp_path / "one")]) == 0
    assert f"10 of the {N} bags here were in the training" in capsys.readouterr().out
    asked = [*where[:-2], "--out", str(tmp_path / "explained")]
    assert run(["explain", models[0], *asked]) == 0
    assert f"10 of the {N} bags here were in the training" in capsys.readouterr().out
    shutil.copytree(cohort / "features", tmp_path / "features")
    for i in (0, N - 1):  # one of the test split, one of the training
        (tmp_path / "features" / f"s{i}.h5").write_bytes(b"damaged")
    for verb in ("predict", "explain"):  # both count the bags that have a result
        place = ["--features", f"{tmp_path}/features", "--out", f"{tmp_path}/{verb}-some"]
        assert run([verb, models[0], *place]) == 1
        assert f"9 of the {N - 2} bags here were in the training" in capsys.readouterr().out
    (trained / "run.json").write_text('{"kind": "other"}')
    assert run(["predict", models[0], *where, "--out", str(tmp_path / "none")]) == 0
    assert "warning" not in capsys.readouterr().out


def test_bins_of_their_own_have_no_common_names(cohort: Path, tmp_path: Path) -> None:
    model = xmil.create_model("meanpool", in_dim=D, dim=8, n_classes=3, task="survival", time_bins=(3.0, 7.0))
    xmil.save_model(model, tmp_path / "m.safetensors")
    models = ["--model", f"{cohort}/survival0.safetensors", "--model", f"{tmp_path}/m.safetensors"]
    assert run(["predict", *models, "--features", f"{cohort}/features", "--out", f"{tmp_path}/out"]) == 0
    assert "S:bin0" in table(tmp_path / "out")[0]


def test_other_settings_need_restart(cohort: Path, tmp_path: Path, capsys) -> None:
    assert run(command(cohort, "cox0", tmp_path)) == 0
    assert run(command(cohort, "cox0", tmp_path)) == 0
    assert run(command(cohort, "cox1", tmp_path)) == 2
    assert "--restart" in capsys.readouterr().err
    assert run(command(cohort, "classes0", tmp_path, "--restart")) == 0
    assert not (tmp_path / "survival.png").exists()
    assert (tmp_path / "roc.png").exists()


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("classes0", ["--label", "grade"], "has a class 2, but"),
        ("classes0", ["--label", "case_id"], "'c0' in column 'case_id' is not a class of the model"),
        ("classes0", ["--label", "nope"], "Unknown column 'nope'"),
        ("labels0", ["--label", "mut_a"], "2 outputs"),
        ("labels0", ["--label", "mut_a,age"], "The column 'age'"),
        ("value0", ["--label", "case_id"], "must hold numbers"),
        ("cox0", ["--label", "weeks,event"], "weeks"),
        ("cox0", ["--config", "by=patient"], "by must be one of"),
        ("cox0", ["--config", "draws=-1"], "draws"),
        ("cox0", ["--split", "test"], "split"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: str, more: list[str], message: str, cohort: Path, tmp_path: Path, capsys
) -> None:
    assert run(command(cohort, model, tmp_path, *more)) == 2
    assert message in capsys.readouterr().err


def test_slides_without_a_case_are_named(cohort: Path, tmp_path: Path, capsys) -> None:
    """Empty cells and those that R writes are no patient; a table without any case has no unit but slides."""
    header, *lines = (cohort / "cohort.csv").read_text().splitlines()
    at = header.split(",").index("case_id")
    table, every = tmp_path / "cohort.csv", [line.split(",") for line in lines]
    where = ["--cohort", str(table), "--features", f"{cohort}/features", "--config", "draws=20"]
    model = ["predict", "--model", f"{cohort}/classes0.safetensors"]
    for empty in ({4: "", 9: "NA", 14: "NA"}, dict.fromkeys(range(N), "")):
        written = [[*row[:at], empty.get(i, row[at]), *row[at + 1 :]] for i, row in enumerate(every)]
        table.write_text("\n".join([header, *(",".join(row) for row in written)]) + "\n")
        assert run([*model, *where, "--out", str(tmp_path / str(len(empty)))]) == 0
    report = json.loads((tmp_path / "3" / "metrics.json").read_text())
    assert report["cases"] == N // 2 + 3
    [warning] = [text for text in report["warnings"] if "case_id" in text]
    assert all(name in warning for name in ("s4", "s9", "s14"))
    report = json.loads((tmp_path / str(N) / "metrics.json").read_text())
    assert (report["cases"], report["interval"]["drawn"], report["warnings"]) == (N, "slides", [])
    assert "taken as independent" in capsys.readouterr().out


def test_one_class_and_times_that_differ_are_said(cohort: Path, tmp_path: Path, capsys) -> None:
    header, *lines = (cohort / "cohort.csv").read_text().splitlines()
    names, every = header.split(","), [line.split(",") for line in lines]
    for row in every:
        row[names.index("label")] = "HPV+"
    every[0][names.index("time")] = "77"
    table = tmp_path / "cohort.csv"
    table.write_text("\n".join([header, *map(",".join, every)]) + "\n")
    said = {}
    for model in ("classes0", "survival0"):
        where = ["--cohort", str(table), "--features", f"{cohort}/features", "--out", str(tmp_path / model)]
        assert (
            run(["predict", "--model", f"{cohort}/{model}.safetensors", *where, "--config", "draws=20"]) == 0
        )
        said[model] = capsys.readouterr().out
    assert "No measure compares HPV-, HPV+" in said["classes0"]
    assert "slides of 1 case differ in 'time'" in said["survival0"]


def test_missing_labels_are_not_measured(cohort: Path, tmp_path: Path) -> None:
    lines = (cohort / "cohort.csv").read_text().splitlines()
    cells = lines[1].split(",")
    lines[1] = ",".join([*cells[:2], "", "", "", "", "", "", "", ""])
    (tmp_path / "cohort.csv").write_text("\n".join(lines) + "\n")
    for model in ("classes0", "labels0", "value0", "survival0"):
        out = tmp_path / model
        where = ["--cohort", f"{tmp_path}/cohort.csv", "--features", f"{cohort}/features", "--out", str(out)]
        assert (
            run(["predict", "--model", f"{cohort}/{model}.safetensors", *where, "--config", "draws=20"]) == 0
        )
        assert len(table(out)) == N
        assert json.loads((out / "metrics.json").read_text())["labelled"] == N - 1


def test_explain_reaches_every_task(cohort: Path, tmp_path: Path) -> None:
    asked = {"survival0": "predicted,4-8,8+:0-4", "value0": "score", "cox0,cox1": "risk", "classes0": "HPV+"}
    for model, targets in asked.items():
        arguments = command(cohort, model, tmp_path / model, "--target", targets)
        arguments = ["explain", *(a for a in arguments[1:] if a not in ("--config", "draws=50"))]
        assert run(arguments) == 0
        with (tmp_path / model / "slides.csv").open(newline="") as stream:
            row = next(csv.DictReader(stream))
        assert list(row)[5] == {"survival0": "risk", "value0": "value", "cox0,cox1": "risk"}.get(
            model, "p:HPV-"
        )
        columns = [e.column for e in read_explanations(tmp_path / model / "slides" / "s0.parquet")]
        expected = {"survival0": ["risk", "4-8", "8+-vs-0-4"], "value0": ["score"], "classes0": ["HPV+"]}
        assert columns == [f"lrp:{name}" for name in expected.get(model, ["risk"])]
    e = read_explanations(tmp_path / "cox0,cox1" / "slides" / "s0.parquet")[0]
    assert e.audit is not None
    assert abs(e.audit.other) < 1e-5
