"""Results and models on disk: what is there is not computed again, what is damaged is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from xmil.core.errors import FileError
from xmil.toy import store as run
from xmil.toy.benchmark import Configuration
from xmil.toy.digit_tasks import TASKS
from xmil.toy.instances import load_instances
from xmil.toy.protocol import SETUPS, Protocol
from xmil.toy.scoring import MethodSpec
from xmil.toy.store import Store, read_results, run_configuration

PROTOCOL = Protocol(repetitions=2, sizes=(32, 16, 12), bag_size=5, training={"epochs": 3, "warmup": 1})
CONFIGURATION = Configuration(TASKS["four_bags"], SETUPS["attnmil"], load_instances("onehot"), PROTOCOL)
METHODS = [MethodSpec("lrp"), MethodSpec("attention")]


def untimed(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.fixture
def stages(monkeypatch):
    """What was computed, in order."""
    seen = []
    for name in ("train", "score"):
        original = getattr(run, name)

        def noted(*args, name=name, original=original, **kwargs):
            seen.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(run, name, noted)
    return seen


def test_a_second_run_computes_nothing(tmp_path, stages):
    first = run_configuration(CONFIGURATION, METHODS, Store(tmp_path))
    second = run_configuration(CONFIGURATION, METHODS, Store(tmp_path))
    assert stages == ["train", "score"]
    assert first == second
    assert len(first) == 4
    assert {row["seed"] for row in first} == {0, 1}


def test_a_new_method_is_scored_on_the_stored_models(tmp_path, stages):
    run_configuration(CONFIGURATION, METHODS[:1], Store(tmp_path))
    later = run_configuration(CONFIGURATION, METHODS, Store(tmp_path))
    assert stages == ["train", "score", "score"]
    whole = run_configuration(CONFIGURATION, METHODS, Store(tmp_path / "fresh"))
    order = lambda row: (row["method"], row["repetition"])  # noqa: E731
    assert sorted(untimed(later), key=order) == sorted(untimed(whole), key=order)


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path, stages):
    def stop(stage, done, total):
        if (stage, done) == ("explain", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_configuration(CONFIGURATION, METHODS, Store(tmp_path), on_progress=stop)
    assert Store(tmp_path).results(CONFIGURATION) == []
    resumed = run_configuration(CONFIGURATION, METHODS, Store(tmp_path))
    assert stages == ["train", "score", "score"]
    assert untimed(resumed) == untimed(run_configuration(CONFIGURATION, METHODS, Store(tmp_path / "fresh")))


def test_models_come_back_as_they_were(tmp_path):
    run_configuration(CONFIGURATION, METHODS, Store(tmp_path))
    stored = Store(tmp_path).models(CONFIGURATION)
    again = run.train(CONFIGURATION)
    torch.testing.assert_close(stored.models.flat, again.models.flat)
    assert (stored.best_epoch, stored.epochs) == (again.best_epoch, again.epochs)


@pytest.mark.parametrize(
    "changed",
    [
        replace(CONFIGURATION, protocol=replace(PROTOCOL, seed=1)),
        replace(CONFIGURATION, protocol=replace(PROTOCOL, training={"epochs": 4})),
        replace(CONFIGURATION, instances=load_instances("onehot", seed=1)),
    ],
)
def test_other_settings_do_not_meet_stored_results(tmp_path, changed):
    run_configuration(CONFIGURATION, METHODS, Store(tmp_path))
    assert Store(tmp_path).results(changed) == []
    assert Store(tmp_path).models(changed) is None


def test_rows_are_in_parquet_with_their_settings(tmp_path):
    rows = run_configuration(CONFIGURATION, METHODS, Store(tmp_path))
    settings, stored = read_results(tmp_path / "results" / "four_bags-attnmil.parquet")
    assert stored == rows
    assert settings["protocol"]["sizes"] == [32, 16, 12]
    assert settings["data"]["shape"] == [4000, 10]
    assert all(np.isfinite(row["auprc2"]) for row in stored)


@pytest.mark.parametrize("kind", ["results", "models"])
def test_damaged_files_are_refused_by_name(tmp_path, kind):
    run_configuration(CONFIGURATION, METHODS, Store(tmp_path))
    (path,) = (tmp_path / kind).iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FileError, match="delete it to"):
        getattr(Store(tmp_path), kind)(CONFIGURATION)
    path.write_bytes(b"")
    with pytest.raises(FileError, match=path.name):
        getattr(Store(tmp_path), kind)(CONFIGURATION)


def test_methods_that_do_not_go_with_a_model_are_left_out(tmp_path):
    rows = run_configuration(CONFIGURATION, [MethodSpec("logits"), *METHODS], Store(tmp_path))
    assert {row["method"] for row in rows} == {"lrp", "attention"}
