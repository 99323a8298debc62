"""What a model's outputs mean: checked when it is made, kept in its file."""

from __future__ import annotations

from pathlib import Path

import pytest

import xmil
from xmil.core.errors import CheckpointError, InputError
from xmil.models import describe_checkpoint


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"n_classes": 1, "task": "regression", "reference": 3.5}, ("value",)),
        ({"n_classes": 1, "task": "regression", "reference": 3.5, "class_names": ["TMB"]}, ("TMB",)),
        ({"n_classes": 2, "task": "regression", "reference": (1.0, 2.0)}, None),
        (
            {"n_classes": 3, "task": "survival", "time_bins": (6.5, 24.0)},
            ("0-6.5", "6.5-24", "24+", "risk"),
        ),
        ({"n_classes": 2, "task": "survival"}, ("bin0", "bin1", "risk")),
        ({"n_classes": 1, "task": "cox", "encoder": "uni"}, ("risk",)),
    ],
)
def test_a_file_keeps_the_task(settings: dict[str, object], names: object, tmp_path: Path) -> None:
    model = xmil.create_model("meanpool", in_dim=3, seed=0, **settings)
    assert model.spec.target_names == names
    xmil.save_model(model, tmp_path / "m.safetensors")
    assert xmil.load_model(tmp_path / "m.safetensors").spec == model.spec
    assert describe_checkpoint(tmp_path / "m.safetensors")["task"] == settings["task"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "ranking"}, "'task' parameter"),
        ({"task": "cox", "n_classes": 2}, "1: the log risk"),
        ({"task": "regression", "reference": float("nan")}, "a finite number"),
        ({"task": "regression", "reference": (1.0, 2.0)}, "a finite number"),
        ({"task": "classification", "reference": 1.0}, "left out"),
        ({"task": "cox", "time_bins": (1.0,)}, "left out"),
        ({"task": "survival", "n_classes": 3, "time_bins": (1.0,)}, "2 rising times"),
        ({"task": "survival", "n_classes": 3, "time_bins": (2.0, 1.0)}, "2 rising times"),
        ({"task": "survival", "n_classes": 3, "time_bins": (0.0, 1.0)}, "2 rising times"),
        ({"task": "survival", "n_classes": 2, "class_names": ("early", "risk")}, "none of them 'risk'"),
        ({"task": "regression", "class_names": ("a", "b")}, "1 names"),
        ({"n_classes": 2, "class_names": ("a", "a")}, "all different"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        xmil.create_model("meanpool", in_dim=3, **{"n_classes": 1, **settings})


def test_the_task_of_another_file_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    xmil.save_model(xmil.create_model("meanpool", in_dim=3, n_classes=4), path)
    model = xmil.load_model(path, task="survival", time_bins=[1, 2, 3], encoder="uni")
    assert (model.task, model.spec.time_bins, model.spec.encoder) == ("survival", (1, 2, 3), "uni")
    with pytest.raises(CheckpointError, match="the log risk"):
        xmil.load_model(path, task="cox")
