"""`e.params` has every choice that changes a score: passing it again gives the same scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import xmil
from xmil.core.errors import InputError
from xmil.methods import METHODS, PRESETS

WIDTH = 6
WAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("attnmil", method, {}) for method in METHODS if method not in ("logits", "auto")
]
WAYS += [("addmil", "logits", {})]
WAYS += [(name, "lrp", {"preset": preset}) for name in ("attnmil", "transmil") for preset in PRESETS]
WAYS += [
    ("attnmil", method, {"baseline": word, "strength": 0.5})
    for method in ("lrp", "ig", "shapley")
    for word in ("mean", "bag")
]
WAYS += [
    ("attnmil", "lrp", {"baseline": "mean", "strength": 0.5, "secants": True}),
    ("attnmil", "lrp", {"background": "bag"}),
    ("attnmil", "lrp", {"epsilon": 0.1, "baseline": None}),
    ("attnmil", "lrp", {"contexts": 8, "seed": 3}),
    ("attnmil", "lrp", {"contexts": 8, "keep": None, "seed": 3}),
    ("attnmil", "one_added", {"background": "bag", "draws": 2, "seed": 1}),
    ("attnmil", "random", {"seed": 4}),
    ("attnmil", "milli", {"samples": 40, "seed": 2}),
]


def model_of(name: str, stored: bool) -> torch.nn.Module:
    small = {"attnmil": {"dim": 8, "attention_dim": 4, "n_out_layers": 1}, "transmil": {"dim": 8}}
    model = xmil.create_model(name, in_dim=WIDTH, n_classes=2, seed=3, **small.get(name, {"hidden": 8}))
    if stored:
        rows = np.random.default_rng(1).normal(1.0, 1.0, size=(30, WIDTH))
        model.background = xmil.background([rows])
    return model


def bag() -> np.ndarray:
    return np.random.default_rng(0).normal(1.0, 1.0, size=(14, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("stored", [True, False], ids=["with background", "without"])
def test_equal_params_give_equal_scores(stored: bool) -> None:
    found: dict[tuple[str, str, str], np.ndarray] = {}
    scaled: Any = [("attnmil", "lrp", {"strength": 0.25})] if stored else []  # of the background
    for name, method, params in [*WAYS, *scaled]:
        model = model_of(name, stored)
        e = xmil.explain(model, bag(), method=method, target=1, **params)
        again = xmil.explain(model, bag(), method=method, target=1, **e.params)
        np.testing.assert_array_equal(again.scores, e.scores, err_msg=f"{name} {method} {params}")
        assert again.params == e.params, f"{name} {method} {params}"
        key = name, method, repr(sorted(e.params.items(), key=lambda item: item[0]))
        np.testing.assert_array_equal(found.setdefault(key, e.scores), e.scores, err_msg=str(key))


def test_what_is_recorded_of_a_network_can_be_passed() -> None:
    """Which softmax was shown is a sentence for the reader, and no parameter of the method."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.score, self.head = torch.nn.Linear(WIDTH, 1), torch.nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head((self.score(x).softmax(dim=-2) * x).sum(dim=-2))

    e = xmil.explain(Own(), bag(), method="attention", target=1)
    assert "softmax" in e.params
    again = xmil.explain(Own(), bag(), method="attention", target=1, **e.params)
    np.testing.assert_array_equal(again.scores, e.scores)


def test_secants_and_tangents_have_names() -> None:
    model = model_of("attnmil", stored=True)
    default = xmil.explain(model, bag(), target=1)
    plain = xmil.explain(model, bag(), target=1, baseline="mean", strength=0.5)
    assert default.params["secants"] is True
    assert plain.params["secants"] is False
    assert np.abs(default.scores - plain.scores).max() > 1e-6


def test_baselines_of_your_own_are_told_apart() -> None:
    model = model_of("attnmil", stored=True)
    first, second = (
        xmil.explain(model, bag(), target=1, baseline=np.full(WIDTH, value)) for value in (0.1, 0.2)
    )
    assert first.params != second.params
    with pytest.raises(InputError, match="given"):
        xmil.explain(model, bag(), target=1, **first.params)


@pytest.mark.parametrize("method", ["lrp", "one_added"])
def test_backgrounds_of_your_own_are_told_apart(method: str) -> None:
    model, rng = model_of("attnmil", stored=True), np.random.default_rng(5)
    rows = rng.normal(size=(20, WIDTH))
    first = xmil.explain(model, bag(), method=method, target=1, background=rows)
    second = xmil.explain(model, bag(), method=method, target=1, background=rows + 1)
    assert first.params["background"] != second.params["background"]
    assert np.abs(first.scores - second.scores).max() > 1e-6
    model.background = xmil.background([rows])
    np.testing.assert_array_equal(xmil.explain(model, bag(), method=method, target=1).scores, first.scores)
