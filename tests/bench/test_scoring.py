"""Scoring many bags at once gives what `xmil.explain` gives for each, also behind the first layer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import xmil
from xmil.bench import (
    SETUPS,
    TASKS,
    Configuration,
    MethodSpec,
    Protocol,
    background,
    load_instances,
    project,
    score_bags,
    train_stacked,
)
from xmil.core.errors import InputError, UnknownNameError
from xmil.evaluate import score_evidence
from xmil.lrp import AffineRule, Composite
from xmil.methods import METHODS

SPECS = [
    "lrp", "lrp:exact", "lrp:paper", "lrp:released", "lrp@log_odds", "lrp:paper@contrastive", "attention",
    "attention:unfolded",
    "gxi", "gxi@log_odds", "grad2", "ig", "single", "single@logit", "one_removed", "combined", "logits",
    "one_added", "logits@contrastive", "milli", "shapley",
]  # fmt: skip
MODELS = {
    "attnmil": {"dim": 8, "attention_dim": 6, "n_out_layers": 1},
    "transmil": {"dim": 8},
    "addmil": {"hidden": 8},
}


def model_of(name):
    return xmil.create_model(name, in_dim=12, n_classes=3, seed=1, **MODELS[name]).double()


PAIRS = [(name, text) for name in MODELS for text in SPECS if MethodSpec.parse(text).supports(model_of(name))]
CASES = [(name, text, n) for name, text in PAIRS for n in ((7,) if text in ("milli", "shapley") else (1, 30))]


@pytest.mark.parametrize(("name", "text", "n"), CASES)
def test_many_bags_score_as_explain_does(name, text, n):
    model, spec = model_of(name), MethodSpec.parse(text)
    x = torch.randn(3, n, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = score_bags(model, x, spec)
    options = {"fold": False} if spec.preset == "unfolded" else {"preset": spec.preset} if spec.preset else {}
    for bag, scores in zip(x, found, strict=True):
        for c in range(3):
            e = xmil.explain(model, bag, method=spec.name, target=c, output=spec.output, **options)
            np.testing.assert_allclose(scores[c], e.scores, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [1, 7])
def test_many_bags_share_the_company_of_a_background(name, n):
    assert METHODS["one_added"].batch is not None
    model, rng = model_of(name), np.random.default_rng(0)
    model.background = xmil.background(rng.standard_normal((20, 12)).astype(np.float32))
    x = torch.from_numpy(rng.standard_normal((3, n, 12)))
    for bag, scores in zip(x, score_bags(model, x, MethodSpec("one_added")), strict=True):
        e = xmil.explain(model, bag, method="one_added", target=2)
        assert e.params["company_from"] == "checkpoint"
        np.testing.assert_allclose(scores[2], e.scores, rtol=1e-4, atol=1e-6)


def test_passes_do_not_change_scores(monkeypatch):
    model = xmil.create_model("attnmil", in_dim=12, n_classes=2, seed=1, dim=8)
    x = torch.randn(9, 5, 12, generator=torch.Generator().manual_seed(0))
    whole = score_bags(model, x, MethodSpec("lrp"))
    monkeypatch.setattr("xmil.bench.scoring.CHUNK_NUMBERS", {"cpu": 2 * 5 * 12})
    torch.testing.assert_close(score_bags(model, x, MethodSpec("lrp")), whole)


def test_random_scores_follow_their_seed():
    model = xmil.create_model("attnmil", in_dim=12, n_classes=2, seed=1, dim=8)
    x = torch.zeros(4, 5, 12)
    draws = [score_bags(model, x, MethodSpec("random"), seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_specs_are_read_and_written():
    for text in SPECS:
        assert str(MethodSpec.parse(text)) == text
    with pytest.raises(UnknownNameError, match="Did you mean 'lrp'"):
        MethodSpec.parse("lpr")
    with pytest.raises(UnknownNameError, match="Did you mean 'log_odds'"):
        MethodSpec.parse("lrp@log_ods")
    with pytest.raises(InputError, match="lrp and attention do"):
        MethodSpec.parse("gxi:paper")
    assert set(METHODS) - {"random"} <= {MethodSpec.parse(text).name for text in SPECS}


NARROWED = {"attnmil": {"dim": 8, "n_layers": 2}, "transmil": {"dim": 8}}
RULES = {
    "absorb": AffineRule(),
    "epsilon": AffineRule(epsilon=0.3),
    "redistribute": AffineRule(epsilon=0.1, bias="redistribute"),
    "gamma": AffineRule(gamma=0.4),
}


def narrowed_model(name, **params):
    model = (
        xmil.create_model(name, in_dim=24, n_classes=3, seed=2, **{**NARROWED[name], **params})
        .double()
        .eval()
    )
    return model, torch.randn(4, 7, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("name", NARROWED)
def test_outputs_stay_and_bags_become_narrow(name):
    model, x = narrowed_model(name)
    narrow, u = project(model, x)
    assert u.shape == (4, 7, 8)
    torch.testing.assert_close(narrow(u), model(x))
    assert model.get_submodule("instance.0.0").in_features == 24  # the model given is as it was


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NARROWED)
def test_scores_stay_under_every_rule(name, rule, monkeypatch):
    model, x = narrowed_model(name)
    rules = Composite({"instance.*": RULES[rule]})
    spec = MethodSpec("lrp", composite=rules)
    assert (project(model, x, rules)[0] is model) == (rule == "gamma")
    behind = score_bags(model, x, spec)
    monkeypatch.setattr("xmil.bench.scoring.project", lambda model, x, rules=None: (model, x))
    torch.testing.assert_close(behind, score_bags(model, x, spec))


@pytest.mark.parametrize("method", ["gxi", "ig"])
@pytest.mark.parametrize("name", NARROWED)
def test_gradients_times_inputs_stay(name, method, monkeypatch):
    model, x = narrowed_model(name)
    behind = score_bags(model, x, MethodSpec(method))
    monkeypatch.setattr("xmil.bench.scoring.project", lambda model, x, rules=None: (model, x))
    torch.testing.assert_close(behind, score_bags(model, x, MethodSpec(method)))


def test_wide_layers_and_other_models_are_left_alone():
    model, x = narrowed_model("attnmil", dim=32)
    assert project(model, x) == (model, x)
    other = xmil.create_model("addmil", in_dim=24, n_classes=3, hidden=8)
    assert project(other, x) == (other, x)


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
    model, splits, table = train_stacked(c).models.model(0), c.splits(0), c.table()
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
    model, typical, x, _ = study
    for model.background in (typical, None):
        many = score_bags(model, x[:3], MethodSpec("lrp", "centred"))
        for bag, scores in zip(x[:3], many, strict=True):
            alone = xmil.explain_classes(model, bag, method="lrp", preset="centred")
            np.testing.assert_allclose(scores, np.stack([e.scores for e in alone]), atol=1e-4)
