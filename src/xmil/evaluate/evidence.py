"""Scores against known evidence: measures of one bag or many at once, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.core.errors import InputError
from xmil.evaluate.marks import paired

MEASURES = ("auprc2", "auroc2", "ndcg", "pearson", "spearman")


def auprc2(evidence: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Mean of the average precisions for positive evidence by scores and negative evidence by minus scores.

    A half is left out if it has no positives or no negatives; nan if neither half can be used.

    >>> auprc2([1, 0, -1], [0.9, 0.1, -0.5])
    1.0
    """
    return score_bag(evidence, scores, measures=["auprc2"])["auprc2"]


def score_bag(
    evidence: npt.ArrayLike, scores: npt.ArrayLike, *, measures: Sequence[str] = MEASURES
) -> dict[str, float]:
    """Measure evidence and scores (n,) of one bag and class; see `score_evidence`.

    >>> score_bag([1, 0, -1], [-0.9, 0.1, 0.5], measures=["auroc2"])
    {'auroc2': 0.0}
    """
    e, s = paired(evidence, scores)
    values = score_evidence(torch.from_numpy(e), torch.from_numpy(s), measures=measures)
    return {name: float(value) for name, value in values.items()}


def average_precision(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Area under the precision-recall steps (n,); ties count as one step, nan without positives.

    >>> average_precision([True, False, True], [0.9, 0.5, 0.5])
    0.8333333333333333
    """
    ranking = _Ranking.of(torch.from_numpy(np.asarray(scores, dtype=np.float64)))
    return float(ranking.average_precision(torch.from_numpy(np.asarray(labels, dtype=bool))))


def score_evidence(
    evidence: Tensor, scores: Tensor, *, measures: Sequence[str] = MEASURES
) -> dict[str, Tensor]:
    """Compute each measure (...) of evidence and scores (..., n).

    `auprc2` and `auroc2` are means over two halves: positive evidence ranked by scores, negative evidence by
    minus scores; a half without positives or without negatives is left out. `ndcg` is the normalised
    discounted cumulative gain, with evidence minus its minimum as the gain; tied scores share their
    discounts. `pearson` and `spearman` are correlations, 0 if all scores are equal. A measure is nan if it is
    undefined: no half can be used, or all evidence is equal.

    >>> score_evidence(torch.tensor([[1, 0, -1]]), torch.tensor([[0.9, 0.1, -0.5]]))["auprc2"].tolist()
    [1.0]
    """
    if evidence.shape != scores.shape or not bool(torch.isfinite(scores).all()):
        raise InputError(
            f"Evidence and scores must be finite and have the same shape. Got {tuple(evidence.shape)} "
            f"and {tuple(scores.shape)}."
        )
    e, s = evidence.double(), scores.double()
    up, down = _Ranking.of(s), _Ranking.of(-s)
    gains = e - e.amin(dim=-1, keepdim=True)

    def over_halves(measure: Callable[[_Ranking, Tensor], Tensor]) -> Tensor:
        halves = ((e > 0, up), (e < 0, down))
        return torch.stack([_usable(own, measure(ranking, own)) for own, ranking in halves]).nanmean(dim=0)

    compute = {
        "auprc2": lambda: over_halves(_Ranking.average_precision),
        "auroc2": lambda: over_halves(_Ranking.auroc),
        "ndcg": lambda: _unless_constant(e, up.dcg(gains) / _Ranking.of(e).dcg(gains)),
        "pearson": lambda: _unless_constant(e, correlation(e, s)),
        "spearman": lambda: _unless_constant(e, correlation(_Ranking.of(e).mean_ranks(), up.mean_ranks())),
    }
    return {name: compute[name]() for name in measures}


def auroc(labels: Tensor, scores: Tensor) -> Tensor:
    """Area under the ROC curve (...) of labels and scores (..., n); nan if all labels are the same.

    >>> auroc(torch.tensor([True, False, True]), torch.tensor([0.9, 0.1, 0.8])).item()
    1.0
    """
    return _usable(labels, _Ranking.of(scores.double()).auroc(labels))


def ranks(scores: Tensor) -> Tensor:
    """Rank scores (..., n), the highest first; ties get their mean rank.

    >>> ranks(torch.tensor([0.5, 0.9, 0.5])).tolist()
    [2.5, 1.0, 2.5]
    """
    return _Ranking.of(scores.double()).mean_ranks()


@dataclass(frozen=True)
class _Ranking:
    """Positions (..., n) by falling score, and the first and last position of each tied group."""

    order: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, scores: Tensor) -> _Ranking:
        if bool(scores.isnan().any()):
            raise InputError("Scores and probabilities to rank must be numbers, but some are NaN.")
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        n = scores.shape[-1]
        places = torch.arange(n, device=scores.device).expand_as(order)
        differs = ordered[..., 1:] != ordered[..., :-1]
        edge = torch.ones_like(order[..., :1], dtype=torch.bool)
        starts, ends = torch.cat([edge, differs], dim=-1), torch.cat([differs, edge], dim=-1)
        first = torch.where(starts, places, 0).cummax(dim=-1).values
        last = torch.where(ends, places, n).flip(-1).cummin(dim=-1).values.flip(-1)
        return cls(order, first, last)

    def average_precision(self, labels: Tensor) -> Tensor:
        """Mean over the positives of the precision at the end of their tied group."""
        hits = labels.gather(-1, self.order).double()
        precision = hits.cumsum(dim=-1).gather(-1, self.last) / (self.last + 1)
        return (precision * hits).sum(dim=-1) / hits.sum(dim=-1)

    def auroc(self, labels: Tensor) -> Tensor:
        """The share of pairs in the right order, ties counting half."""
        positives = labels.double().sum(dim=-1)
        negatives = labels.shape[-1] - positives
        falling = (self.mean_ranks() * labels).sum(dim=-1)  # rank 1 is the highest score
        return (positives * negatives + positives * (positives + 1) / 2 - falling) / (positives * negatives)

    def mean_ranks(self) -> Tensor:
        """Rank of each instance, in the order of the bag; ties get their mean rank."""
        ranks = (self.first + self.last).double() / 2 + 1
        return torch.empty_like(ranks).scatter_(-1, self.order, ranks)

    def dcg(self, gains: Tensor) -> Tensor:
        """Discounted gains, each tied group at its mean discount."""
        n = gains.shape[-1]
        discounts = 1 / torch.log2(torch.arange(n, device=gains.device, dtype=torch.float64) + 2)
        sums = torch.cat([discounts.new_zeros(1), discounts.cumsum(0)])
        mean = (sums[self.last + 1] - sums[self.first]) / (self.last - self.first + 1)
        return (gains.gather(-1, self.order) * mean).sum(dim=-1)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's correlation over the last dimension; 0 if b is constant."""
    constant = b.amax(dim=-1) == b.amin(dim=-1)  # before centring, which rounds
    a, b = (v - v.mean(dim=-1, keepdim=True) for v in (a, b))
    norms = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(constant, 0.0, (a * b).sum(dim=-1) / torch.where(constant, 1.0, norms))


def _usable(labels: Tensor, values: Tensor) -> Tensor:
    return torch.where(labels.any(dim=-1) & ~labels.all(dim=-1), values, float("nan"))


def _unless_constant(evidence: Tensor, values: Tensor) -> Tensor:
    constant = evidence.amax(dim=-1) == evidence.amin(dim=-1)
    return torch.where(constant, float("nan"), values)
