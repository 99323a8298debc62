"""Runs from end to end: the loop against plain torch, every task, folds, repeats, grid, resumption."""

from __future__ import annotations

import csv
import json
import math
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import xmil
from tests.storage.earlier import as_of_0_2
from tests.training.cohorts import config_of, write_cohort
from xmil.core.durable import write_text
from xmil.core.errors import InputError
from xmil.data.dataset import BagDataset, EpochSampler
from xmil.training import train as runs
from xmil.training.fit import epoch_seed
from xmil.training.train import make_plan, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_cohort(tmp_path_factory.mktemp("cohort"))


def rows(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def same_weights(a, b):
    a, b = (xmil.load_model(path).state_dict() for path in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def log_without_time(path):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows(path)]


def test_the_loop_is_plain_training(folder, tmp_path):
    """Weighted cross entropy, padding, draws, shuffling, dropout, schedule and clip, written out."""
    config = config_of(
        folder,
        out=str(tmp_path / "out"),
        loss={"class_weights": [1.0, 3.0]},
        model={"dropout": 0.3},
        optim={"name": "sgd", "lr": 0.1, "schedule": "cosine", "clip": 0.5, "weight_decay": 0.01},
        train={"epochs": 3, "monitor": "loss"},
    )
    train(config)
    job = make_plan(config).jobs[0]
    paths = [folder / "features" / f"s{i}.h5" for i in range(30)]
    data = BagDataset(paths, [i % 2 for i in range(30)], draw=10, seed=job.seed)
    model = xmil.create_model(
        "attnmil", in_dim=6, n_classes=2, dim=8, attention_dim=4, dropout=0.3, seed=job.seed
    ).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for epoch in range(3):
        torch.manual_seed(epoch_seed(job.seed, epoch, 0))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 + math.cos(math.pi * epoch / 3)) / 2
        sampler = EpochSampler(18, seed=job.seed)
        sampler.set_epoch(epoch)
        order = [int(job.fold.train[place]) for _, place in sampler]
        total = 0.0
        for start in range(0, 18, 4):
            samples = [data[epoch, row] for row in order[start : start + 4]]
            n = max(len(s.bag) for s in samples)
            x = torch.stack([F.pad(s.features, (0, 0, 0, n - len(s.bag))) for s in samples])
            mask = torch.tensor([[k < len(s.bag) for k in range(n)] for s in samples])
            y = torch.tensor([s.target for s in samples])
            out = model(x) if mask.all() else model(x, mask)
            loss = F.cross_entropy(out, y, weight=torch.tensor([1.0, 3.0]))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            total += float(loss.detach()) * float((1 + 2 * y).sum())
        losses.append(total / sum(1 + 2 * (row % 2) for row in order))
    logged = [float(row["train_loss"]) for row in rows(tmp_path / "out" / "model" / "log.csv")]
    np.testing.assert_allclose(logged, losses, rtol=1e-5)
    last = torch.load(tmp_path / "out" / "model" / "last.ckpt", weights_only=True)["model"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(last[name], value, rtol=1e-4, atol=1e-6)


def test_best_epoch_warmup_and_early_stop(folder, tmp_path):
    out = tmp_path / "out"
    change = {"epochs": 40, "patience": 4, "warmup": 3, "monitor": "loss"}
    train(config_of(folder, out=str(out), optim={"lr": 0.3}, train=change))
    done = json.loads((out / "model" / "metrics.json").read_text())
    losses = [float(row["val_loss"]) for row in rows(out / "model" / "log.csv")]
    counted = losses[3:]
    assert done["best_epoch"] == 4 + int(np.argmin(counted))
    assert done["epochs"] == len(losses) == min(40, done["best_epoch"] + 4) < 40
    assert done["validation"]["loss"] == pytest.approx(min(counted), rel=1e-6)


TASKS = {
    "classification": ({}, "auc", 0.9),
    "multilabel": ({"data": {"labels": ["er", "pr"]}}, "auc", 0.9),
    "regression": ({"optim": {"lr": 0.05}}, "spearman", 0.5),
    "survival": ({"loss": {"bins": 3}}, "c_index", 0.6),
    "cox": ({"train": {"epochs": 20, "batch": 9}}, "c_index", 0.6),
}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_learns_and_its_model_says_what_it_is(folder, tmp_path, task):
    changes, measure, floor = TASKS[task]
    changes = {"train": {"epochs": 20}, **changes}
    out = tmp_path / "out"
    outcome = train(config_of(folder, out=str(out), task=task, **changes))
    assert outcome.best["validation"][measure]["mean"] >= floor
    assert outcome.best["test"][measure]["mean"] >= floor
    model = xmil.load_model(out / "model" / "model.safetensors")
    assert model.spec.task == task
    assert model.spec.encoder == "enc-a"
    known = {
        "classification": ("neg", "pos"),
        "multilabel": ("er", "pr"),
        "regression": ("value",),
    }
    assert model.spec.class_names == known.get(task)
    table = rows(folder / "cohort.csv")
    if task == "regression":
        mean = np.mean([float(row["value"]) for row in table if row["split"] == "train"])
        assert model.spec.reference == pytest.approx(mean)
    if task == "survival":
        assert len(model.spec.time_bins) == 2
    if task in ("survival", "cox"):
        at_risk = {row["slide_id"] for row in table if row["label"] == "pos"}
        risks = [(row["slide_id"] in at_risk, float(row["risk"])) for row in rows(out / "predictions.csv")]
        assert min(value for high, value in risks if high) > max(value for high, value in risks if not high)
    said = rows(out / "predictions.csv")
    assert [row["slide_id"] for row in said] == [r["slide_id"] for r in table if r["split"] == "test"]
    bag = xmil.read_bag(folder / "features" / f"{said[0]['slide_id']}.h5")
    with torch.no_grad():
        logits = model(torch.from_numpy(bag.features)[None])[0].double().numpy()
    if task == "classification":
        assert float(said[0]["p:pos"]) == pytest.approx(np.exp(logits[1]) / np.exp(logits).sum(), rel=1e-4)
    if task == "regression":
        assert float(said[0]["value"]) == pytest.approx(logits[0], rel=1e-4)
    if task == "cox":
        assert float(said[0]["risk"]) == pytest.approx(logits[0], rel=1e-4)


def test_a_multi_class_task_with_mixed_sizes_on_transmil(folder, tmp_path):
    model = {"name": "transmil", "dim": 16, "heads": 2, "landmarks": 4}
    config = config_of(
        folder, out=str(tmp_path), data={"label": "grade", "instances": 0}, train={"epochs": 8}
    )
    outcome = train(config.model_copy(update={"model": type(config.model)(**model)}))
    assert outcome.best["validation"]["auc"]["mean"] > 0.6


@pytest.mark.parametrize("scan", ["simple", "cross"])
def test_mamba_learns_from_features_and_coordinates(tmp_path, scan):
    """A cross scan is given the coordinates of each bag, in training, validation and `predict`."""
    from xmil.cli._app import run

    folder = write_cohort(tmp_path, n=20, coords=True)
    model = {"name": "mambamil", "dim": 8, "attention_dim": 4, "scan": scan}
    config = config_of(folder, train={"epochs": 8}, data={"instances": 6})
    train(config.model_copy(update={"model": type(config.model)(**model)}))
    places = ["--features", str(folder / "features"), "--cohort", str(folder / "cohort.csv")]
    told = ["--split", "test", "--out", str(tmp_path / "told")]
    assert run(["predict", "--model", str(folder / "out"), *places, *told]) == 0
    ours, theirs = rows(folder / "out" / "predictions.csv"), rows(tmp_path / "told" / "predictions.csv")
    test = {row["slide_id"]: row for row in ours if row["subset"] == "test"}
    for row in theirs:
        assert float(row["p:pos"]) == pytest.approx(float(test[row["slide_id"]]["p:pos"]), abs=1e-5)


def test_a_model_that_needs_coordinates_is_not_trained_without(folder, tmp_path):
    model = {"name": "mambamil", "dim": 8, "attention_dim": 4, "positions": "learned"}
    config = config_of(folder, out=str(tmp_path), train={"epochs": 1})
    with pytest.raises(xmil.XmilError, match=r"\.h5: has no level-0 coordinates, which the model needs"):
        train(config.model_copy(update={"model": type(config.model)(**model)}))


def test_folds_repeats_and_grid_in_one_run(folder, tmp_path):
    out = tmp_path / "out"
    config = config_of(
        folder,
        out=str(out),
        data={"folds": 3},
        train={"epochs": 2, "repeats": 2},
        grid={"optim.lr": [1e-6, 0.05]},
    )
    outcome = train(config)
    table = rows(out / "results.csv")
    assert len(table) == len(outcome.trained) == 2 * 3 * 2
    best = json.loads((out / "best.json").read_text())
    means = [np.mean([float(r["val_auc"]) for r in table if r["grid"] == g]) for g in "01"]
    assert best["grid"] == int(np.argmax(means))
    assert best["mean_validation"] == pytest.approx(max(means))
    assert all((out / name).is_file() for name in best["models"])
    assert len(best["models"]) == 6
    said = rows(out / "predictions.csv")
    seen = {repeat: [row["slide_id"] for row in said if row["repeat"] == repeat] for repeat in "01"}
    assert all(sorted(names) == sorted(f"s{i}" for i in range(30)) for names in seen.values())
    listed = {row["slide_id"]: row for row in rows(out / "cohort.csv")}
    assert all(listed[row["slide_id"]]["split"] == row["fold"] for row in said)
    assert listed["s1"]["label"] == "pos"
    plan = make_plan(config)
    for job in plan.jobs:
        parts = [set(getattr(job.fold, part).tolist()) for part in ("train", "validation", "test")]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 30
    assert not same_weights(out / best["models"][0], out / best["models"][1])


@pytest.mark.parametrize("scheme", ["shared", "next"])
def test_fold_schemes_from_a_column(folder, scheme):
    table = folder / f"{scheme}.csv"
    lines = (folder / "cohort.csv").read_text().splitlines()
    table.write_text(
        "\n".join([lines[0] + ",cv", *(f"{line},{i // 10}" for i, line in enumerate(lines[1:]))])
    )
    data = {"cohort": str(table), "fold_column": "cv", "scheme": scheme}
    folds = [job.fold for job in make_plan(config_of(folder, data=data)).jobs]
    assert [fold.test.tolist() for fold in folds] == [list(range(10 * k, 10 * k + 10)) for k in range(3)]
    for k, fold in enumerate(folds):
        expected = k if scheme == "shared" else (k + 1) % 3
        assert fold.validation.tolist() == list(range(10 * expected, 10 * expected + 10))
        assert len(fold.train) == (20 if scheme == "shared" else 10)


def test_cases_with_several_slides_are_one_bag(tmp_path):
    folder = write_cohort(tmp_path, n=20, slides_per_case=3)
    outcome = train(config_of(folder, data={"by": "case", "instances": 0}, train={"epochs": 12}))
    assert outcome.best["validation"]["auc"]["mean"] == 1.0
    plan = make_plan(config_of(folder, data={"by": "case"}))
    assert len(plan.training_set) == 20
    listed = rows(folder / "out" / "cohort.csv")
    assert [row["slide_id"] for row in listed[:4]] == ["s0_0", "s0_1", "s0_2", "s1_0"]
    assert {row["case_id"] for row in listed} == {f"c{i}" for i in range(20)}
    joined = plan.training_set.bags[0].bag.features
    parts = [xmil.read_bag(folder / "features" / f"s0_{k}.h5").features for k in range(3)]
    np.testing.assert_array_equal(joined, np.concatenate(parts))
    some = plan.training_set.bags.headers[0].read([0, len(parts[0]), len(joined) - 1]).features
    np.testing.assert_array_equal(some, joined[[0, len(parts[0]), -1]])


def test_an_interrupted_run_ends_in_the_same_bits(folder, tmp_path):
    def config(name):
        change = {"epochs": 6, "repeats": 2, "monitor": "loss"}
        optim = {"schedule": "cosine", "warmup_epochs": 2}
        return config_of(folder, out=str(tmp_path / name), model={"dropout": 0.2}, optim=optim, train=change)

    train(config("whole"))
    for stop in (3, 8, 14, 19):  # steps until an interruption, in the middle of an epoch of five
        heard = []

        def watch(job, _, heard=heard, stop=stop):
            def hear(step):
                heard.append(step)
                if len(heard) == stop:
                    raise KeyboardInterrupt

            return hear

        with pytest.raises(KeyboardInterrupt):
            train(config("broken"), on_job=watch)
    outcome = train(config("broken"))
    for job in ("repeat0", "repeat1"):
        whole, broken = tmp_path / "whole" / job, tmp_path / "broken" / job
        assert same_weights(whole / "model.safetensors", broken / "model.safetensors")
        assert log_without_time(whole / "log.csv") == log_without_time(broken / "log.csv")
        last = [torch.load(path / "last.ckpt", weights_only=True)["model"] for path in (whole, broken)]
        assert all(torch.equal(last[0][key], last[1][key]) for key in last[0])
    assert len(outcome.trained) + len(outcome.found) == 2
    assert (tmp_path / "whole" / "predictions.csv").read_text() == (
        tmp_path / "broken" / "predictions.csv"
    ).read_text()


def test_a_finished_model_is_not_trained_again_and_restart_does(folder, tmp_path):
    config = config_of(folder, out=str(tmp_path / "out"), train={"epochs": 2})
    assert train(config).trained == ["model"]
    stamp = (tmp_path / "out" / "model" / "model.safetensors").stat().st_mtime_ns
    again = train(config)
    assert (again.trained, again.found) == ([], ["model"])
    assert (tmp_path / "out" / "model" / "model.safetensors").stat().st_mtime_ns == stamp
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert train(config, restart=True).trained == ["model"]
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def folds_of(folder, out, **changes):
    """A config of two folds whose models are quickly trained."""
    return config_of(folder, out=str(out), data={"folds": 2}, train={"epochs": 2, **changes})


def test_a_model_without_its_record_is_taken_from_its_measures(folder, tmp_path, monkeypatch):
    """A training that is killed after the measures of the first model, before the ledger has them."""
    config = folds_of(folder, tmp_path / "out")
    monkeypatch.setattr("xmil.storage.RunWriter.record", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.undo()
    outcome = train(config)
    assert (outcome.found, outcome.trained) == (["fold0"], ["fold1"])
    (tmp_path / "out" / "fold0" / "metrics.json").write_text("{")
    assert train(config).trained == ["fold0"]  # from its last epoch


def test_a_lost_model_is_made_again_and_its_state_is_not_missed(folder, tmp_path):
    config = folds_of(folder, tmp_path / "out")
    train(config)
    lost, state = (tmp_path / "out" / "fold1" / name for name in ("model.safetensors", "last.ckpt"))
    lost.rename(tmp_path / "whole.safetensors")
    outcome = train(config)
    assert (outcome.found, outcome.trained) == (["fold0"], ["fold1"])
    assert same_weights(lost, tmp_path / "whole.safetensors")
    state.unlink()
    assert train(config).trained == []


def test_a_finished_run_of_0_2_goes_on_with_nothing_to_do(folder, tmp_path):
    config = folds_of(folder, tmp_path / "out")
    train(config)
    write_text(tmp_path / "out" / "fold0" / "events.out.tfevents.1", "of TensorBoard")
    results = rows(tmp_path / "out" / "results.csv")
    as_of_0_2(tmp_path / "out", without=("settings",))
    assert train(config).found == ["fold0", "fold1"]
    assert rows(tmp_path / "out" / "results.csv") == results
    as_of_0_2(tmp_path / "out", without=("settings",))
    with pytest.raises(InputError, match=r"train\.epochs was 2, now 1"):
        train(folds_of(folder, tmp_path / "out", epochs=1))
    (tmp_path / "out" / "fold0" / "notes.txt").write_text("mine")
    one = config_of(folder, out=str(tmp_path / "out"), train={"epochs": 1})
    assert train(one, restart=True).trained == ["model"]
    left = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert left.count("metrics.json") == 1
    assert not [name for name in left if name.startswith("events")]
    assert "notes.txt" in left


def test_restart_trains_again_where_no_list_of_files_is(folder, tmp_path):
    """As in runs before xmil 0.2, of other feature files."""
    out = tmp_path / "out"
    train(folds_of(folder, out))
    (out / "ledger.jsonl").unlink()
    table = (out / "cohort.csv").read_text()
    (out / "cohort.csv").write_text(table.replace("sampled:", "sampled:0"))
    with pytest.raises(InputError, match="feature files"):
        train(folds_of(folder, out))
    assert train(folds_of(folder, out), restart=True).trained == ["fold0", "fold1"]
    assert (out / "cohort.csv").read_text() == table


def test_another_config_or_cohort_in_the_folder_is_refused(folder, tmp_path):
    out = str(tmp_path / "out")
    train(config_of(folder, out=out, train={"epochs": 2}))
    with pytest.raises(InputError, match=r"train.epochs was 2, now 3.*restart=True"):
        train(config_of(folder, out=out, train={"epochs": 3}))
    train(config_of(folder, out=out, train={"epochs": 2, "workers": 1}))  # where it runs may differ
    fewer = folder / "fewer.csv"
    fewer.write_text("\n".join((folder / "cohort.csv").read_text().splitlines()[:-4]) + "\n")
    with pytest.raises(InputError, match=r"data.cohort was"):
        train(config_of(folder, out=out, data={"cohort": str(fewer)}, train={"epochs": 2}))


def test_a_changed_table_is_noticed(tmp_path):
    folder = write_cohort(tmp_path, n=20)
    config = config_of(folder, train={"epochs": 1})
    train(config)
    table = folder / "cohort.csv"
    table.write_text(table.read_text().replace("s4,c4,neg", "s4,c4,pos"))
    with pytest.raises(InputError, match=r"bags\.digest was"):
        train(config)


def test_bags_on_disk_give_the_same_model_as_bags_in_memory(folder, tmp_path):
    names = {
        "memory": {"preload_gb": 1.0},
        "disk": {"preload_gb": 0.0},
        "workers": {"preload_gb": 0.0, "workers": 2},
    }
    for name, change in names.items():
        train(config_of(folder, out=str(tmp_path / name), train={"epochs": 2, **change}))
    paths = [tmp_path / name / "model" / "model.safetensors" for name in names]
    assert same_weights(paths[0], paths[1])
    assert same_weights(paths[0], paths[2])


def test_a_diverging_point_of_the_grid_is_recorded_and_the_rest_goes_on(folder, tmp_path):
    out = tmp_path / "out"
    grid = {"optim.lr": [1e30, 0.05]}
    outcome = train(config_of(folder, out=str(out), optim={"name": "sgd"}, grid=grid))
    assert list(outcome.failed) == ["grid0"]
    assert "not finite" in outcome.failed["grid0"] or "no longer finite" in outcome.failed["grid0"]
    assert json.loads((out / "best.json").read_text())["point"] == {"optim.lr": 0.05}
    assert rows(out / "results.csv")[0]["failed"]
    again = train(config_of(folder, out=str(out), optim={"name": "sgd"}, grid=grid))
    assert (again.found, again.trained, again.failed) == (["grid1"], [], outcome.failed)


def test_deterministic_mode_puts_the_flags_back(folder, tmp_path):
    train(config_of(folder, out=str(tmp_path), train={"epochs": 1, "deterministic": True}))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_other_precisions(folder, tmp_path, precision):
    out = tmp_path / "out"
    outcome = train(config_of(folder, out=str(out), train={"epochs": 8, "precision": precision}))
    assert outcome.best["validation"]["auc"]["mean"] > 0.9
    kind = {"bf16-mixed": torch.float32, "64-true": torch.float64}[precision]
    model = xmil.load_model(out / "model" / "model.safetensors")
    assert next(model.parameters()).dtype == kind
    for row in rows(out / "predictions.csv"):  # measured in full precision
        x = torch.from_numpy(xmil.read_bag(folder / "features" / f"{row['slide_id']}.h5").features)
        with torch.no_grad():
            assert float(row["logit:pos"]) == pytest.approx(float(model(x[None].to(kind))[0, 1]), abs=1e-5)


def test_tensorboard_holds_each_epoch_once_after_a_kill(folder, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of(folder, out=str(tmp_path), train={"epochs": 5, "tensorboard": True})

    def watch(job, _):
        def hear(step):
            if step.epoch == 4:
                raise KeyboardInterrupt

        return hear

    with pytest.raises(KeyboardInterrupt):
        train(config, on_job=watch)
    train(config)
    events = EventAccumulator(str(tmp_path / "model"))
    events.Reload()
    assert [event.step for event in events.Scalars("val/auc")] == [1, 2, 3, 4, 5]


def test_large_bags_are_left_out_and_said(folder):
    sizes = [len(xmil.read_bag(folder / "features" / f"s{i}.h5")) for i in range(30)]
    found = make_plan(config_of(folder, data={"exclude_above": 15})).training_set
    assert len(found) == sum(n <= 15 for n in sizes)
    assert f"{sum(n > 15 for n in sizes)} bags have more than 15 patches" in found.notes[0]


def test_run_json_says_what_was_run(folder, tmp_path):
    train(config_of(folder, out=str(tmp_path), train={"epochs": 1}))
    said = json.loads((tmp_path / "run.json").read_text())
    assert said["kind"] == "train"
    assert said["class_names"] == ["neg", "pos"]
    assert said["encoder"] == "enc-a"
    assert said["bags"]["count"] == 30
    assert "torch" in said["versions"]


def test_folds_share_their_time_bins(folder, tmp_path):
    """Otherwise an ensemble would average intervals that differ under one name."""
    changes = {"task": "survival", "data": {"folds": 3}, "loss": {"bins": 3}, "train": {"epochs": 1}}
    train(config_of(folder, out=str(tmp_path / "out"), **changes))
    files = [tmp_path / "out" / f"fold{k}" / "model.safetensors" for k in range(3)]
    assert len({xmil.load_model(path).spec.time_bins for path in files}) == 1
    seen = [float(row["time"]) for row in rows(folder / "cohort.csv") if row["event"] == "1"]
    assert xmil.load_model(files[0]).spec.time_bins == pytest.approx(np.quantile(seen, [1 / 3, 2 / 3]))
    own = make_plan(config_of(folder, **{**changes, "loss": {"bins": 3, "bins_from": "fold"}}))
    assert len({job.goal.time_bins for job in own.jobs}) == 3


def test_bins_of_a_split_come_from_its_training_rows(folder):
    plan = make_plan(config_of(folder, task="survival", loss={"bins": 3}))
    table = [row for row in rows(folder / "cohort.csv") if row["split"] == "train" and row["event"] == "1"]
    edges = np.quantile([float(row["time"]) for row in table], [1 / 3, 2 / 3])
    assert plan.jobs[0].goal.time_bins == pytest.approx(edges)


@pytest.mark.parametrize("task", TASKS)
def test_predictions_are_those_of_predict(folder, tmp_path, task):
    """The same columns and cells as `xmil predict` writes for the same bags, apart from who was held out."""
    from xmil.cli._app import run

    out, told = tmp_path / "out", tmp_path / "told"
    train(config_of(folder, out=str(out), task=task, **{"train": {"epochs": 1}, **TASKS[task][0]}))
    places = ["--features", str(folder / "features"), "--cohort", str(folder / "cohort.csv")]
    assert run(["predict", "--model", str(out), *places, "--split", "test", "--out", str(told)]) == 0
    ours, theirs = rows(out / "predictions.csv"), rows(told / "predictions.csv")
    added = ("subset", "reference", "fold", "repeat", "model")
    assert [name for name in ours[0] if name not in added] == list(theirs[0])
    for a, b in zip(ours, theirs, strict=True):
        for name, cell in b.items():
            if name.partition(":")[0] in ("p", "logit", "S", "value", "risk"):
                assert float(a[name]) == pytest.approx(float(cell), rel=1e-4, abs=1e-5)
            else:
                assert a[name] == cell, name


def test_predictions_by_case_name_their_slides(tmp_path):
    folder = write_cohort(tmp_path, n=20, slides_per_case=2)
    train(config_of(folder, data={"by": "case"}, train={"epochs": 1}))
    first = rows(folder / "out" / "predictions.csv")[0]
    assert (first["slide_id"], first["case_id"]) == ("s8_0;s8_1", "c8")


@pytest.mark.parametrize("restart", [False, True])
def test_a_folder_of_the_user_is_left_alone(folder, tmp_path, restart):
    texts = {"config.toml": "# by hand\n", "cohort.csv": "slide_id,mine\n", "model/model.safetensors": ""}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=r"cohort\.csv"):
        train(config_of(folder, out=str(tmp_path)), restart=restart)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path)): path.read_text() for path in files} == texts


