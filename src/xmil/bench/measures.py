"""The measures of the suites, one value per bag: agreement with the truth, lesions, faithfulness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xmil.bench.entries import Exam, MethodEntry
from xmil.bench.problems import Block, Labels
from xmil.bench.training import logits_of
from xmil.core.task import TASKS
from xmil.evaluate import (
    auroc,
    bag_word,
    correlation,
    minimal_set,
    ranks,
    redrawn,
    score_evidence,
    step_counts,
    tie_orders,
)
from xmil.evaluate.statistics import Floats
from xmil.network import frozen

STEPS = 100  # most steps of a curve; smaller bags lose one instance per step
TOP = 0.1  # the share kept or dropped for sufficiency and necessity
SEARCHED, EVALUATIONS = 24, 500  # bags with a search for the smallest flipping set; sets per search
REDRAWS = 2  # models with redrawn weights
CHUNK = {"cpu": 1 << 20, "cuda": 1 << 27}  # numbers in one pass
FALSE_POSITIVES = (1, 2, 4, 8)
Values = dict[str, Floats]
Grade = Callable[[Exam, MethodEntry, Sequence[Tensor]], Values]


@dataclass(frozen=True)
class Measure:
    """A measure: its name, title, meaning, and whether higher (1) or lower (-1) is better."""

    name: str
    title: str
    means: str
    better: int = 1


TRUTH = (
    Measure(
        "auprc2",
        "AUPRC-2",
        "mean of the average precisions for evidence in favour by the scores and against by minus the scores",
    ),
    Measure("auroc2", "AUROC-2", "the same with the area under the ROC curve"),
    Measure("ndcg", "NDCG", "discounted gain of ranking by the scores, the gain being the evidence"),
    Measure("pearson", "Pearson", "linear correlation of evidence and scores, sizes included"),
    Measure("spearman", "Spearman", "correlation of the ranks of evidence and scores"),
)
LESIONS = (
    Measure(
        "lesion_recall",
        "Lesions found",
        "share of lesions that the top patches touch, as many as lie in lesions",
    ),
    Measure(
        "lesion_froc",
        "Lesions before errors",
        "share of lesions found before 1, 2, 4 and 8 patches outside rank as high, averaged",
    ),
)
FAITHFULNESS = (
    Measure("srg", "SRG", "symmetric relevance gain: AUPC with the least relevant first minus the most"),
    Measure("aupc", "AUPC", "mean probability of the class while the most relevant are removed", -1),
    Measure("aupc_mask", "AUPC masked", "the same with zeros in place of what is removed", -1),
    Measure("sufficiency", "Sufficiency", "probability of the class from the top 10 % of patches alone"),
    Measure("necessity", "Necessity", "drop in probability without the top 10 % of patches"),
    Measure(
        "flipped_at_zero",
        "Flipped at zero",
        "share of decisions that flip once all patches with positive scores are removed and others remain",
    ),
    Measure(
        "needed", "Needed to flip", "share of patches removed, by the ranking, when the decision flips", -1
    ),
    Measure(
        "minimal",
        "Minimal set",
        "size of the smallest set found to flip the decision over what the ranking removes until it flips",
    ),
    Measure(
        "randomisation",
        "Randomisation",
        "absolute rank correlation with the scores under newly drawn weights",
        -1,
    ),
)


def grade_truth(exam: Exam, entry: MethodEntry, scores: Sequence[Tensor]) -> Values:
    """Grade against the truth: the mean over the classes with evidence; nan if there are none."""
    del entry
    parts: dict[str, list[Tensor]] = {measure.name: [] for measure in TRUTH}
    for block, block_scores in zip(exam.blocks, scores, strict=True):
        evidence = torch.from_numpy(block.evidence).to(block_scores.device)
        for name, values in score_evidence(evidence, block_scores).items():
            parts[name].append(values.nanmean(dim=1).cpu())
    return {name: torch.cat(values).double().numpy() for name, values in parts.items()}


def grade_tissue(exam: Exam, entry: MethodEntry, scores: Sequence[Tensor]) -> Values:
    """Grade against the truth, and by lesions if there are any."""
    rows = []
    for block, block_scores in zip(exam.blocks, scores, strict=True):
        for_tumour = block_scores[:, 1].detach().double().cpu().numpy()
        lesions = np.full(for_tumour.shape, -1) if block.lesions is None else block.lesions
        rows += [grade_lesions(*pair) for pair in zip(lesions, for_tumour, strict=True)]
    by_lesion = {measure.name: np.array([row[measure.name] for row in rows]) for measure in LESIONS}
    return {**grade_truth(exam, entry, scores), **by_lesion}


def grade_lesions(lesions: Labels, scores: Floats) -> dict[str, float]:
    """Grade one slide by its lesions (n,) and the scores for the tumour class; nan without lesions.

    Ties count against a method: a lesion is found only if its patches rank above those outside.

    >>> grade_lesions(np.array([0, 1, -1]), np.array([0.9, 0.1, 0.5]))
    {'lesion_recall': 0.5, 'lesion_froc': 0.875}
    """
    inside = lesions >= 0
    if not inside.any():
        return {measure.name: float("nan") for measure in LESIONS}
    peaks = np.array([scores[lesions == lesion].max() for lesion in np.unique(lesions[inside])])
    top = np.sort(scores)[::-1][int(inside.sum()) - 1]
    outside = np.sort(scores[~inside])[::-1]
    bars = [outside[k - 1] if k <= len(outside) else -np.inf for k in FALSE_POSITIVES]
    tied = (scores >= top).sum() > inside.sum()
    recall = float(np.mean(peaks > top if tied else peaks >= top))
    return {"lesion_recall": recall, "lesion_froc": float(np.mean([np.mean(peaks > bar) for bar in bars]))}


def keep_correct(exam: Exam, limit: int) -> Exam:
    """Keep the first bags that the model classifies correctly, at most `limit`."""
    blocks: list[Block] = []
    for block in exam.blocks:
        predicted = probabilities(exam.model, block.x).argmax(axis=1)
        correct = np.flatnonzero(predicted == block.labels)[:limit]
        limit -= len(correct)
        if len(correct):
            blocks.append(block.select(correct))
    return replace(exam, blocks=tuple(blocks))


def grade_faithfulness(exam: Exam, entry: MethodEntry, scores: Sequence[Tensor]) -> Values:
    """Grade by the model's response, for the predicted class of each bag."""
    parts: list[Values] = []
    with frozen(exam.model), torch.no_grad():
        for block, block_scores in zip(exam.blocks, scores, strict=True):
            s = of_label(block_scores, block)
            flipped = _flips_at_zero(exam.model, block, s)
            parts.append({**_curves(exam.model, block, s), "flipped_at_zero": flipped})
    values = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    with np.errstate(invalid="ignore"):
        values["minimal"] = np.minimum(smallest_sets(exam) / values["needed"], 1.0)
    return {**values, "randomisation": randomisation(exam, entry, scores)}


