"""Reused memory: entered by several, left by all, and no matter for the scores."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
import torch

import xmil

memory = importlib.import_module("xmil.methods.explain")  # the door has the function of that name


def test_limits_are_set_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []

    class Libc:
        def mallopt(self, option: int, value: int) -> None:
            calls.append(("mallopt", option, value))

        def malloc_trim(self, pad: int) -> None:
            calls.append(("trim", pad, 0))

    monkeypatch.setattr(memory, "_glibc", Libc)
    with memory.reused_memory(memory.LARGE_BYTES - 1):
        assert calls == []
    with memory.reused_memory(memory.LARGE_BYTES):
        with memory.reused_memory(memory.LARGE_BYTES):
            assert ("mallopt", memory._M_MMAP_MAX, 0) in calls
        assert ("trim", 0, 0) not in calls
    assert calls[-3:] == [
        *(("mallopt", option, value) for option, value in memory._USUAL_LIMITS.items()),
        ("trim", 0, 0),
    ]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_scores_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = xmil.create_model("transmil", in_dim=8, n_classes=2, dim=16, seed=0)
    x = torch.randn(500, 8)
    plain = xmil.explain(model, x, target=1).scores
    monkeypatch.setattr(memory, "LARGE_BYTES", 1)
    np.testing.assert_array_equal(xmil.explain(model, x, target=1).scores, plain)
