"""Behind the first layer instances score as before it, where the rule allows."""

from __future__ import annotations

import pytest
import torch

import xmil
from xmil.lrp import AffineRule, Composite
from xmil.toy.scoring import MethodSpec, project, score_bags

MODELS = {"attnmil": {"dim": 8, "n_layers": 2}, "transmil": {"dim": 8}}
RULES = {
    "absorb": AffineRule(),
    "epsilon": AffineRule(epsilon=0.3),
    "redistribute": AffineRule(epsilon=0.1, bias="redistribute"),
    "gamma": AffineRule(gamma=0.4),
}


def model_and_bags(name, **params):
    model = (
        xmil.create_model(name, in_dim=24, n_classes=3, seed=2, **{**MODELS[name], **params}).double().eval()
    )
    return model, torch.randn(4, 7, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_stay_and_bags_become_narrow(name):
    model, x = model_and_bags(name)
    narrow, u = project(model, x)
    assert u.shape == (4, 7, 8)
    torch.testing.assert_close(narrow(u), model(x))
    assert model.get_submodule("instance.0.0").in_features == 24  # the model given is as it was


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_scores_stay_under_every_rule(name, rule, monkeypatch):
    model, x = model_and_bags(name)
    rules = Composite({"instance.*": RULES[rule]})
    spec = MethodSpec("lrp", composite=rules)
    assert (project(model, x, rules)[0] is model) == (rule == "gamma")
    found = score_bags(model, x, spec)
    monkeypatch.setattr("xmil.toy.scoring.project", lambda model, x, rules=None: (model, x))
    torch.testing.assert_close(found, score_bags(model, x, spec))


@pytest.mark.parametrize("method", ["gxi", "ig"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_times_inputs_stay(name, method, monkeypatch):
    model, x = model_and_bags(name)
    found = score_bags(model, x, MethodSpec(method))
    monkeypatch.setattr("xmil.toy.scoring.project", lambda model, x, rules=None: (model, x))
    torch.testing.assert_close(found, score_bags(model, x, MethodSpec(method)))


def test_wide_layers_and_other_models_are_left_alone():
    model, x = model_and_bags("attnmil", dim=32)
    assert project(model, x) == (model, x)
    other = xmil.create_model("addmil", in_dim=24, n_classes=3, hidden=8)
    assert project(other, x) == (other, x)
