"""Relevance by concept as the page draws it: the concepts of a slide, and one value per patch for each."""

from __future__ import annotations

from typing import Any

import numpy as np

from xmil.core.errors import FileError
from xmil.findings.concept_maps import ConceptMaps
from xmil.viewer.score_block import Evidence


def fitting_maps(maps: ConceptMaps, evidence: Evidence, slide_id: str) -> ConceptMaps:
    """The maps, where they are of this explanation: of its patches, and of the scores of its column."""
    own = [
        i for i, c in enumerate(evidence.columns) if (c["method"], c["target"]) == (maps.method, maps.target)
    ]
    if not own or len(maps) != evidence.n or not np.allclose(evidence.scores[own[0]], maps.scores, rtol=1e-4):
        raise FileError(
            f"The concepts of {slide_id!r} belong to another explanation; run `xmil insight` again."
        )
    return maps


def as_layer(maps: ConceptMaps) -> dict[str, Any]:
    """The concepts, those with most relevance first, and what of the scores goes through none."""
    sums = maps.values.sum(axis=0, dtype=np.float64)
    order = np.argsort(-np.abs(maps.values).sum(axis=0), kind="stable")
    spoken = [int(k) for k in order if np.any(maps.values[:, k])]
    total = float(maps.scores.sum(dtype=np.float64))
    return {
        "method": maps.method,
        "target": maps.target,
        "concepts": [{"concept": k, "sum": float(sums[k])} for k in spoken],
        "total": total,
        "rest": total - float(sums.sum()),
    }
