"""Scores against known evidence, one bag and one class at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError

Vector = npt.NDArray[np.float64]
Metric = Callable[[npt.NDArray[np.bool_], Vector], float]


def auprc2(evidence: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Mean of the average precisions for positive evidence by scores and negative evidence by minus scores.

    A half without positives, or with nothing else, is left out; nan where neither half can be used.

    >>> auprc2([1, 0, -1], [0.9, 0.1, -0.5])
    1.0
    """
    return _two_sided(evidence, scores, average_precision)


def auroc2(evidence: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """As `auprc2`, with the area under the ROC curve.

    >>> auroc2([1, 0, -1], [-0.9, 0.1, 0.5])
    0.0
    """
    return _two_sided(evidence, scores, _auroc)


def average_precision(labels: npt.NDArray[np.bool_], scores: Vector) -> float:
    """Area under the precision-recall steps; ties count as one step."""
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(labels, scores))


def _auroc(labels: npt.NDArray[np.bool_], scores: Vector) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores))


def ndcg(evidence: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Normalised discounted cumulative gain of ranking by scores, the gain being evidence above the lowest.

    Tied scores share their discounts; nan where all evidence is equal.

    >>> ndcg([1, 0, -1], [0.9, 0.1, -0.5])
    1.0
    """
    from sklearn.metrics import ndcg_score

    e, s = _checked(evidence, scores)
    return float("nan") if np.ptp(e) == 0 else float(ndcg_score((e - e.min())[None], s[None]))


def pearson(evidence: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Linear correlation; nan where all evidence is equal, 0 where all scores are.

    >>> round(pearson([1, 0, -1], [2.0, 0.0, -2.0]), 6)
    1.0
    """
    e, s = _checked(evidence, scores)
    if np.ptp(e) == 0:
        return float("nan")
    return 0.0 if np.ptp(s) == 0 else float(np.corrcoef(e, s)[0, 1])


def spearman(evidence: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Correlation of ranks, ties at their mean; nan where all evidence is equal, 0 where all scores are.

    >>> round(spearman([1, 0, -1], [9.0, 1.0, -0.1]), 6)
    1.0
    """
    from scipy.stats import rankdata

    e, s = _checked(evidence, scores)
    return pearson(rankdata(e), rankdata(s))


def _two_sided(evidence: npt.ArrayLike, scores: npt.ArrayLike, metric: Metric) -> float:
    e, s = _checked(evidence, scores)
    halves = [(e > 0, s), (e < 0, -s)]
    values = [metric(labels, ranked) for labels, ranked in halves if labels.any() and not labels.all()]
    return float(np.mean(values)) if values else float("nan")


def _checked(evidence: npt.ArrayLike, scores: npt.ArrayLike) -> tuple[Vector, Vector]:
    e, s = np.asarray(evidence, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if e.ndim != 1 or e.shape != s.shape:
        raise InputError(
            f"Evidence and scores must be two vectors of one length. Got {e.shape} and {s.shape}."
        )
    if not (np.isfinite(e).all() and np.isfinite(s).all()):
        raise InputError("Evidence and scores must be finite numbers.")
    return e, s
