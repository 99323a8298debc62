"""Results and models on disk: what is there is not computed again, what is damaged is refused."""

from __future__ import annotations

import json
import resource
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.bench.runs import ignore
from tests.storage.earlier import as_of_0_2
from xmil.bench import (
    SETUPS,
    SUITES,
    TASKS,
    Configuration,
    DigitProblem,
    Plan,
    Protocol,
    Unit,
    load_instances,
    load_stack,
    make_contests,
    measure_contests,
    method_entry,
    model_entry,
    read_units,
    rows_of,
    train_stacked,
    write_rows,
)
from xmil.bench.trained import save_tensors
from xmil.core.errors import FileError, WriteError
from xmil.storage import read_ledger

PROTOCOL = Protocol(repetitions=2, sizes=(32, 16, 12), bag_size=5, training={"epochs": 3, "warmup": 1})
CONFIGURATION = Configuration(TASKS["four_bags"], SETUPS["attnmil"], load_instances("onehot"), PROTOCOL)
METHODS = ("lrp", "attention")


def measured(out, methods=METHODS, configuration=CONFIGURATION, *, say=ignore, complete=True, **options):
    """The unit of a configuration after the referee has filled the folder."""
    c = configuration
    problem = DigitProblem.of(c.task, c.instances, c.protocol)
    entries = [method_entry(name) for name in methods], [model_entry(c.setup.name)]
    plan = Plan(protocol=c.protocol)
    contests = make_contests(SUITES["evidence"], [problem], plan, *entries, out=out, say=say)
    assert measure_contests(contests, out, {}, **options) is complete
    return Unit.read(contests[0].path)


def same(first, second):
    return first.values.keys() == second.values.keys() and all(
        np.array_equal(first.values[key], second.values[key], equal_nan=True) for key in first.values
    )


@pytest.fixture
def trainings(monkeypatch):
    """The configurations that were trained."""
    names = []

    def noted(configuration, **options):
        names.append(configuration.name)
        return train_stacked(configuration, **options)

    monkeypatch.setattr("xmil.bench.trained.train_stacked", noted)
    return names


def test_a_second_run_computes_nothing(tmp_path, trainings):
    first, second = measured(tmp_path), measured(tmp_path)
    assert trainings == ["four_bags-attnmil"]
    assert same(first, second)
    assert first.rows == second.rows  # their seconds, too
    assert {fact["seed"] for fact in first.facts.values()} == {0, 1}


def test_a_new_method_is_scored_on_the_stored_models(tmp_path, trainings):
    measured(tmp_path, METHODS[:1])
    later = measured(tmp_path)
    assert trainings == ["four_bags-attnmil"]
    assert same(later, measured(tmp_path / "fresh"))


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path, trainings):
    def stop(text, done, total):
        if text.startswith("evidence") and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, say=stop)
    (unit,) = read_units(tmp_path)
    assert unit.repetitions == [0]
    assert same(measured(tmp_path), measured(tmp_path / "fresh"))
    assert trainings == ["four_bags-attnmil"] * 2


def test_a_finished_run_of_0_2_goes_on_with_nothing_to_do(tmp_path, trainings):
    texts, first = [], measured(tmp_path)
    as_of_0_2(tmp_path)
    again = measured(tmp_path, say=lambda text, *_: texts.append(text))
    assert texts == []
    assert again.rows == first.rows
    assert list(read_ledger(tmp_path).records) == ["evidence--four_bags--attnmil"]
    first.path.unlink()
    assert same(measured(tmp_path), first)  # on the stored models
    assert trainings == ["four_bags-attnmil"]


def test_time_may_run_out_between_repetitions(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=iter([0, 2]).__next__, perf_counter=time.perf_counter)
    monkeypatch.setattr("xmil.bench.referee.time", clock)
    assert measured(tmp_path, complete=False, until=1).repetitions == [0]
    monkeypatch.undo()
    assert same(measured(tmp_path), measured(tmp_path / "fresh"))


def test_models_come_back_as_they_were(tmp_path):
    measured(tmp_path)
    stored, again = load_stack(tmp_path, CONFIGURATION), train_stacked(CONFIGURATION)
    torch.testing.assert_close(stored.models.flat, again.models.flat)
    assert (stored.best_epoch, stored.epochs) == (again.best_epoch, again.epochs)


CHANGED = [
    replace(CONFIGURATION, protocol=replace(PROTOCOL, seed=1)),
    replace(CONFIGURATION, protocol=replace(PROTOCOL, training={"epochs": 4})),
    replace(CONFIGURATION, instances=load_instances("onehot", seed=1)),
]


@pytest.mark.parametrize("changed", CHANGED)
def test_other_settings_do_not_meet_stored_results(tmp_path, changed):
    measured(tmp_path)
    assert load_stack(tmp_path, changed) is None
    anew = measured(tmp_path, configuration=changed, replace=True)
    assert same(anew, measured(tmp_path / "fresh", configuration=changed))


def test_a_killed_run_of_other_settings_leaves_no_trace(tmp_path):
    """The file has other settings and one repetition, though both were once recorded for these settings."""
    first = measured(tmp_path)

    def stop(text, done, total):
        if text.startswith("evidence") and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, configuration=CHANGED[0], replace=True, say=stop)
    assert same(measured(tmp_path, replace=True), first)


def test_rows_are_in_parquet_with_their_settings(tmp_path):
    unit, fitted = measured(tmp_path), load_stack(tmp_path, CONFIGURATION)
    rows = rows_of(unit, fitted)
    write_rows(tmp_path / "results" / "rows.parquet", rows, CONFIGURATION.settings())
    stored = pq.read_table(tmp_path / "results" / "rows.parquet", partitioning=None)
    assert stored.to_pylist() == rows
    settings = json.loads(stored.schema.metadata[b"xmil-toy"])
    assert settings["protocol"]["sizes"] == [32, 16, 12]
    assert settings["data"]["shape"] == [4000, 10]
    for row in rows:
        values = unit.values[row["repetition"], row["method"]]
        assert row["auprc2"] == pytest.approx(np.nanmean(values[:, 0]))
        assert row["epochs"] == fitted.epochs[row["repetition"]]
    fewer = replace(fitted, epochs=fitted.epochs[:1])  # a call for fewer repetitions than were measured
    assert rows_of(unit, fewer) == [row for row in rows if row["repetition"] == 0]


def test_damaged_files_are_refused_by_name(tmp_path):
    unit = measured(tmp_path)
    (model,) = (tmp_path / "models").iterdir()
    readers = {
        unit.path: lambda: read_units(tmp_path),
        model: lambda: load_stack(tmp_path, CONFIGURATION),
    }
    for path, read in readers.items():
        whole = path.read_bytes()
        for damaged in (whole[:-20], b""):
            path.write_bytes(damaged)
            with pytest.raises(FileError, match=rf"{path.name}: .* delete it"):
                read()


def test_methods_that_do_not_go_with_a_model_are_left_out(tmp_path):
    assert measured(tmp_path, ("logits", *METHODS)).methods == list(METHODS)


def test_models_on_a_full_disk_are_refused_in_one_line(tmp_path):
    """Whoever writes them: the library's own error names neither the file nor the way out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(WriteError, match=r"m\.safetensors"):
            save_tensors(tmp_path / "m.safetensors", {"weight": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []
