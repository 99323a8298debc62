"""Scoring many bags at once gives what `xmil.explain` gives for each."""

import numpy as np
import pytest
import torch

import xmil
from xmil.core.errors import InputError, UnknownNameError
from xmil.methods import METHODS
from xmil.toy.scoring import MethodSpec, score_bags

SPECS = [
    "lrp", "lrp:exact", "lrp:paper", "lrp:released", "lrp@log_odds", "lrp:paper@contrastive", "attention",
    "attention:unfolded",
    "gxi", "gxi@log_odds", "grad2", "ig", "single", "single@logit", "one_removed", "combined", "logits",
    "logits@contrastive", "milli", "shapley",
]  # fmt: skip
MODELS = {
    "attnmil": {"dim": 8, "attention_dim": 6, "n_out_layers": 1},
    "transmil": {"dim": 8},
    "addmil": {"hidden": 8},
}


def model_of(name):
    return xmil.create_model(name, in_dim=12, n_classes=3, seed=1, **MODELS[name]).double()


PAIRS = [(name, text) for name in MODELS for text in SPECS if MethodSpec.parse(text).supports(model_of(name))]
CASES = [
    (name, text, n) for name, text in PAIRS for n in ((7,) if text in ("milli", "shapley") else (1, 7, 30))
]


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


def test_passes_do_not_change_scores(monkeypatch):
    model = xmil.create_model("attnmil", in_dim=12, n_classes=2, seed=1, dim=8)
    x = torch.randn(9, 5, 12, generator=torch.Generator().manual_seed(0))
    whole = score_bags(model, x, MethodSpec("lrp"))
    monkeypatch.setattr("xmil.toy.scoring.CHUNK_NUMBERS", {"cpu": 2 * 5 * 12})
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
    with pytest.raises(InputError, match="lrp and attention have"):
        MethodSpec.parse("gxi:paper")
    assert set(METHODS) - {"random"} <= {MethodSpec.parse(text).name for text in SPECS}
