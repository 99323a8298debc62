"""Interactions as the page draws them: pairs of patches by row, one set per explained target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xmil.core.interactions import Interactions
from xmil.viewer.score_block import Evidence


def read_pairs(path: Path) -> Interactions:
    """The pairs of one file of `xmil explain --interactions`."""
    return Interactions.load(path)


def as_layer(found: Sequence[Interactions], slide_id: str, evidence: Evidence) -> dict[str, Any]:
    """The pairs of this slide; those of other bags, of groups, or of rows that are not there are left out."""
    fitting = [f for f in found if f.bag == slide_id and f.names is None and _within(f, evidence.n)]
    return {"sets": [_one(pairs) for pairs in fitting]}


def _within(pairs: Interactions, n: int) -> bool:
    return bool(len(pairs) and pairs.pairs.min() >= 0 and pairs.pairs.max() < n)


def _one(found: Interactions) -> dict[str, Any]:
    rows = zip(found.pairs.tolist(), found.values.tolist(), found.sure.tolist(), strict=True)
    return {
        "target": str(found.target),
        "warnings": list(found.warnings),
        "pairs": [{"first": a, "second": b, "value": value, "sure": sure} for (a, b), value, sure in rows],
    }
