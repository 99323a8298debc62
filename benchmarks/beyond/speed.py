"""Shapley values at the scale of a slide, in forward passes of the full bag."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch

import xmil


def study(*, quick: bool, data: str, models: Path | None) -> dict[str, Any]:
    """200 permutations of 10,000 patches on AttnMIL, with and without a hidden layer behind the pooling."""
    del data, models
    n = 1_000 if quick else 10_000
    x = torch.randn(n, 1024, generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {"patches": n, "permutations": 200}
    for name, layers in (("attnmil", 0), ("attnmil, one out layer", 1)):
        model = xmil.create_model("attnmil", in_dim=1024, n_classes=2, n_out_layers=layers, seed=0)

        def forward(model: torch.nn.Module = model) -> object:
            with torch.no_grad():
                return model(x.unsqueeze(0))

        def shapley(model: torch.nn.Module = model) -> object:
            return xmil.explain(model, x, method="shapley", target=1, precision=None, permutations=200)

        once, all_orders = cpu_seconds(forward), cpu_seconds(shapley)
        found[name] = {"forward_s": once, "shapley_s": all_orders, "passes": all_orders / once}
    return found


def cpu_seconds(call: Callable[[], object]) -> float:
    """Processor time, the least of three: other programs do not count."""
    call()
    taken = []
    for _ in range(3):
        start = process_time()
        call()
        taken.append(process_time() - start)
    return min(taken)
