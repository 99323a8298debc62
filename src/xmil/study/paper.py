"""The paper's Table 1: AUPRC-2 and test AUROC, mean over 30 repetitions.

Hense, Jamshidi Idaji et al., "xMIL", NeurIPS 2024, Table 1.
"""

from __future__ import annotations

_COLUMNS = [
    (task, model)
    for task in ("four_bags", "pos_neg", "adjacent_pairs")
    for model in ("attnmil", "transmil", "addmil")
]
_ROWS: dict[str, list[float | None]] = {
    "auroc": [1.00, 1.00, 0.98, 0.97, 0.98, 0.89, 0.88, 0.92, 0.77],
    "random": [0.31, 0.31, None, 0.42, 0.42, None, 0.54, 0.54, None],
    "attention": [0.53, 0.52, 0.54, 0.45, 0.46, 0.48, 0.61, 0.60, 0.63],
    "single": [0.87, 0.85, None, 0.89, 0.91, None, 0.73, 0.77, None],
    "logits": [None, None, 0.79, None, None, 0.68, None, None, 0.71],
    "gxi": [0.72, 0.40, None, 0.72, 0.44, None, 0.63, 0.57, None],
    "ig": [0.88, 0.80, None, 0.93, 0.82, None, 0.75, 0.72, None],
    "lrp": [0.91, 0.90, None, 0.91, 0.92, None, 0.77, 0.81, None],
}


def paper_figure(task: str, model: str, method: str) -> float | None:
    """The published mean, or None; both versions of Pos-Neg go with the paper's one.

    >>> paper_figure("pos_neg_count", "transmil", "lrp")
    0.92
    """
    column = ("pos_neg" if task == "pos_neg_count" else task, model)
    if column not in _COLUMNS or method not in _ROWS:
        return None
    return _ROWS[method][_COLUMNS.index(column)]
