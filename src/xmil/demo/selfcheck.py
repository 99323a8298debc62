"""A self-check that takes seconds: explain tiny models and compare the scores with values in the package.

Weights and bags follow a formula, not a random generator, so that the values do not depend on versions of
libraries. `python -m xmil.demo.selfcheck` prints new values after an intended change.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

STORED = "selfcheck.json"
TOLERANCE = 2e-4  # of the largest score: float32 on any machine
DIFFERENCES = ("one_added", "one_removed")  # scores that are one output minus another
LEAST = 0.01  # size of such scores below which float32, of outputs near 1, leaves less than the tolerance
IN_DIM, N = 6, 7
METHODS = ("lrp", "attention", "gxi", "ig", "single", "one_added", "one_removed")
MODELS: dict[str, dict[str, Any]] = {
    "attnmil": {"dim": 8, "attention_dim": 4},
    "transmil": {"dim": 8, "heads": 2},
    "addmil": {"hidden": 8},
    "clam_sb": {"dim": 8, "attention_dim": 4},
}


@dataclass(frozen=True)
class SelfCheck:
    """One model and method: the largest difference from the stored scores, and the audit's gap.

    The difference is relative to the largest score, the gap to the explained output. Small differences of
    outputs are as exact as the outputs.
    """

    model: str
    method: str
    difference: float
    unexplained: float | None

    @property
    def passed(self) -> bool:
        """Whether the scores match the stored ones, and LRP's audit has no gap."""
        closes = self.method != "lrp" or (self.unexplained or 0.0) < TOLERANCE
        return self.difference < TOLERANCE and closes


def self_check() -> list[SelfCheck]:
    """Explain every model by every method that supports it, and compare.

    >>> all(check.passed for check in self_check())
    True
    """
    stored = json.loads(files("xmil.demo").joinpath(STORED).read_text(encoding="utf-8"))
    checks = []
    for model, method, e in _explained():
        expected = np.asarray(stored[f"{model}:{method}"])
        largest = max(np.abs(expected).max(), LEAST if method in DIFFERENCES else 0.0)
        difference = float(np.abs(e.scores - expected).max() / largest)
        gap = None if e.audit is None else abs(e.audit.other) / max(abs(e.audit.output), 1e-12)
        checks.append(SelfCheck(model, method, difference if math.isfinite(difference) else math.inf, gap))
    return checks


def values() -> dict[str, list[float]]:
    """The scores of every pair, in stored form."""
    return {f"{m}:{method}": [float(f"{s:.6g}") for s in e.scores] for m, method, e in _explained()}


def _explained() -> Iterator[tuple[str, str, Any]]:
    from xmil.methods import explain, list_methods

    k = np.arange(N * IN_DIM, dtype=np.float64)
    bag = np.cos(1.3 * k + 0.2 * (k % 5)).reshape(N, IN_DIM).astype(np.float32)
    for name in MODELS:
        model = _model(name)
        supported = list_methods(model)
        for method in (method for method in METHODS if method in supported):
            yield name, method, explain(model, bag, method=method, target=1)


def _model(name: str) -> Any:
    import torch

    from xmil.models import create_model

    model = create_model(name, in_dim=IN_DIM, n_classes=2, **MODELS[name])
    with torch.no_grad():
        for i, (_, parameter) in enumerate(sorted(model.named_parameters())):
            wave = [math.sin(1.7 * k + 0.9 * i + 0.3) for k in range(parameter.numel())]
            fan_in = max(1, parameter.numel() // len(parameter))
            parameter.copy_(torch.tensor(wave).view(parameter.shape) / math.sqrt(fan_in))
    return model


if __name__ == "__main__":
    import sys

    sys.stdout.write(json.dumps(values(), indent=1) + "\n")
