"""Faithfulness of scores to the model, for all bags of one length at once; no truth is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xmil.bench.entries import Exam, MethodEntry
from xmil.bench.learning import logits_of
from xmil.bench.measuring import Measure, Values
from xmil.bench.problems import Block
from xmil.core.task import TASKS
from xmil.evaluate.evidence_batch import correlation, ranks
from xmil.evaluate.flip import flip_order, step_counts
from xmil.evaluate.minimal import minimal_set
from xmil.evaluate.sanity import redrawn
from xmil.nn.frozen import frozen

STEPS = 100  # most steps of a curve; smaller bags lose one instance a step
TOP = 0.1  # the share kept or dropped for sufficiency and necessity
SEARCHED, EVALUATIONS = 24, 500  # bags whose smallest flipping set is looked for, and sets tried for each
REDRAWS = 2  # models with weights drawn anew
CHUNK = {"cpu": 1 << 20, "cuda": 1 << 27}  # numbers in one pass

FAITHFULNESS = (
    Measure("srg", "SRG", "symmetric relevance gain: AUPC with the least relevant first minus the most"),
    Measure("aupc", "AUPC", "mean probability of the class while the most relevant are removed", -1),
    Measure("aupc_mask", "AUPC masked", "the same with zeros in place of what is removed", -1),
    Measure("sufficiency", "Sufficiency", "probability of the class from the top 10 % of instances alone"),
    Measure("necessity", "Necessity", "drop in probability without the top 10 % of instances"),
    Measure(
        "flipped_at_zero",
        "Flipped at zero",
        "share of decisions that flip once all instances with positive scores are removed and others remain",
    ),
    Measure(
        "needed", "Needed to flip", "share of instances removed, by the ranking, when the decision flips", -1
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


def classified_right(exam: Exam, limit: int) -> Exam:
    """The exam with the first bags that the model classifies correctly, at most so many."""
    kept: list[Block] = []
    for block in exam.blocks:
        right = np.flatnonzero(_classes(exam.model, block) == block.labels)[:limit]
        limit -= len(right)
        if len(right):
            kept.append(block.select(right))
    return replace(exam, blocks=tuple(kept))


def grade_faithfulness(exam: Exam, entry: MethodEntry, scores: Sequence[Tensor]) -> Values:
    """Each measure of a bag, for the class it is classified as."""
    parts: list[Values] = []
    with frozen(exam.model), torch.no_grad():
        for block, given in zip(exam.blocks, scores, strict=True):
            s = of_label(given, block)
            parts.append({**_curves(exam.model, block, s), **_at_zero(exam.model, block, s)})
    redone = randomisation(exam, entry, scores)
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    with np.errstate(invalid="ignore"):
        found["minimal"] = np.minimum(smallest_sets(exam) / found["needed"], 1.0)
    return {**found, "randomisation": redone}


@lru_cache(maxsize=1)
def smallest_sets(exam: Exam) -> npt.NDArray[np.float64]:
    """The share of each bag's instances in the smallest set found whose removal flips the decision.

    The same for every method; nan where none was found, and beyond the first bags.
    """
    found = np.full(sum(len(block) for block in exam.blocks), np.nan)
    bags = [(x, int(c)) for block in exam.blocks for x, c in zip(block.x, block.labels, strict=True)]
    for i, (x, label) in enumerate(bags[:SEARCHED]):
        least = minimal_set(exam.model, x, target=label, evaluations=EVALUATIONS).upper
        found[i] = np.nan if least is None else least / len(x)
    return found


def of_label(scores: Tensor, block: Block) -> npt.NDArray[np.float64]:
    """Scores (b, n) of each bag's own class, from scores (b, c, n)."""
    rows = torch.arange(len(block), device=scores.device)
    chosen = scores[rows, torch.from_numpy(block.labels).to(scores.device)]
    return np.asarray(chosen.detach().double().cpu().numpy())


def _curves(model: nn.Module, block: Block, scores: npt.NDArray[np.float64]) -> Values:
    """SRG, both AUPCs, sufficiency and necessity, and how many the ranking needs to flip the decision."""
    n = block.x.shape[1]
    first = np.stack([flip_order(row, order="morf") for row in scores])
    last = np.stack([flip_order(row, order="lerf") for row in scores])
    counts = sorted(set(step_counts(n, min(n, STEPS)).tolist()))
    top = max(1, round(n * TOP))
    morf, decided = _path(model, block, first, counts)
    lerf, _ = _path(model, block, last, counts)
    masked, _ = _path(model, block, first, counts, mask=True)
    kept, _ = _path(model, block, first[:, ::-1], [n - top])
    without, _ = _path(model, block, first, [top])
    return {
        "srg": lerf.mean(axis=1) - morf.mean(axis=1),
        "aupc": morf.mean(axis=1),
        "aupc_mask": masked.mean(axis=1),
        "sufficiency": kept[:, 0],
        "necessity": morf[:, 0] - without[:, 0],
        "needed": _first_flip(decided, block.labels, counts),
    }


