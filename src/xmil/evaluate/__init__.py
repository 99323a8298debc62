"""How good explanations and predictions are: flip curves, known evidence, measures, statistics by case.

`statistics` is the one module that draws, permutes and tests; its unit is an argument. Names are imported
on first use, because `statistics` and `marks` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xmil.core.verdict import KINDS
    from xmil.evaluate.choice import (
        CANDIDATES,
        Choice,
        choose,
        choose_method,
        explain,
        explain_classes,
        measure_bag,
    )
    from xmil.evaluate.curves import (
        ACTIONS,
        ORDERS,
        Band,
        Curve,
        Flips,
        bag_word,
        flip,
        flip_order,
        necessity,
        random_band,
        random_draws,
        srg,
        step_counts,
        sufficiency,
        tie_orders,
        top_instances,
        top_over_ties,
    )
    from xmil.evaluate.evidence import (
        MEASURES,
        auprc2,
        auroc,
        average_precision,
        correlation,
        ranks,
        score_bag,
        score_evidence,
    )
    from xmil.evaluate.faithfulness import (
        DEFAULT_METHODS,
        LIMIT,
        Certificate,
        FaithfulnessSettings,
        Row,
        SlideResult,
        evaluate_slide,
        randomisation,
        redrawn,
        stability,
    )
    from xmil.evaluate.marks import (
        Truth,
        covered_by_polygons,
        marked_by_geojson,
        marked_by_mask,
        pointing_game,
        read_polygons,
        relevance_mass,
        score_regions,
    )
    from xmil.evaluate.minimal import MinimalSet, minimal_set
    from xmil.evaluate.predictions import (
        Predictions,
        balanced_accuracy,
        c_index,
        calibration_bins,
        calibration_error,
        class_metrics,
        draw_calibration,
        draw_figures,
        draw_roc,
        draw_survival,
        draw_values,
        prediction_columns,
        r_squared,
        risk_metrics,
        value_metrics,
        write_predictions,
    )
    from xmil.evaluate.report import (
        FORMATS,
        as_text,
        draw_certificate,
        draw_summary,
        statistics_csv,
        summarise,
    )
    from xmil.evaluate.survival import SurvivalCurve, concordance, hazard_p, median_halves
    from xmil.evaluate.verdict import Judge, Verdict, judge, judge_cohort

_NAMES = {
    "choice": "CANDIDATES Choice choose choose_method explain explain_classes measure_bag",
    "curves": "ACTIONS ORDERS Band Curve Flips bag_word flip flip_order necessity random_band random_draws "
    "srg step_counts sufficiency tie_orders top_instances top_over_ties",
    "evidence": "MEASURES auprc2 auroc average_precision correlation ranks score_bag score_evidence",
    "faithfulness": "DEFAULT_METHODS LIMIT Certificate FaithfulnessSettings Row SlideResult "
    "evaluate_slide randomisation redrawn stability",
    "marks": "Truth covered_by_polygons marked_by_geojson marked_by_mask pointing_game read_polygons "
    "relevance_mass score_regions",
    "minimal": "MinimalSet minimal_set",
    "predictions": "Predictions balanced_accuracy c_index calibration_bins calibration_error "
    "class_metrics draw_calibration draw_figures draw_roc draw_survival draw_values "
    "prediction_columns r_squared risk_metrics value_metrics write_predictions",
    "report": "FORMATS as_text draw_certificate draw_summary statistics_csv summarise",
    "survival": "SurvivalCurve concordance hazard_p median_halves",
    "verdict": "KINDS Judge Verdict judge judge_cohort",
}
_HOME = {name: f"xmil.evaluate.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "ACTIONS", "CANDIDATES", "DEFAULT_METHODS", "FORMATS", "KINDS", "LIMIT", "MEASURES", "ORDERS",
    "Band", "Certificate", "Choice", "Curve", "FaithfulnessSettings", "Flips", "Judge",
    "MinimalSet", "Predictions", "Row", "SlideResult", "SurvivalCurve", "Truth", "Verdict",
    "as_text", "auprc2", "auroc", "average_precision", "bag_word",
    "balanced_accuracy", "c_index", "calibration_bins", "calibration_error", "choose", "choose_method",
    "class_metrics", "concordance", "correlation", "covered_by_polygons", "draw_calibration",
    "draw_certificate",
    "draw_figures", "draw_roc", "draw_summary", "draw_survival", "draw_values", "evaluate_slide",
    "explain", "explain_classes", "flip", "flip_order", "hazard_p", "judge", "judge_cohort",
    "marked_by_geojson",
    "marked_by_mask", "measure_bag", "median_halves", "minimal_set", "necessity", "pointing_game",
    "prediction_columns", "r_squared", "random_band", "random_draws", "randomisation", "ranks",
    "read_polygons", "redrawn", "relevance_mass", "risk_metrics", "score_bag", "score_evidence",
    "score_regions", "srg", "stability", "statistics_csv", "step_counts", "sufficiency",
    "summarise", "tie_orders", "top_instances", "top_over_ties", "value_metrics", "write_predictions",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'xmil.evaluate' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOME[name]), name)
    return value
