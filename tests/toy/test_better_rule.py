"""A small version of the study behind the default rule: features with a common mean, one trained model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from xmil.evaluate.evidence_batch import score_evidence
from xmil.toy.benchmark import Configuration, background, train
from xmil.toy.digit_tasks import TASKS
from xmil.toy.instances import load_instances
from xmil.toy.protocol import SETUPS, Protocol
from xmil.toy.scoring import MethodSpec, score_bags


@pytest.fixture(scope="module")
def study():
    """AttnMIL on one-hot digits that share a mean, as the features of an encoder do."""
    instances = load_instances("onehot")
    shared = np.random.default_rng(1).uniform(1, 2, size=instances.features.shape[1]).astype(np.float32)
    protocol = Protocol(
        repetitions=1,
        sizes=(300, 60, 60),
        bag_size=12,
        training={"optimizer": "adam", "lr": 1e-2, "epochs": 25, "patience": 25, "warmup": 0},
    )
    instances = replace(instances, features=instances.features + shared)
    setup = replace(SETUPS["attnmil"], params={"dim": 16, "attention_dim": 8})
    c = Configuration(TASKS["four_bags"], setup, instances, protocol)
    model, splits, table = train(c).models.model(0), c.splits(0), c.table()
    x = table.bags(table.to_rows(splits.test.rows))
    truth = torch.from_numpy(c.task.evidence(splits.test.codes))
    return model, background(c, splits), x, truth


def _auprc2(model, x, truth, preset):
    scores = score_bags(model, x, MethodSpec("lrp", preset))
    return float(score_evidence(truth, scores)["auprc2"].nanmean())


def test_evidence_ranks_better_against_an_ordinary_patch(study):
    model, typical, x, truth = study
    model.background = None
    before = _auprc2(model, x, truth, "default")
    assert before == _auprc2(model, x, truth, "exact")
    model.background = typical
    assert _auprc2(model, x, truth, "default") > before + 0.01
    assert _auprc2(model, x, truth, "exact") == before


def test_many_bags_at_once_score_as_one_by_one(study):
    import xmil

    model, typical, x, _ = study
    for model.background in (typical, None):
        many = score_bags(model, x[:3], MethodSpec("lrp", "centred"))
        for bag, scores in zip(x[:3], many, strict=True):
            alone = xmil.explain_classes(model, bag, method="lrp", preset="centred")
            np.testing.assert_allclose(scores, np.stack([e.scores for e in alone]), atol=1e-4)