@lru_cache(maxsize=1)
def smallest_sets(exam: Exam) -> Floats:
    """Search for the smallest set whose removal flips the decision, as a share of each bag's instances.

    Independent of the method; nan if there is none, and for all but the first bags.
    """
    shares = np.full(sum(len(block) for block in exam.blocks), np.nan)
    bags = [(x, int(c)) for block in exam.blocks for x, c in zip(block.x, block.labels, strict=True)]
    for i, (x, label) in enumerate(bags[:SEARCHED]):
        least = minimal_set(exam.model, x, target=label, evaluations=EVALUATIONS).upper
        shares[i] = np.nan if least is None else least / len(x)
    return shares


def of_label(scores: Tensor, block: Block) -> Floats:
    """Scores (b, n) of each bag's own class, from scores (b, c, n)."""
    rows = torch.arange(len(block), device=scores.device)
    chosen = scores[rows, torch.from_numpy(block.labels).to(scores.device)]
    return np.asarray(chosen.detach().double().cpu().numpy())


def _curves(model: nn.Module, block: Block, scores: Floats) -> Values:
    """SRG, both AUPCs, sufficiency, necessity, and the share of removals that flips the decision.

    Each is the mean over orders of equal scores; the decision flips once it does in most of them.
    """
    n = block.x.shape[1]
    counts = sorted(set(step_counts(n, min(n, STEPS)).tolist()))
    top = max(1, round(n * TOP))
    first, last = [], []  # the orders (k, n) of each bag
    for name, x, row in zip(block.names, block.x, scores, strict=True):
        seed, sizes = [0, bag_word(name, x)], [*counts, top]
        first.append(tie_orders(row, sizes, order="morf", seed=seed))
        last.append(tie_orders(row, sizes, order="lerf", seed=seed))
    each, orders = _repeat(block, first), np.concatenate(first)
    morf, decided = _path(model, each, orders, counts)
    lerf, _ = _path(model, _repeat(block, last), np.concatenate(last), counts)
    masked, _ = _path(model, each, orders, counts, mask=True)
    alone, _ = _path(model, each, orders[:, ::-1], [n - top])
    without, _ = _path(model, each, orders, [top])
    changed = _mean_of_each(decided != each.labels[:, None], first) > 0.5
    share = np.asarray(counts, dtype=np.float64)[changed.argmax(axis=1)] / max(counts)
    aupc = _mean_of_each(morf, first).mean(axis=1)
    return {
        "srg": _mean_of_each(lerf, last).mean(axis=1) - aupc,
        "aupc": aupc,
        "aupc_mask": _mean_of_each(masked, first).mean(axis=1),
        "sufficiency": _mean_of_each(alone, first)[:, 0],
        "necessity": _mean_of_each(morf[:, :1] - without, first)[:, 0],
        "needed": np.where(changed.any(axis=1), share, 1.0),  # all of them if it never flips
    }


