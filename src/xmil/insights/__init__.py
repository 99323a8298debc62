"""What a model learned over a cohort: concepts, strategies, shortcuts, biomarkers, and its report.

The verb is `xmil.insight_slides(run, ...)`, also called `xmil.insight`. The package is not called `insight`,
because importing `xmil.insight` would replace the function by the module.
"""

from xmil.insights.biomarkers import (
    SurvivalSplit,
    correlation_with,
    find_consensus,
    map_biomarkers,
    strong_share,
    survival_curves,
    survival_of,
)
from xmil.insights.concepts import (
    KINDS,
    ConceptShares,
    Dictionary,
    compare_sizes,
    even_counts,
    feature_weights,
    find_strategies,
    fit_dictionary,
    leading_concepts,
    recommend_size,
    removal_agreement,
    remove_concepts,
    seed_agreement,
    split_scores,
)
from xmil.insights.run import insight, insight_slides
from xmil.insights.shortcuts import (
    LIGHT,
    Association,
    appearance,
    light,
    patch_associations,
    patch_correlations,
    rank_associations,
    slide_associations,
)

__all__ = [
    "KINDS", "LIGHT", "Association", "ConceptShares", "Dictionary", "SurvivalSplit", "appearance",
    "compare_sizes", "correlation_with", "even_counts", "feature_weights", "find_consensus",
    "find_strategies", "fit_dictionary", "insight", "insight_slides", "leading_concepts", "light",
    "map_biomarkers", "patch_associations", "patch_correlations", "rank_associations", "recommend_size",
    "removal_agreement", "remove_concepts", "seed_agreement", "slide_associations", "split_scores",
    "strong_share", "survival_curves", "survival_of",
]  # fmt: skip
