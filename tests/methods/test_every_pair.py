"""Every registered model with every method that supports it: registering either enrols it here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import xmil
from xmil.methods import METHODS

WIDTH = 12
SMALL = {
    "transmil": {"dim": 16},
    "mambamil": {"dim": 16, "attention_dim": 4},
    "stamp_vit": {"dim": 16, "heads": 4, "feedforward": 8},
    "attnmil": {"dim": 8, "attention_dim": 4, "n_out_layers": 1},
    "addmil": {"hidden": 8},
}
FEW = {"ig": {"steps": 8}}  # as many as show what is tested here
PAIRS = [
    (name, method)
    for name in xmil.list_models()
    for method in xmil.list_methods(xmil.create_model(name, in_dim=WIDTH, n_classes=3, **SMALL.get(name, {})))
]


def model_of(name: str) -> xmil.models.MILModel:
    model = xmil.create_model(name, in_dim=WIDTH, n_classes=3, seed=4, **SMALL.get(name, {}))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(("name", "method"), PAIRS)
@pytest.mark.parametrize("n", [1, 2, 37])
def test_pair(name: str, method: str, n: int, rng: np.random.Generator) -> None:
    model = model_of(name)
    bag = rng.normal(size=(n, WIDTH)).astype(np.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    e = xmil.explain(model, bag, method=method, target=2, **FEW.get(method, {}))
    again = xmil.explain(model, bag, method=method, target=2, **FEW.get(method, {}))
    assert e.scores.shape == (n,)
    assert e.scores.dtype == np.float32
    assert np.isfinite(e.scores).all()
    np.testing.assert_array_equal(e.scores, again.scores)
    with torch.no_grad():
        assert np.array_equal(e.logits, model(torch.from_numpy(bag)[None])[0].numpy())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert (e.audit is not None) == METHODS[method].conserves
    if e.audit is not None and method != "ig":
        assert abs(e.audit.other) <= 1e-4 * max(abs(e.output), float(np.abs(e.logits).max()))


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_every_class_at_once(name: str, method: str, rng: np.random.Generator) -> None:
    model, bag, own = model_of(name), rng.normal(size=(9, WIDTH)), FEW.get(method, {})
    together = xmil.explain_classes(model, bag, method=method, **own)
    assert [int(e.target) for e in together] == [0, 1, 2]
    for e in together:
        alone = xmil.explain(model, bag, method=method, target=int(e.target), **own)
        np.testing.assert_allclose(e.scores, alone.scores, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", xmil.list_models())
def test_large_bag_audit(name: str, rng: np.random.Generator) -> None:
    model = xmil.create_model(name, in_dim=64, n_classes=2, seed=0)
    e = xmil.explain(model, rng.normal(size=(3_000, 64)), target=1)
    assert e.audit is not None
    assert abs(e.audit.other) <= 1e-4 * max(abs(e.output), float(np.abs(e.logits).max()))


def test_methods_declare_themselves() -> None:
    for name in METHODS:
        method = METHODS[name]
        assert method.cost
        assert method.outputs
        assert isinstance(method.parameters, dict)
    assert set(PAIRS) >= {("addmil", "logits"), ("transmil", "attention"), ("dsmil", "lrp")}
    assert ("meanpool", "attention") not in PAIRS
