"""Shares of patches that score above the scale of the cohort, which is known when every slide is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xmil.findings.biomarkers import STRONG, strong_share
from xmil.runs.insight_regions import region_mask
from xmil.runs.insight_slide import chosen_explanation

if TYPE_CHECKING:
    from xmil.runs.insight import InsightRun


def add_strong_shares(run: InsightRun, slides: Sequence[str], results: Sequence[Mapping[str, Any]]) -> float:
    """Give each slide the share of patches that score above the cohort's scale; gives that scale."""
    weights = [result["biomarkers"]["patches"] for result in results]
    scale = STRONG * float(
        np.average([result["biomarkers"]["mean_absolute"] for result in results], weights=weights)
    )
    for slide, result in zip(slides, results, strict=True):
        e = chosen_explanation(run.run.file(slide), run.chosen.method, run.chosen.target)
        result["biomarkers"]["strong_share"] = strong_share(e.scores, scale)
        if slide in run.regions:
            inside = region_mask(run.regions[slide], e, run.within)
            result["biomarkers"]["region_strong_share"] = strong_share(e.scores, scale, region=inside)
    return scale
