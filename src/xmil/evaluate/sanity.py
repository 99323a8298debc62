"""Sanity of a method: does it depend on the weights, does it agree with itself, does it conserve."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from xmil.core.errors import InputError
from xmil.core.explanation import Explanation
from xmil.evaluate.flip import Bags
from xmil.methods import explain

LIMIT = 0.5  # of the mean rank correlation under re-drawn weights
SHARES = ("instances", "class_token", "bias", "epsilon", "baseline", "cut", "other")


@dataclass(frozen=True, eq=False)
class Randomisation:
    """Rank correlation of a method's scores with those under re-drawn weights, one for each draw.

    A method that looks at the model loses its ranking: correlations near 0. `passed` asks that their mean
    be at most `limit` in absolute value.
    """

    method: str
    correlations: npt.NDArray[np.float64]
    limit: float

    @property
    def mean(self) -> float:
        """The mean over the draws."""
        return float(self.correlations.mean())

    @property
    def passed(self) -> bool:
        """Whether the scores change when the weights do."""
        return abs(self.mean) <= self.limit


def randomisation(
    model: nn.Module,
    bag: Bags,
    *,
    method: str = "lrp",
    target: Any = 1,
    draws: int = 5,
    limit: float = LIMIT,
    seed: int = 0,
    **params: Any,
) -> Randomisation:
    """Explain the bag again under re-drawn weights; Adebayo et al. 2018, arXiv:1810.03292.

    >>> import torch, xmil
    >>> net = xmil.create_model("attnmil", in_dim=8, n_classes=2, seed=0)
    >>> bag = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    >>> randomisation(net, bag).passed, randomisation(net, bag, method="random").mean
    (True, 1.0)
    """
    base = explain(model, bag, method=method, target=target, **params).scores
    others = (redrawn(model, seed=seed + i) for i in range(draws))
    found = [
        rank_correlation(base, explain(m, bag, method=method, target=target, **params).scores) for m in others
    ]
    return Randomisation(method, np.array(found), limit)


def redrawn(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """A copy whose weights are drawn anew, each tensor from a normal with its own mean and deviation."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.numel() > 1:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.copy_(parameter.mean() + parameter.std() * noise)
    return twin


def stability(
    models: Sequence[nn.Module], bag: Bags, *, method: str = "lrp", target: Any = 1, **params: Any
) -> npt.NDArray[np.float64]:
    """Rank correlations (m, m) of one bag's scores between models: seeds, folds or checkpoints.

    >>> import torch, xmil
    >>> nets = [xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=seed) for seed in (0, 0)]
    >>> bool(stability(nets, torch.eye(4)).min() > 0.999)
    True
    """
    if len(models) < 2:
        raise InputError(f"Stability compares two models or more. Got {len(models)}.")
    scores = [explain(model, bag, method=method, target=target, **params).scores for model in models]
    return np.array([[rank_correlation(a, b) for b in scores] for a in scores])


def rank_correlation(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Spearman's correlation; nan where one side is constant or has fewer than two scores.

    >>> rank_correlation([1, 2, 3], [3, 2, 1])
    -1.0
    """
    from scipy.stats import rankdata

    first, second = rankdata(np.asarray(a)), rankdata(np.asarray(b))
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(np.round(np.corrcoef(first, second)[0, 1], 12))


@dataclass(frozen=True)
class AuditSummary:
    """Where the explained outputs of many bags went, as mean shares of the absolute output.

    `worst` is the largest unexplained share of any bag, `bag` its name; `n` counts explanations that have
    an audit.
    """

    n: int
    shares: dict[str, float]
    worst: float
    bag: str | None

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {share:.1%}" for name, share in self.shares.items())
        return f"{parts}; at most {self.worst:.2g} of an output unexplained ({self.n} explanations)"


def audit_summary(explanations: Sequence[Explanation]) -> AuditSummary | None:
    """Shares of the output over explanations, or None where no method among them conserves."""
    audited = [e for e in explanations if e.audit is not None]
    if not audited:
        return None
    rows = np.array([[getattr(e.audit, share) for share in SHARES] for e in audited])
    outputs = np.array([e.audit.output for e in audited if e.audit is not None])
    rows = rows / np.maximum(np.abs(outputs), np.finfo(np.float64).tiny)[:, None]
    unexplained = np.abs(rows[:, -1])
    worst = int(unexplained.argmax())
    means = dict(zip(SHARES, (float(x) for x in rows.mean(axis=0)), strict=True))
    return AuditSummary(len(audited), means, float(unexplained[worst]), audited[worst].bag)