def _path(
    model: nn.Module, block: Block, order: npt.NDArray[np.int64], counts: Sequence[int], *, mask: bool = False
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Probabilities (b, k) of each bag's class with the first `counts` of an order out, and decisions."""
    values, decided = [], []
    for count in counts:
        p = _probabilities(model, block.x, order, count, mask=mask)
        values.append(p[np.arange(len(block)), block.labels])
        decided.append(p.argmax(axis=1))
    return np.stack(values, axis=1), np.stack(decided, axis=1)


def _probabilities(
    model: nn.Module, x: Tensor, order: npt.NDArray[np.int64], count: int, *, mask: bool
) -> npt.NDArray[np.float64]:
    """Probabilities (b, c) without the first `count` instances of each order; the empty bag is zeros."""
    n = x.shape[1]
    if mask or count == n:
        out = torch.from_numpy(order[:, :count].copy()).to(x.device)
        parts = x.scatter(1, out.unsqueeze(-1).expand(-1, -1, x.shape[2]), 0.0)
    else:
        kept = torch.from_numpy(np.sort(order[:, count:], axis=1)).to(x.device)  # in the bag's own order
        parts = x.gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return probabilities(model, parts)


def probabilities(model: nn.Module, x: Tensor) -> npt.NDArray[np.float64]:
    """Probabilities (b, c) of bags (b, n, d), a few at a time."""
    step = max(1, CHUNK[x.device.type] // (x.shape[1] * x.shape[2]))
    with frozen(model), torch.no_grad():
        logits = torch.cat([logits_of(model, list(part.unbind())) for part in x.split(step)])
    return TASKS["classification"].numbers(logits.double().cpu())


def _at_zero(model: nn.Module, block: Block, scores: npt.NDArray[np.float64]) -> Values:
    """Whether the decision is gone once every instance with a positive score is out.

    Where nothing is left it counts as not gone: scores that are all positive tell no instance from another.
    """
    gone = np.zeros(len(block))
    order = np.argsort(scores <= 0, axis=1, kind="stable")
    positive = (scores > 0).sum(axis=1)
    for count in np.unique(positive):
        rows = np.flatnonzero(positive == count)
        some = block.select(rows)
        p = _probabilities(model, some.x, order[rows], int(count), mask=False)
        gone[rows] = (p.argmax(axis=1) != some.labels) & (count < scores.shape[1])
    return {"flipped_at_zero": gone}


def _first_flip(
    decided: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], counts: Sequence[int]
) -> npt.NDArray[np.float64]:
    """The share of instances that were out when the decision first changed; 1 where it never did."""
    changed = decided != labels[:, None]
    found = np.asarray(counts, dtype=np.float64)[changed.argmax(axis=1)] / max(counts)
    return np.where(changed.any(axis=1), found, 1.0)


def randomisation(exam: Exam, entry: MethodEntry, scores: Sequence[Tensor]) -> npt.NDArray[np.float64]:
    """Mean size of the rank correlation with scores under weights drawn anew; nan where they cannot be had.

    A constant ranks nothing: it depends on the weights as little as can be, and counts as 1.
    """
    if not getattr(entry, "asks_model", True):
        return np.full(sum(len(block) for block in exam.blocks), np.nan)
    found = []
    for draw in range(REDRAWS):
        twin = replace(exam, model=redrawn(exam.model, seed=exam.seed + draw).eval())
        pairs = zip(exam.blocks, scores, strict=True)
        found.append(np.concatenate([_similar(s, entry.scores(twin, b), b) for b, s in pairs]))
    return np.asarray(np.mean(found, axis=0))


def _similar(first: Tensor, second: Tensor, block: Block) -> npt.NDArray[np.float64]:
    a, b = (torch.from_numpy(of_label(s, block)) for s in (first, second))
    size = correlation(ranks(a), ranks(b)).abs()
    flat = (a.amax(1) == a.amin(1)) | (b.amax(1) == b.amin(1))
    return np.asarray(torch.where(flat, 1.0, size).numpy())


def _classes(model: nn.Module, block: Block) -> npt.NDArray[np.int64]:
    return np.asarray(probabilities(model, block.x).argmax(axis=1))
