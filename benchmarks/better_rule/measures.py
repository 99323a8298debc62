"""What a rule is judged by: the ranking of the evidence, its signs, and faithfulness without any labels."""

from __future__ import annotations

from itertools import combinations
from math import comb

import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.evaluate import score_evidence
from xmil.models import MILModel

STEPS = 15  # points of a removal curve


def evidence_measures(scores: Tensor, evidence: Tensor) -> dict[str, float]:
    """AUPRC-2, and how often the sign is right where there is evidence; over bags and classes."""
    there = evidence != 0
    right = (scores.sign() == evidence.sign()) & there
    return {
        "auprc2": float(score_evidence(evidence, scores)["auprc2"].nanmean()),
        "signs": float(right.sum() / there.sum().clamp(min=1)),
    }


@torch.no_grad()
def faithfulness(
    model: MILModel, x: Tensor, labels: Tensor, scores: dict[str, Tensor]
) -> dict[str, dict[str, float]]:
    """SRG and the share of decisions gone without the positive scores, for the true class of correct bags."""
    right = model(x).argmax(dim=-1) == labels
    if not bool(right.any()):
        return {name: {"srg": float("nan"), "gone": float("nan")} for name in scores}
    x, labels = x[right], labels[right]
    own = {
        n: s[right].gather(1, labels.view(-1, 1, 1).expand(-1, 1, s.shape[-1]))[:, 0]
        for n, s in scores.items()
    }
    h, b = model.embed(x), len(x)
    orders = torch.cat(
        [(d * s).argsort(dim=-1) for s in own.values() for d in (-1, 1)]
    )  # leaving first: morf, lerf
    owner = torch.arange(b, device=x.device).repeat(2 * len(own))
    curves = torch.stack([_chances(model, x, h, labels, orders, owner, k) for k in _counts(x.shape[1])])
    morf, lerf = curves.mean(dim=0).view(len(own), 2, b).unbind(dim=1)
    srg = (lerf - morf).mean(dim=-1)
    lost = gone(model, x, h, labels, torch.stack(list(own.values())))
    return {name: {"srg": float(srg[i]), "gone": float(lost[i])} for i, name in enumerate(own)}


def _counts(n: int) -> list[int]:
    return sorted({round(n * k / STEPS) for k in range(STEPS + 1)})


def _chances(
    model: MILModel, x: Tensor, h: Tensor, labels: Tensor, orders: Tensor, owner: Tensor, k: int
) -> Tensor:
    """Probability of the label once the first k of each order are out; the empty bag is zero vectors."""
    n = x.shape[1]
    if k == n:
        logits = model(torch.zeros_like(x[:1])).expand(len(owner), -1)
    else:
        kept = orders[:, k:].sort(dim=-1).values
        logits = model.aggregate(h[owner.unsqueeze(-1), kept])
    return F.softmax(logits, dim=-1).gather(1, labels[owner].unsqueeze(-1))[:, 0]


def gone(model: MILModel, x: Tensor, h: Tensor, labels: Tensor, scores: Tensor) -> Tensor:
    """The share of bags whose decision is gone once all positive scores are out, for scores (m, b, n)."""
    m, b = scores.shape[:2]
    stays = (scores <= 0).flatten(0, 1)
    counts, owner = stays.sum(dim=-1), torch.arange(b, device=x.device).repeat(m)
    decided = torch.empty(m * b, dtype=torch.long, device=x.device)
    for k in counts.unique().tolist():
        at = (counts == k).nonzero().squeeze(1)
        if k == 0:
            decided[at] = model(torch.zeros_like(x[:1])).argmax()
        else:
            kept = stays[at].nonzero()[:, 1].view(len(at), k)
            decided[at] = model.aggregate(h[owner[at].unsqueeze(-1), kept]).argmax(dim=-1)
    return (decided != labels[owner]).view(m, b).double().mean(dim=-1)


@torch.no_grad()
def shapley_agreement(
    model: MILModel, x: Tensor, labels: Tensor, scores: dict[str, Tensor]
) -> dict[str, float]:
    """Rank correlation with the exact Shapley values of the label's logit, mean over bags x (b, n, d)."""
    true = _ranks(exact_shapley(model, x, labels))
    index = labels.view(-1, 1, 1).expand(-1, 1, x.shape[1])
    own = {name: _ranks(s.gather(1, index)[:, 0]) for name, s in scores.items()}
    return {name: float(F.cosine_similarity(true, ranks, dim=-1).mean()) for name, ranks in own.items()}


def exact_shapley(model: MILModel, x: Tensor, labels: Tensor) -> Tensor:
    """Shapley values (b, n), less the same constant for all: the empty bag's output is left out."""
    h, (b, n) = model.embed(x), x.shape[:2]
    values = x.new_zeros(b, n)
    for size in range(1, n + 1):
        rows = torch.tensor(list(combinations(range(n), size)), device=x.device)  # (m, size)
        out = model.aggregate(h[:, rows].flatten(0, 1)).unflatten(0, (b, len(rows)))
        worth = out.gather(2, labels.view(-1, 1, 1).expand(-1, len(rows), 1))[..., 0]  # (b, m)
        inside = F.one_hot(rows, n).sum(dim=1).to(worth)  # (m, n)
        values += worth @ inside / (n * comb(n - 1, size - 1))
        if size < n:
            values -= worth @ (1 - inside) / (n * comb(n - 1, size))
    return values


def _ranks(values: Tensor) -> Tensor:
    ranks = values.argsort(dim=-1).argsort(dim=-1).float()
    return ranks - ranks.mean(dim=-1, keepdim=True)
