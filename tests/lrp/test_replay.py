"""Passes played back on a GPU: the scores of a pass of its own, whatever changes between two bags."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import xmil
from xmil.lrp import replay

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
WIDTH = 16


def bag(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()


def both(
    monkeypatch: pytest.MonkeyPatch, model: Any, x: torch.Tensor, **params: Any
) -> tuple[xmil.Explanation, ...]:
    """An explanation that may be played, and one of a pass of its own."""
    played = xmil.explain(model, x, **params)
    with monkeypatch.context() as patch:
        patch.setattr(replay, "SMALL_BYTES", 0)
        return played, xmil.explain(model, x, **params)


def assert_same(played: xmil.Explanation, own: xmil.Explanation) -> None:
    scale = np.abs(own.scores).max()
    np.testing.assert_allclose(played.scores, own.scores, atol=1e-6 * scale, rtol=1e-5)
    np.testing.assert_allclose(played.logits, own.logits, atol=1e-6, rtol=1e-5)
    assert played.audit is not None
    assert own.audit is not None
    assert played.audit.as_dict() == pytest.approx(own.audit.as_dict(), rel=1e-5, abs=1e-6)


def recordings(model: torch.nn.Module) -> int:
    return sum(isinstance(state, replay.Recording) for state in replay._recordings.by_module[model].values())


@pytest.mark.parametrize("name", [name for name in xmil.list_models() if name != "mambamil"])
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_every_model_plays_what_a_pass_gives(monkeypatch: pytest.MonkeyPatch, name: str, preset: str) -> None:
    model = xmil.create_model(name, in_dim=WIDTH, n_classes=3, seed=0).cuda()
    for seed in range(4):
        assert_same(*both(monkeypatch, model, bag(30, seed), target=seed % 3, preset=preset))


def test_models_of_the_paper_are_recorded_and_weights_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attnmil", "transmil"):
        model = xmil.create_model(name, in_dim=WIDTH, n_classes=2, seed=0).cuda()
        for seed in range(4):
            assert_same(*both(monkeypatch, model, bag(200, seed), target=1))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
        assert recordings(model) == 1
        model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1, device="cuda")))
        assert_same(*both(monkeypatch, model, bag(200, 9), target=1))


def test_a_background_and_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = xmil.create_model("transmil", in_dim=WIDTH, n_classes=2, seed=0).cuda()
    for seed in range(3):
        assert_same(*both(monkeypatch, model, bag(100, seed), target=1, baseline=np.full(WIDTH, 0.1 * seed)))
        assert_same(*both(monkeypatch, model, bag(100, seed), target=1, contexts=6))


def test_hooks_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = xmil.create_model("attnmil", in_dim=WIDTH, n_classes=2, seed=0).cuda(), []
    handle = model.classifier.register_forward_hook(lambda *_: calls.append(1))
    for seed in range(4):
        xmil.explain(model, bag(20, seed), target=1)
    handle.remove()
    assert len(calls) >= 4


def test_few_recordings_are_kept_and_a_model_can_go() -> None:
    import gc
    import weakref

    model = xmil.create_model("attnmil", in_dim=WIDTH, n_classes=2, seed=0).cuda()
    for n in (10, 20, 30, 40):
        for seed in range(3):
            xmil.explain(model, bag(n, seed), target=1)
    assert recordings(model) == replay.MOST_RECORDINGS
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
