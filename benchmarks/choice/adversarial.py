"""What models do that mislead: `python -m benchmarks.choice.adversarial`.

Each net is a formula, so that the evidence of its patches is known. The table has AUPRC-2, the verdict over
16 bags and how many maps the check warns of, for attention, the candidates and `auto`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import xmil
from xmil.core.errors import XmilError
from xmil.evaluate import Flips, Judge, judge_cohort
from xmil.methods import explain

D, N, BAGS = 6, 20, 16
Evidence = Callable[[Tensor], Tensor]


class Formula(nn.Module):
    """A logit (b, 1) as a function of bags (b, n, d)."""

    def __init__(self, logit: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.logit = logit

    def forward(self, x: Tensor) -> Tensor:
        """Bags to logits."""
        return self.logit(x) - 1


def signal(x: Tensor) -> Tensor:
    """What the nets look for, (b, n, 1)."""
    return torch.relu(x[..., :1])


def decoy(x: Tensor) -> Tensor:
    """A mean of the signal, beside attention that looks at another feature and adds next to nothing."""
    weights = torch.softmax(5 * x[..., 1:2], dim=1)
    return 2 * signal(x).mean(dim=1) + 0.01 * (weights * x[..., 2:3]).sum(dim=1)


def few(x: Tensor) -> Tensor:
    """The two strongest patches alone."""
    return signal(x).topk(min(2, x.shape[1]), dim=1).values.mean(dim=1)


def by_size(x: Tensor) -> Tensor:
    """The signal speaks against the class in bags of fewer than 15 patches: sub-bags are told from bags."""
    return (2 if x.shape[1] >= 15 else -2) * signal(x).mean(dim=1)


def constant(x: Tensor) -> Tensor:
    """No patch matters."""
    return 0 * x.sum(dim=(1, 2)).unsqueeze(1) + 2


def any_signal(x: Tensor) -> Tensor:
    """Evidence (n,) where every patch with the signal counts."""
    return (x[:, 0] > 0).float()


def strongest(x: Tensor) -> Tensor:
    """Evidence (n,) where the two strongest count."""
    return torch.zeros(len(x)).index_fill(0, x[:, 0].topk(2).indices, 1.0)


NETS: dict[str, tuple[Callable[[Tensor], Tensor], Evidence]] = {
    "attention that hides": (decoy, any_signal),
    "few patches": (few, strongest),
    "tells sub-bags by their size": (by_size, any_signal),
    "constant": (constant, any_signal),
}


def bag(seed: int) -> Tensor:
    """Noise, with the signal in a few patches."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((N, D)).astype(np.float32))
    x[:, 0] = -1.0
    rows = rng.permutation(N)[: rng.integers(3, 8)]
    x[rows, 0] = torch.from_numpy(rng.uniform(2, 5, len(rows)).astype(np.float32))
    return x


def measure(name: str, method: str) -> dict[str, Any]:
    """The figures of one method on one net."""
    logit, evidence = NETS[name]
    net, like = Formula(logit), [bag(1000 + i) for i in range(BAGS)]
    how: dict[str, Any] = {"returns": "logit", "target": 1}
    if method == "auto":
        choice = xmil.choose_method(net, like, **how)
        found = _figures(net, evidence, choice.method, choice.params)
        return {"net": name, **found, "method": f"auto: {choice.candidate}"}
    return {"net": name, **_figures(net, evidence, method, {})}


def _figures(net: nn.Module, evidence: Evidence, method: str, params: dict[str, Any]) -> dict[str, Any]:
    auprc2, srgs, warned, refused = [], [], [], 0
    for i in range(BAGS):
        x = bag(i)
        try:
            e = explain(net, x, method=method, target=1, returns="logit", **params)
        except XmilError:
            refused += 1
            continue
        flips = Flips(net, x, target=1, returns="logit")
        auprc2.append(float(xmil.auprc2(evidence(x).numpy(), e.scores)))
        srgs.append(float(Judge(flips, seed=i).srgs([e.scores])[0]) / (flips.scale or 1))
        warned.append(any("method='auto'" in line for line in e.warnings))
    if refused:
        return {"method": method, "auprc2": np.nan, "verdict": f"refused on {refused}", "warned": 0}
    verdict = judge_cohort({method: srgs}, units=range(BAGS))
    return {"method": method, "auprc2": np.mean(auprc2), "verdict": verdict.kind, "warned": sum(warned)}


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = [measure(name, method) for name in NETS for method in ("attention", "lrp", "one_added", "auto")]
    print(pd.DataFrame(rows).round(3).to_string(index=False))


if __name__ == "__main__":
    main()
