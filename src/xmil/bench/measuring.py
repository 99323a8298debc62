"""What the suites measure, one value for each bag: agreement with the truth, faithfulness to the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.bench.entries import Exam, MethodEntry
from xmil.evaluate.evidence_batch import score_evidence

Values = dict[str, npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Measure:
    """A column's measure: its name, what it says, and which way is better (1 up, -1 down)."""

    name: str
    title: str
    means: str
    better: int = 1


Grade = Callable[[Exam, MethodEntry, Sequence[Tensor]], Values]

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


def grade_tissue(exam: Exam, entry: MethodEntry, scores: Sequence[Tensor]) -> Values:
    """As `grade_truth`, and lesions where there are any."""
    from xmil.bench.camelyon import lesion_values

    return {**grade_truth(exam, entry, scores), **lesion_values(exam.blocks, scores)}


def grade_truth(exam: Exam, entry: MethodEntry, scores: Sequence[Tensor]) -> Values:
    """Each measure of a bag, the mean over the classes that have evidence; nan where none has."""
    del entry
    found: dict[str, list[Tensor]] = {measure.name: [] for measure in TRUTH}
    for block, given in zip(exam.blocks, scores, strict=True):
        evidence = torch.from_numpy(block.evidence).to(given.device)
        for name, values in score_evidence(evidence, given).items():
            found[name].append(values.nanmean(dim=1).cpu())
    return {name: torch.cat(parts).double().numpy() for name, parts in found.items()}
