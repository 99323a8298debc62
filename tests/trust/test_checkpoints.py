"""Checkpoints: what the outputs mean is said by the files, asked for, or assumed with a warning."""

from __future__ import annotations

import csv
import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import xmil
from tests.models import originals
from tests.models.originals import layers, tensors
from tests.models.test_originals import CASES, CLAM
from xmil.cli._app import run
from xmil.core.errors import CheckpointError
from xmil.models import describe_checkpoint

D = 7
SURVIVAL_BINS = np.array([0.0, 11.0, 25.0, 60.0, np.inf])


def attnmil_keys(n_outputs: int, head: str = "linear_head") -> dict[str, torch.Tensor]:
    """An AttnMIL of the successor, whose last layer is `linear_head`."""
    shapes = layers(
        linear_layers__0__0=(6, D), attention__0=(4, 6), attention__2=(1, 4), **{head: (n_outputs, 6)}
    )
    return tensors(shapes)


def write(folder: Path, n_outputs: int, **args: object) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save({"model_state_dict": attnmil_keys(n_outputs)}, folder / "best_model.pt")
    settings = {"aggregation_model": "attention_mil", "head_dim": n_outputs, **args}
    (folder / "args.json").write_text(json.dumps(settings))
    return folder / "best_model.pt"


def bag(n: int = 8) -> torch.Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(1))


def test_item_09_survival_is_read_from_the_files_beside(tmp_path: Path) -> None:
    path = write(tmp_path, 4, head_type="survival")
    np.save(tmp_path / "survival_bins.npy", SURVIVAL_BINS)
    model = xmil.load_model(path)
    assert model.task == "survival"
    assert model.spec.time_bins == (11.0, 25.0, 60.0)
    assert model.warnings == ()
    e = xmil.explain(model, bag())
    hazards = 1 / (1 + np.exp(-e.logits.astype(float)))
    assert str(e.target) == "risk"
    assert e.output == pytest.approx(-np.cumprod(1 - hazards).sum(), abs=1e-5)


def test_item_09_regression_is_read_from_the_files_beside(tmp_path: Path) -> None:
    path = write(tmp_path, 1, head_type="regression", ref_value=None)
    (tmp_path / "ref_value.json").write_text("0.375")
    model = xmil.load_model(path)
    assert (model.task, model.spec.reference, model.spec.relative) == ("regression", 0.375, True)
    e = xmil.explain(model, bag())
    assert e.output == pytest.approx(float(e.logits[0]), abs=1e-6)  # already the value minus the reference
    xmil.save_model(model, tmp_path / "ours.safetensors")
    assert xmil.load_model(tmp_path / "ours.safetensors").spec == model.spec


@pytest.mark.parametrize(
    ("file", "task", "n_outputs"), [("survival_bins.npy", "survival", 4), ("ref_value.json", "regression", 1)]
)
def test_item_09_a_side_file_alone_decides(file: str, task: str, n_outputs: int, tmp_path: Path) -> None:
    path = write(tmp_path, n_outputs)
    (tmp_path / "args.json").unlink()
    np.save(tmp_path / file, SURVIVAL_BINS) if file.endswith("npy") else (tmp_path / file).write_text("2")
    assert xmil.load_model(path).task == task


def test_item_09_the_papers_settings_are_those_of_a_classifier(tmp_path: Path) -> None:
    model = xmil.load_model(write(tmp_path, 2, num_classes=2))
    assert (model.task, model.warnings) == ("classification", ())


def contradicting(folder: Path, what: str) -> Path:
    path = write(folder, 4, head_type={"head": "regression", "unknown": "ordinal"}.get(what, "survival"))
    bins = {
        "head": SURVIVAL_BINS,
        "edges": SURVIVAL_BINS[:3],
        "text": np.array(["a"] * 5),
        "both": SURVIVAL_BINS,
    }
    if what in bins:
        np.save(folder / "survival_bins.npy", bins[what])
    if what == "both":
        (folder / "ref_value.json").write_text("1")
    if what == "pickle":
        np.save(folder / "survival_bins.npy", np.array([{"a": 1}] * 5, dtype=object), allow_pickle=True)
    if what == "falling":
        np.save(folder / "survival_bins.npy", np.array([0.0, 9.0, 3.0, 12.0, np.inf]))
    if what in ("word", "json"):
        args = {"aggregation_model": "attention_mil", "head_type": "regression"}
        (folder / "args.json").write_text(json.dumps(args))
        (folder / "ref_value.json").write_text('"low"' if what == "word" else "{")
    return path


@pytest.mark.parametrize("file", ["survival_bins.npy", "ref_value.json", "args.json"])
@pytest.mark.parametrize("kind", ["broken link", "circle", "pipe", "folder"])
def test_item_09_a_side_file_that_leads_nowhere_is_refused(file: str, kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, 4)
    side = tmp_path / file
    side.unlink(missing_ok=True)
    if kind == "folder":
        side.mkdir()
    elif kind == "pipe":
        os.mkfifo(side)
    else:
        side.symlink_to(side if kind == "circle" else tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=file):
        xmil.load_model(path)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("head", "contradict each other: head_type 'regression' in args.json, and survival_bins.npy"),
        ("both", "contradict each other"),
        ("unknown", "head_type 'ordinal', not one of"),
        ("edges", r"shape \(3,\), not 5 edges of 4 bins"),
        ("text", "not 5 edges"),
        ("pickle", "not an array of numbers"),
        ("falling", "rising times"),
        ("word", "holds 'low', not a number"),
        ("json", "not readable JSON"),
    ],
)
def test_item_09_side_files_that_do_not_fit_are_refused(what: str, message: str, tmp_path: Path) -> None:
    path = contradicting(tmp_path, what)
    with pytest.raises(CheckpointError, match=message) as caught:
        xmil.load_model(path)
    assert str(path.parent) in str(caught.value)


