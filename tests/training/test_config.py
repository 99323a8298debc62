"""Settings: unknown names, bad values, changes, the grid, and TOML both ways."""

from __future__ import annotations

import tomllib

import pytest

from xmil.core.errors import FileError, InputError
from xmil.training.config import (
    at_point,
    differences,
    dumps,
    grid_points,
    load_config,
    make_config,
    plain,
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"trainn": {}}, "Did you mean 'train'"),
        ({"optim": {"momentun": 0.9}}, "Did you mean 'momentum'"),
        ({"model": {"dropuot": 0.1}}, "Did you mean 'dropout'"),
        ({"model": {"name": "atnmil"}}, "Did you mean 'attnmil'"),
        ({"model": {"name": "transmil", "gated": True}}, "key of \\[model\\] 'gated'"),
        ({"train": {"epochs": 0}}, "train.epochs"),
        ({"train": {"epochs": 5, "warmup": 5}}, "less than train.epochs"),
        ({"train": {"monitor": "c_index"}}, "train.monitor must be one of auc"),
        ({"task": "survival", "train": {"monitor": "auc"}}, "one of c_index, loss"),
        ({"task": "cox"}, "train.batch"),
        ({"task": "multilabel"}, "data.labels"),
        ({"data": {"folds": 3, "fold_column": "fold"}}, "cannot be combined"),
        ({"optim": {"lr": "fast"}}, "optim.lr"),
        ({"optim": {"lr": float("inf")}}, "optim.lr"),
        ({"grid": {"optim.lrr": [1]}}, "Did you mean 'lr'"),
        ({"grid": {"optim.lr": [0.1, -1.0]}}, "optim.lr"),
        ({"grid": {"data.label": ["a"]}}, "must name a setting"),
        ({"grid": {"optim.lr": []}}, "has no values"),
    ],
)
def test_faults_are_named_in_one_line(content, words):
    with pytest.raises(InputError, match=words) as caught:
        make_config(content)
    assert "\n" not in str(caught.value)


def test_the_file_and_what_is_wrong_with_it(tmp_path):
    path = tmp_path / "c.toml"
    with pytest.raises(FileError, match="no such file"):
        load_config(path)
    path.write_text("[train\nepochs = 1")
    with pytest.raises(FileError, match="not a valid TOML"):
        load_config(path)
    path.write_text("[train]\nepochs = 7\n")
    changed = load_config(path, ["train.seed=3", "optim.name=sgd", "data.class_names=['a', 'b']"])
    assert (changed.train.epochs, changed.train.seed, changed.optim.name) == (7, 3, "sgd")
    assert changed.data.class_names == ["a", "b"]
    with pytest.raises(InputError, match="must have the form"):
        load_config(path, ["train.seed"])


def test_the_resolved_settings_are_toml_that_reads_back():
    content = {
        "task": "regression",
        "data": {"features": ["a b", 'quo"te'], "class_names": ["HPV+", "é"]},
        "model": {"name": "transmil", "dropout": 0.25, "ppeg": False},
        "optim": {"clip": 1.0, "lr": 2e-4},
        "grid": {"optim.lr": [1e-3, 1e-4], "scheme": [{"model.dropout": 0.0}, {"model.dropout": 0.5}]},
    }
    config = make_config(content)
    assert make_config(tomllib.loads(dumps(plain(config)))) == config


def test_grid_points_combine_and_coupled_settings_change_together():
    grid = {
        "optim.lr": [0.1, 0.2],
        "dropout": [{"model.dropout": 0.0}, {"model.dropout": 0.2, "model.bag_dropout": 0.5}],
    }
    config = make_config({"model": {"name": "transmil"}, "grid": grid})
    points = grid_points(config)
    assert len(points) == 4
    assert points[3] == {"optim.lr": 0.2, "model.dropout": 0.2, "model.bag_dropout": 0.5}
    at = at_point(config, points[3])
    assert (at.optim.lr, at.model.params["bag_dropout"], at.grid) == (0.2, 0.5, {})


def test_differences_name_the_key_and_ignore_the_machine():
    old = plain(make_config({}))
    new = plain(make_config({"optim": {"lr": 0.5}, "train": {"device": "cuda", "workers": 3}, "out": "x"}))
    assert differences(old, new) == ["optim.lr was 0.0001, now 0.5"]
    assert differences(old, old) == []
