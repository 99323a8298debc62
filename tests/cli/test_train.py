"""`xmil train`: settings resolved, bad input told in one line, one model over two processes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import xmil
from tests.training.cohorts import settings, write_cohort
from xmil.cli._app import run
from xmil.training.config import dumps, make_config


@pytest.fixture
def folder(tmp_path):
    return write_cohort(tmp_path, n=20)


def write_config(folder: Path, **sections) -> str:
    path = folder / "config.toml"
    path.write_text(dumps(settings(folder, **sections)))
    return str(path)


def edit(folder: Path, change) -> None:
    """Change cells of the cohort row by row."""
    with (folder / "cohort.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    lines = [",".join(rows[0])] + [",".join(change(dict(row)).values()) for row in rows]
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")


def test_dry_run_prints_the_resolved_settings(folder, capsys):
    config = write_config(folder)
    flags = [
        "--set",
        "optim.lr=1e-3",
        "--set",
        "train.seed=7",
        "--out",
        "else where",
        "--set",
        "data.folds=5",
        "--set",
        "train.device=cpu",
    ]
    assert run(["train", config, *flags, "--dry-run"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    resolved = make_config(printed)
    assert (resolved.optim.lr, resolved.train.seed, resolved.out, resolved.data.folds) == (
        1e-3,
        7,
        "else where",
        5,
    )
    assert resolved.train.batch == 4
    assert not (folder / "out").exists()


def test_a_training_ends_with_its_measures(folder, capsys):
    assert run(["train", write_config(folder, train={"epochs": 12})]) == 0
    said = capsys.readouterr().out
    assert "validation  loss" in said
    assert "1 model trained, 0 already done, 0 failed." in said
    assert run(["train", write_config(folder, train={"epochs": 12})]) == 0
    assert "0 models trained, 1 already done" in capsys.readouterr().out
    assert run(["train", write_config(folder, train={"epochs": 3}), "--restart"]) == 0
    assert json.loads((folder / "out" / "model" / "metrics.json").read_text())["epochs"] == 3


def refused(arguments: list[str], capsys, *words: str) -> None:
    """Exit code 2 and one line that holds the words."""
    capsys.readouterr()
    assert run(arguments) == 2
    said = capsys.readouterr().err
    line = [text for text in said.splitlines() if text.startswith("xmil: error:")]
    assert len(line) == 1
    assert "Traceback" not in line[0]
    for word in words:
        assert word in line[0]


def test_unknown_keys_and_other_settings(folder, capsys):
    config = write_config(folder, train={"epochs": 1})
    refused(["train", config, "--set", "train.epoch=3"], capsys, "Did you mean 'epochs'", config)
    refused(["train", str(folder / "no.toml")], capsys, "no.toml", "no such file")
    assert run(["train", config]) == 0
    refused(["train", config, "--set", "train.epochs=2"], capsys, "train.epochs was 1, now 2", "--restart")
    refused(["train", config, "--set", "train.device=warp"], capsys, "Unknown device 'warp'")


def test_nan_features_name_the_file(folder, capsys):
    bag = xmil.read_bag(folder / "features" / "s3.h5")
    x = bag.features.copy()
    x[2, 1] = np.nan
    xmil.write_bag(xmil.Bag(x, slide_id="s3", encoder="enc-a"), folder / "features" / "s3.h5")
    refused(["train", write_config(folder)], capsys, "s3.h5", "not finite")
    refused(["train", write_config(folder, train={"preload_gb": 0.0})], capsys, "s3.h5", "not finite")
    refused(
        ["train", write_config(folder, train={"preload_gb": 0.0, "workers": 1})],
        capsys,
        "s3.h5",
        "not finite",
    )


def test_an_unreadable_or_empty_file_is_named(folder, capsys):
    path = folder / "features" / "s5.h5"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(["train", write_config(folder)], capsys, "s5.h5")
    xmil.write_bag(xmil.Bag(np.zeros((0, 6)), slide_id="s5", encoder="enc-a"), path)
    refused(["train", write_config(folder)], capsys, "s5.h5", "no patches")


def test_width_and_encoder_must_agree(folder, capsys):
    path = folder / "features" / "s7.h5"
    xmil.write_bag(xmil.Bag(np.zeros((4, 9)), slide_id="s7", encoder="enc-a"), path)
    refused(["train", write_config(folder)], capsys, "s7.h5", "width 9", "has 6")
    xmil.write_bag(xmil.Bag(np.zeros((4, 6)), slide_id="s7", encoder="enc-b"), path)
    refused(["train", write_config(folder)], capsys, "s7.h5", "'enc-b'", "'enc-a'")


def test_missing_labels_are_refused_or_skipped(folder, capsys):
    edit(folder, lambda row: {**row, "label": "" if row["slide_id"] == "s4" else row["label"]})
    refused(["train", write_config(folder)], capsys, "1 slides have no label (s4)", "data.missing")
    config = write_config(folder, data={"missing": "skip"}, train={"epochs": 1})
    assert run(["train", config]) == 0
    said = json.loads((folder / "out" / "run.json").read_text())
    assert said["bags"]["count"] == 19
    assert "s4" in said["left_out"][0]
    assert "s4" in capsys.readouterr().out


def test_classes_that_cannot_be_learnt_or_measured(folder, capsys):
    three = write_config(folder, data={"class_names": ["neg", "pos", "unsure"]})
    refused(["train", three], capsys, "'unsure'", "no bag in the training set")
    edit(folder, lambda row: {**row, "label": "pos"} if row["split"] == "val" else row)
    refused(["train", write_config(folder)], capsys, "validation set has only the class 'pos'")
    assert run(["train", write_config(folder, train={"monitor": "loss", "epochs": 1})]) == 0
    edit(folder, lambda row: {**row, "label": "pos"})
    refused(["train", write_config(folder), "--restart"], capsys, "only one class ('pos')")


def test_cohort_and_features_that_do_not_join(folder, capsys):
    edit(folder, lambda row: {**row, "slide_id": "x" + row["slide_id"]})
    refused(["train", write_config(folder)], capsys, "no feature file has the name of a slide", "xs0")
    refused(["train", write_config(folder), "--features", "nowhere"], capsys, "nowhere", "no such folder")


def test_splits_that_leak_or_lack_a_side(folder, capsys):
    refused(["train", write_config(folder), "--set", "data.split=splt"], capsys, "Did you mean 'split'")
    edit(folder, lambda row: {**row, "split": "train" if row["split"] == "val" else row["split"]})
    refused(["train", write_config(folder)], capsys, "no bag for data.validation")
    edit(folder, lambda row: {**row, "case_id": "c0"})
    refused(["train", write_config(folder)], capsys, "1 cases lie in two splits")


def test_slides_without_features_are_said(folder, capsys):
    (folder / "features" / "s2.h5").unlink()
    assert run(["train", write_config(folder, train={"epochs": 1})]) == 0
    assert "1 slides have no features and are left out (s2)" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written(folder, capsys):
    (folder / "out").write_text("a file")
    refused(["train", write_config(folder)], capsys, "out", "cannot be made")


def test_two_processes_train_the_model_of_one(folder, full):
    """DDP on the CPU: the uneven last batch included, weights agree to rounding."""
    # 12 bags: 5, 5, 2. SGD: Adam would blow up rounding where the true gradient is zero
    sections = {"optim": {"name": "sgd"}, "train": {"epochs": 3, "batch": 5, "monitor": "loss"}}
    one, two = folder / "one", folder / "two"
    config = write_config(folder, **sections)
    assert run(["train", config, "--out", str(one)]) == 0
    command = [
        sys.executable,
        "-m",
        "xmil.cli",
        "train",
        config,
        "--out",
        str(two),
        "--set",
        "train.devices=2",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 model trained") == 1  # one process of the two speaks
    a, b = (xmil.load_model(out / "model" / "model.safetensors").state_dict() for out in (one, two))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)
    if full:
        refused_now = subprocess.run(
            [*command, "--set", "train.epochs=2"], capture_output=True, text=True, env=environment
        )
        assert refused_now.returncode == 2
        assert refused_now.stderr.count("train.epochs was 3, now 2") == 1


def test_every_broken_file_is_named_or_all_are_skipped(folder, capsys):
    features = folder / "features"
    (features / "s5.h5").write_bytes(b"damaged")
    (features / "s8.h5").write_bytes((features / "s8.h5").read_bytes()[:500])
    xmil.write_bag(xmil.Bag(np.zeros((0, 6)), slide_id="s9", encoder="enc-a"), features / "s9.h5")
    refused(["train", write_config(folder)], capsys, "3 of 20", "s5.h5", "s8.h5", "s9.h5", "data.missing")
    config = write_config(folder, data={"missing": "skip"}, train={"epochs": 1})
    assert run(["train", config]) == 0
    assert "3 feature files cannot be used and are left out (s5.h5, s8.h5, s9.h5)" in capsys.readouterr().out
    assert json.loads((folder / "out" / "run.json").read_text())["bags"]["count"] == 17


def test_an_empty_slide_of_a_case_is_named(tmp_path, capsys):
    folder = write_cohort(tmp_path, n=20, slides_per_case=2)
    path = folder / "features" / "s4_1.h5"
    xmil.write_bag(xmil.Bag(np.zeros((0, 6)), slide_id="s4_1", encoder="enc-a"), path)
    refused(["train", write_config(folder, data={"by": "case"})], capsys, "1 of 40", "s4_1.h5", "no patches")


def test_numbers_that_are_names_ask_for_class_names(folder, capsys):
    edit(folder, lambda row: {**row, "label": str(1 + int(row["grade"]))})
    config = write_config(folder, train={"monitor": "loss", "epochs": 1})
    refused(["train", config], capsys, "no 0", 'data.class_names = ["1", "2", "3"]')
    assert run(["train", config, "--set", 'data.class_names=["1", "2", "3"]']) == 0
    model = xmil.load_model(folder / "out" / "model" / "model.safetensors")
    assert model.class_names == ("1", "2", "3")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--set", "data.label=labels"], "Did you mean 'label'"),
        (["--set", "data.split=splt"], "Did you mean 'split'"),
        (["--set", "task='survival'", "--set", "data.time='tme'"], "Did you mean 'time'"),
    ],
)
def test_a_dry_run_checks_the_columns(folder, capsys, flags, words):
    refused(["train", write_config(folder), "--dry-run", *flags], capsys, words)
    assert run(["train", write_config(folder), "--dry-run", "--set", "data.folds=3"]) == 0
    assert run(["train", write_config(folder), "--dry-run", "--cohort", "not here.csv", *flags]) == 0
