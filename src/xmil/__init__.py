"""xmil: signed, audited explanations for multiple instance learning.

>>> import numpy as np, xmil
>>> model = xmil.create_model("attnmil", in_dim=16, n_classes=2, seed=0)
>>> bag = np.random.default_rng(0).normal(size=(50, 16)).astype("float32")
>>> xmil.explain(model, bag, method="lrp", target=1).scores.shape
(50,)
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from xmil._version import __version__
from xmil.core.services import load_services_by

if TYPE_CHECKING:
    from xmil.core.background import Background
    from xmil.core.bag import Bag
    from xmil.core.errors import XmilError
    from xmil.core.explanation import Audit, Explanation
    from xmil.core.interactions import Interactions
    from xmil.core.task import Target
    from xmil.data import Cohort, background, list_formats, open_bag, read_bag, read_cohort, write_bag
    from xmil.encoders import list_encoders, load_encoder
    from xmil.evaluate import (
        Curve,
        Flips,
        MinimalSet,
        auprc2,
        choose_method,
        explain,
        explain_classes,
        flip,
        minimal_set,
        necessity,
        random_band,
        srg,
        sufficiency,
    )
    from xmil.heatmaps import heatmap
    from xmil.insights import insight, insight_slides
    from xmil.methods import explain_inside, interactions, list_methods
    from xmil.models import chain, create_model, list_models, load_model, save_model
    from xmil.network import Prediction, predict
    from xmil.runs.embed import embed_slides
    from xmil.runs.evaluate import evaluate_slides
    from xmil.runs.explain import explain_slides
    from xmil.runs.heatmap import draw_slides
    from xmil.runs.inside import inside_slides
    from xmil.runs.predict import predict_slides
    from xmil.runs.tile import tile_slides
    from xmil.slides import find_slides, open_slide
    from xmil.storage import Run, open_run
    from xmil.training.config import load_config
    from xmil.training.train import train
    from xmil.viewer.notebook import view

# The public names of each module. Imported on first use: `import xmil` stays instant, and reading or drawing
# saved explanations never imports torch.
_NAMES = {
    "core.background": "Background",
    "core.bag": "Bag",
    "core.errors": "XmilError",
    "core.explanation": "Audit Explanation",
    "core.interactions": "Interactions",
    "core.task": "Target",
    "data": "Cohort background list_formats open_bag read_bag read_cohort write_bag",
    "encoders": "list_encoders load_encoder",
    "evaluate": "Curve Flips MinimalSet auprc2 choose_method explain explain_classes flip minimal_set "
    "necessity random_band srg sufficiency",
    "heatmaps": "heatmap",
    "insights": "insight insight_slides",
    "methods": "explain_inside interactions list_methods",
    "models": "chain create_model list_models load_model save_model",
    "network": "Prediction predict",
    "runs.embed": "embed_slides",
    "runs.evaluate": "evaluate_slides",
    "runs.explain": "explain_slides",
    "runs.heatmap": "draw_slides",
    "runs.inside": "inside_slides",
    "runs.predict": "predict_slides",
    "runs.tile": "tile_slides",
    "slides": "find_slides open_slide",
    "storage": "Run open_run",
    "training.config": "load_config",
    "training.train": "train",
    "viewer.notebook": "view",
}
_HOME = {name: f"xmil.{module}" for module, names in _NAMES.items() for name in names.split()}

# Modules that register what methods of nouns in lower rooms do, such as `Explanation.plot`.
_SERVICES = {
    "heatmaps.drawing": "explanation_html plot run_html",
    "heatmaps.exports": "to_anndata",
    "heatmaps.inside": "draw_inside",
    "storage.explanations": "load_arrays read_explanation read_interactions save_arrays "
    "write_explanations write_interactions",
}
load_services_by(
    {
        name: partial(import_module, f"xmil.{module}")
        for module, names in _SERVICES.items()
        for name in names.split()
    }
)

__all__ = [
    "Audit", "Background", "Bag", "Cohort", "Curve", "Explanation", "Flips", "Interactions", "MinimalSet",
    "Prediction", "Run", "Target", "XmilError", "__version__", "auprc2", "background", "chain",
    "choose_method", "create_model", "draw_slides", "embed_slides", "evaluate_slides", "explain",
    "explain_classes", "explain_inside", "explain_slides", "find_slides", "flip", "heatmap",
    "inside_slides", "insight", "insight_slides", "interactions", "list_encoders", "list_formats",
    "list_methods", "list_models", "load_config", "load_encoder", "load_model", "minimal_set",
    "necessity", "open_bag", "open_run", "open_slide", "predict", "predict_slides", "random_band",
    "read_bag", "read_cohort", "save_model", "srg", "sufficiency", "tile_slides", "train", "view",
    "write_bag",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'xmil' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