def test_a_training_killed_before_its_first_table_goes_on(folder, tmp_path, monkeypatch):
    config = config_of(folder, out=str(tmp_path / "out"), train={"epochs": 1})
    monkeypatch.setattr(runs, "dumps", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(config)
    monkeypatch.undo()
    assert train(config).trained == ["model"]


def test_files_and_slides_that_cannot_be_trained_on_are_skipped_or_refused_before(tmp_path):
    """A NaN, a truncated file, and a slide in no split without a label: the rest is trained."""
    folder = write_cohort(tmp_path)
    bag = xmil.read_bag(folder / "features" / "s1.h5")
    bag.features[3, 2] = np.nan
    xmil.write_bag(bag, folder / "features" / "s1.h5")
    damaged = folder / "features" / "s2.h5"
    damaged.write_bytes(damaged.read_bytes()[:200])
    table = (folder / "cohort.csv").read_text().replace("s3,c3,pos,", "s3,c3,,").splitlines()
    table = [line.removesuffix("train") if line.startswith("s3,") else line for line in table]
    (folder / "cohort.csv").write_text("\n".join(table) + "\n")
    with pytest.raises(InputError, match=r"s1\.h5: features are not finite.*s2\.h5"):
        make_plan(config_of(folder))
    plan = make_plan(config_of(folder, data={"missing": "skip"}))
    assert {"s1", "s2", "s3"}.isdisjoint(plan.training_set.cohort.slides)
    assert len(plan.training_set) == 27
    notes = " ".join(plan.training_set.notes)
    assert all(name in notes for name in ("s1.h5", "s2.h5", "s3"))


def test_feature_files_can_be_listed_one_by_one(tmp_path):
    folder = write_cohort(tmp_path, n=20)
    files = [str(folder / "features" / f"s{i}.h5") for i in range(20)]
    assert len(make_plan(config_of(folder, data={"features": files})).training_set) == 20
