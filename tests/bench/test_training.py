"""Stacked training: each repetition equals the same seed trained alone, and plain torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from xmil.bench import (
    PAPER_MODELS,
    SETUPS,
    TASKS,
    Configuration,
    Protocol,
    Stacked,
    Table,
    Training,
    fit,
    load_instances,
    stack_sets,
)
from xmil.core.errors import InputError, UnknownNameError
from xmil.models import create_model

ONE_HOT = load_instances("onehot")
PROTOCOL = Protocol(repetitions=3, sizes=(40, 24, 16), bag_size=6)  # 40 bags: the last batch is a short one
TRAINING = Training(lr=0.05, batch=16, epochs=8, patience=3, warmup=2)


def configuration(model, **changes):
    return Configuration(TASKS["four_bags"], SETUPS[model], ONE_HOT, replace(PROTOCOL, **changes))


def in_double(c):
    """Models, bags and features of a configuration in double precision."""
    shape = {"in_dim": 10, "n_classes": 4, **c.setup.params}
    models = [create_model(c.setup.name, seed=seed, **shape).double() for seed in c.seeds()]
    splits = [c.splits(r) for r in range(len(models))]
    return models, splits, Table(torch.from_numpy(c.instances.features).double())


def fitted(models, splits, table, training):
    train, validation = stack_sets([s.train for s in splits]), stack_sets([s.validation for s in splits])
    return fit(Stacked.of(models), train, validation, table, training=training)


def plain_training(model, splits, table, training):
    """One model with torch.optim, early stopping and best checkpoint written out."""
    optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=training.lr, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=training.lr),
    }[training.optimizer](model.parameters())
    x, val = (table.bags(torch.from_numpy(s.rows)) for s in (splits.train, splits.validation))
    y, val_y = (torch.from_numpy(s.labels) for s in (splits.train, splits.validation))
    best_loss, best_epoch, best = float("inf"), None, None
    for epoch in range(training.epochs):
        model.train()
        for start in range(0, len(y), training.batch):
            optimizer.zero_grad()
            F.cross_entropy(
                model(x[start : start + training.batch]), y[start : start + training.batch]
            ).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(val), val_y).item()
        if epoch >= training.warmup and loss < best_loss:
            best_loss, best_epoch = loss, epoch
            best = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        if epoch - (training.warmup if best_epoch is None else best_epoch) >= training.patience:
            break
    return best_loss, best_epoch, epoch + 1, best


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.full), "adam"])
@pytest.mark.parametrize("model", [*PAPER_MODELS, "mambamil"])
def test_a_repetition_equals_the_same_seed_alone_and_plain_torch(model, optimizer):
    training = replace(TRAINING, optimizer=optimizer, lr=0.05 if optimizer == "sgd" else 0.01)
    models, splits, table = in_double(configuration(model))
    together = fitted(models, splits, table, training)
    for r in range(3):
        alone = fitted(models[r : r + 1], splits[r : r + 1], table, training)
        torch.testing.assert_close(together.models.flat[r], alone.models.flat[0], rtol=1e-8, atol=1e-10)
        loss, epoch, epochs, best = plain_training(models[r], splits[r], table, training)
        assert (together.best_epoch[r], together.epochs[r]) == (epoch, epochs)
        assert together.best_loss[r] == pytest.approx(loss, rel=1e-8)
        torch.testing.assert_close(together.models.flat[r], best, rtol=1e-7, atol=1e-9)


def test_models_that_stop_early_leave_and_keep_their_best():
    models, splits, table = in_double(configuration("attnmil", repetitions=6))
    training = replace(TRAINING, optimizer="adam", lr=0.1, epochs=40, patience=2, warmup=1)
    left = []
    together = fit(
        Stacked.of(models),
        stack_sets([s.train for s in splits]),
        stack_sets([s.validation for s in splits]),
        table,
        training=training,
        on_epoch=lambda _, running: left.append(running),
    )
    assert len(set(together.epochs)) > 1  # otherwise nobody left before the others
    assert left[-1] == 0
    for r in range(6):
        loss, epoch, epochs, best = plain_training(models[r], splits[r], table, training)
        assert (together.best_epoch[r], together.epochs[r]) == (epoch, epochs)
        assert together.best_loss[r] == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(together.models.flat[r], best, rtol=1e-5, atol=1e-7)


def test_the_first_epochs_never_count_as_best():
    models, splits, table = in_double(configuration("attnmil"))
    diverging = replace(TRAINING, lr=0.5, warmup=6, epochs=9, patience=9)
    assert min(fitted(models, splits, table, diverging).best_epoch) >= 6


def test_stacked_models_give_the_outputs_of_each():
    models = [create_model("addmil", in_dim=5, n_classes=3, hidden=4, seed=s).eval() for s in range(3)]
    x = torch.randn(3, 2, 6, 5)
    out = Stacked.of(models)(x)
    for i, model in enumerate(models):
        torch.testing.assert_close(out[i], model(x[i]))
        torch.testing.assert_close(Stacked.of(models).model(i)(x[i]), model(x[i]))


def test_bags_are_those_of_the_repetition_whatever_their_number():
    few, many = configuration("attnmil", repetitions=2), configuration("attnmil", repetitions=9)
    np.testing.assert_array_equal(few.splits(1).train.rows, many.splits(1).train.rows)
    assert (few.splits(0).train.rows != few.splits(1).train.rows).any()
    shared = configuration("attnmil", shared_bags=True)
    np.testing.assert_array_equal(shared.splits(0).test.rows, shared.splits(2).test.rows)


def test_bad_training_is_refused():
    with pytest.raises(InputError, match="'epochs' parameter of Training must be an int in the range"):
        Training(epochs=0)
    models, splits, table = in_double(configuration("attnmil"))
    with pytest.raises(InputError, match="2 models need as many sets of bags"):
        fitted(models[:2], splits, table, TRAINING)
    with pytest.raises(UnknownNameError, match="optimizer"):
        fitted(models, splits, table, replace(TRAINING, optimizer="sdg"))
    with pytest.raises(InputError, match="smaller lr"):
        fitted(models, splits, table, replace(TRAINING, lr=1e30))