def _repeat(block: Block, orders: Sequence[Labels]) -> Block:
    """Repeat each bag for each of its orders (k, n)."""
    return block.select(np.repeat(np.arange(len(block)), [len(own) for own in orders]))


def _mean_of_each(values: npt.NDArray[Any], orders: Sequence[Labels]) -> Floats:
    """Means (b, .) over the orders (k, n) of each bag, from values of all orders."""
    ends = np.cumsum([len(own) for own in orders])
    return np.stack([part.mean(axis=0) for part in np.split(values, ends[:-1])])


def _path(
    model: nn.Module, block: Block, order: Labels, counts: Sequence[int], *, mask: bool = False
) -> tuple[Floats, Labels]:
    """Probabilities (b, k) of each bag's class without the first `counts` of an order, and decisions."""
    p = np.stack([_probabilities(model, block.x, order, k, mask=mask) for k in counts], axis=1)  # (b, k, c)
    return p[np.arange(len(block)), :, block.labels], p.argmax(axis=2)


def _probabilities(model: nn.Module, x: Tensor, order: Labels, count: int, *, mask: bool) -> Floats:
    """Probabilities (b, c) without the first `count` instances of each order; the empty bag is zeros."""
    n = x.shape[1]
    if mask or count == n:
        removed = torch.from_numpy(order[:, :count].copy()).to(x.device)
        parts = x.scatter(1, removed.unsqueeze(-1).expand(-1, -1, x.shape[2]), 0.0)
    else:
        kept = torch.from_numpy(np.sort(order[:, count:], axis=1)).to(x.device)  # in the bag's own order
        parts = x.gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return probabilities(model, parts)


def probabilities(model: nn.Module, x: Tensor) -> Floats:
    """Probabilities (b, c) of bags (b, n, d), in batches."""
    step = max(1, CHUNK[x.device.type] // (x.shape[1] * x.shape[2]))
    with frozen(model), torch.no_grad():
        logits = torch.cat([logits_of(model, list(part.unbind())) for part in x.split(step)])
    return TASKS["classification"].numbers(logits.double().cpu())


def bag_auroc(chances: Floats, labels: Labels) -> float:
    """Area under the ROC curve from probabilities (b, c): one class against the rest, mean over classes."""
    classes = torch.arange(chances.shape[1]).unsqueeze(1)
    return float(auroc(torch.from_numpy(labels) == classes, torch.from_numpy(chances).T).nanmean())


def _flips_at_zero(model: nn.Module, block: Block, scores: Floats) -> Floats:
    """Whether removing every instance with a positive score flips the decision.

    If nothing remains it counts as not flipped: scores that are all positive do not separate instances.
    """
    flipped = np.zeros(len(block))
    order = np.argsort(scores <= 0, axis=1, kind="stable")
    positive = (scores > 0).sum(axis=1)
    for count in np.unique(positive):
        rows = np.flatnonzero(positive == count)
        part = block.select(rows)
        p = _probabilities(model, part.x, order[rows], int(count), mask=False)
        flipped[rows] = (p.argmax(axis=1) != part.labels) & (count < scores.shape[1])
    return flipped


def randomisation(exam: Exam, entry: MethodEntry, scores: Sequence[Tensor]) -> Floats:
    """Mean absolute rank correlation with scores under redrawn weights; nan for scores from a file.

    A constant counts as 1: it does not depend on the weights at all.
    """
    if not entry.asks_model:
        return np.full(sum(len(block) for block in exam.blocks), np.nan)
    sizes = []
    for draw in range(REDRAWS):
        redrawn_exam = replace(exam, model=redrawn(exam.model, seed=exam.seed + draw).eval())
        parts = []
        for block, own in zip(exam.blocks, scores, strict=True):
            a, b = (torch.from_numpy(of_label(s, block)) for s in (own, entry.scores(redrawn_exam, block)))
            size = correlation(ranks(a), ranks(b)).abs()
            flat = (a.amax(1) == a.amin(1)) | (b.amax(1) == b.amin(1))
            parts.append(torch.where(flat, 1.0, size).numpy())
        sizes.append(np.concatenate(parts))
    return np.asarray(np.mean(sizes, axis=0))