def test_item_09_a_task_that_is_given_settles_a_contradiction(tmp_path: Path) -> None:
    assert xmil.load_model(contradicting(tmp_path, "head"), task="multilabel").task == "multilabel"


def test_item_09_a_bare_state_dict_is_taken_as_classification_and_says_so(tmp_path: Path) -> None:
    torch.save(tensors(CLAM), tmp_path / "chief.pth")
    model = xmil.load_model(tmp_path / "chief.pth")
    [warning] = model.warnings
    assert "taken as classification" in warning
    assert warning in model.notes
    assert warning in xmil.explain(model, bag(), method="single").warnings
    assert describe_checkpoint(tmp_path / "chief.pth")["warnings"] == [warning]
    said = xmil.load_model(tmp_path / "chief.pth", task="classification")
    assert not said.warnings
    assert not xmil.explain(said, bag()).warnings


def test_item_09_inspect_says_that_classification_was_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from xmil.cli import main

    torch.save(tensors(CLAM), tmp_path / "chief.pth")
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", str(tmp_path / "chief.pth")])
    assert stopped.value.code == 0
    assert "taken as classification" in re.sub(r"\s+", " ", capsys.readouterr().out)


def test_item_09_the_risk_of_chief_is_its_second_logit(tmp_path: Path, rng: np.random.Generator) -> None:
    state = tensors(CLAM)
    torch.save(state, tmp_path / "chief.pth")
    model = xmil.load_model(tmp_path / "chief.pth", task="cox", head=1)
    x = rng.normal(size=(9, D)).astype(np.float32)
    e = xmil.explain(model, x)
    assert (model.task, model.n_classes, str(e.target), list(e.warnings)) == ("cox", 1, "risk", [])
    assert e.output == pytest.approx(originals.clam_sb(state, x.astype(float))[1], abs=1e-5)
    with pytest.raises(CheckpointError, match="head= of load_model keeps one output"):
        xmil.load_model(tmp_path / "chief.pth", task="cox")
    with pytest.raises(CheckpointError, match=r"'head' parameter of load_model must be .* Got 2 instead"):
        xmil.load_model(tmp_path / "chief.pth", task="cox", head=2)


def test_item_09_outputs_that_are_no_rows_of_a_layer_cannot_be_picked(tmp_path: Path) -> None:
    torch.save(tensors(CASES["dsmil-wsi"][0]), tmp_path / "dsmil.pth")
    with pytest.raises(CheckpointError, match="leave out `head="):
        xmil.load_model(tmp_path / "dsmil.pth", head=0)


def test_item_09_unknown_settings_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, 2, learning_rate=0.1, twist="left", turns=3)
    assert xmil.load_model(path).notes == ("args.json has unknown settings: turns, twist",)
    with pytest.raises(CheckpointError, match="num_encoders 40, an encoder for each patch"):
        xmil.load_model(write(tmp_path, 2, num_encoders=40))


def test_item_09_what_lies_beside_the_weights_is_named(tmp_path: Path) -> None:
    state = attnmil_keys(2)
    content = {"model_state_dict": {**state, "version": 3}, "ema": attnmil_keys(2), "epoch": 4}
    torch.save(content, tmp_path / "m.pt")
    notes = xmil.load_model(tmp_path / "m.pt", task="classification").notes
    assert notes == (
        "left out ema: other weights than 'model_state_dict'",
        "left out version: not tensors",
    )


@pytest.mark.parametrize("case", CASES)
def test_item_10_the_families_of_the_readme_load(case: str, tmp_path: Path) -> None:
    torch.save(tensors(CASES[case][0]), tmp_path / "m.pt")
    assert len(xmil.explain(xmil.load_model(tmp_path / "m.pt"), bag(), method="lrp").scores) == 8


@pytest.mark.parametrize("case", CASES)
def test_item_10_a_pickle_in_the_place_of_a_family_is_refused(case: str, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "went off",)  # type: ignore[return-value]

    key = next(iter(CASES[case][0]))
    torch.save({**tensors(CASES[case][0]), key: Bomb()}, tmp_path / "m.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(dict.fromkeys(CASES[case][0], Bomb()), protocol=2))
    for name in ("m.pt", "plain.pt"):
        with pytest.raises(CheckpointError, match="refused, it holds more than tensors"):
            xmil.load_model(tmp_path / name)
    assert not (tmp_path / "went off").exists()


def test_item_09_tables_hold_the_value_not_its_deviation(tmp_path: Path) -> None:
    """Outputs of the successor's regression are deviations; `predict` and `explain` add the reference."""
    path = write(tmp_path, 1, head_type="regression")
    (tmp_path / "ref_value.json").write_text("2.5")
    features = tmp_path / "features"
    features.mkdir()
    xmil.write_bag(xmil.Bag(bag().numpy(), slide_id="s"), features / "s.h5")
    deviation = float(xmil.load_model(path)(bag()[None])[0, 0].detach())
    for command in ("predict", "explain"):
        out = tmp_path / command
        assert run([command, "--model", str(path), "--features", str(features), "--out", str(out)]) == 0
        table = next(p for p in (out / "predictions.csv", out / "slides.csv") if p.is_file())
        [row] = csv.DictReader(table.read_text().splitlines())
        assert float(row["value"]) == pytest.approx(deviation + 2.5, abs=1e-4)
