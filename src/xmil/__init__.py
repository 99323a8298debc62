"""xmil: signed, audited explanations for multiple instance learning.

>>> import numpy as np, xmil
>>> model = xmil.create_model("attnmil", in_dim=16, n_classes=2, seed=0)
>>> bag = np.random.default_rng(0).normal(size=(50, 16)).astype("float32")
>>> xmil.explain(model, bag, method="lrp", target=1).scores.shape
(50,)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xmil._version import __version__

if TYPE_CHECKING:
    from xmil.core.background import Background as Background
    from xmil.core.bag import Bag as Bag
    from xmil.core.errors import XmilError as XmilError
    from xmil.core.explanation import Audit as Audit
    from xmil.core.explanation import Explanation as Explanation
    from xmil.core.interactions import Interactions as Interactions
    from xmil.core.task import Target as Target
    from xmil.data import Cohort as Cohort
    from xmil.data import background as background
    from xmil.data import list_formats as list_formats
    from xmil.data import open_bag as open_bag
    from xmil.data import read_bag as read_bag
    from xmil.data import read_cohort as read_cohort
    from xmil.data import write_bag as write_bag
    from xmil.encoders import list_encoders as list_encoders
    from xmil.encoders import load_encoder as load_encoder
    from xmil.evaluate import Flips as Flips
    from xmil.evaluate import MinimalSet as MinimalSet
    from xmil.evaluate import auprc2 as auprc2
    from xmil.evaluate import flip as flip
    from xmil.evaluate import minimal_set as minimal_set
    from xmil.evaluate import necessity as necessity
    from xmil.evaluate import random_band as random_band
    from xmil.evaluate import srg as srg
    from xmil.evaluate import sufficiency as sufficiency
    from xmil.heatmaps import heatmap as heatmap
    from xmil.insights import insight as insight
    from xmil.methods import explain as explain
    from xmil.methods import explain_classes as explain_classes
    from xmil.methods import explain_inside as explain_inside
    from xmil.methods import interactions as interactions
    from xmil.methods import list_methods as list_methods
    from xmil.models import chain as chain
    from xmil.models import create_model as create_model
    from xmil.models import list_models as list_models
    from xmil.models import load_model as load_model
    from xmil.models import save_model as save_model
    from xmil.runs.embed import embed_slides as embed_slides
    from xmil.runs.evaluate import evaluate_slides as evaluate_slides
    from xmil.runs.explain import explain_slides as explain_slides
    from xmil.runs.heatmap import draw_slides as draw_slides
    from xmil.runs.inside import inside_slides as inside_slides
    from xmil.runs.predict import predict_slides as predict_slides
    from xmil.runs.tile import tile_slides as tile_slides
    from xmil.slides import find_slides as find_slides
    from xmil.slides import open_slide as open_slide
    from xmil.storage import Run as Run
    from xmil.storage import open_run as open_run
    from xmil.training.config import load_config as load_config
    from xmil.training.train import train as train
    from xmil.viewer.notebook import view as view

# Public name -> the module that defines it. Imported on first use: `import xmil` stays instant, and reading
# or drawing saved explanations never imports torch.
_HOME = {
    "Audit": "xmil.core.explanation",
    "Background": "xmil.core.background",
    "Bag": "xmil.core.bag",
    "Cohort": "xmil.data",
    "Explanation": "xmil.core.explanation",
    "Flips": "xmil.evaluate",
    "Run": "xmil.storage",
    "Interactions": "xmil.core.interactions",
    "MinimalSet": "xmil.evaluate",
    "Target": "xmil.core.task",
    "XmilError": "xmil.core.errors",
    "auprc2": "xmil.evaluate",
    "background": "xmil.data",
    "chain": "xmil.models",
    "create_model": "xmil.models",
    "draw_slides": "xmil.runs.heatmap",
    "embed_slides": "xmil.runs.embed",
    "evaluate_slides": "xmil.runs.evaluate",
    "explain": "xmil.methods",
    "explain_classes": "xmil.methods",
    "explain_slides": "xmil.runs.explain",
    "explain_inside": "xmil.methods",
    "insight": "xmil.insights",
    "inside_slides": "xmil.runs.inside",
    "find_slides": "xmil.slides",
    "flip": "xmil.evaluate",
    "heatmap": "xmil.heatmaps",
    "interactions": "xmil.methods",
    "list_encoders": "xmil.encoders",
    "list_formats": "xmil.data",
    "list_methods": "xmil.methods",
    "list_models": "xmil.models",
    "load_config": "xmil.training.config",
    "load_encoder": "xmil.encoders",
    "load_model": "xmil.models",
    "minimal_set": "xmil.evaluate",
    "necessity": "xmil.evaluate",
    "open_bag": "xmil.data",
    "open_run": "xmil.storage",
    "open_slide": "xmil.slides",
    "predict_slides": "xmil.runs.predict",
    "random_band": "xmil.evaluate",
    "read_bag": "xmil.data",
    "read_cohort": "xmil.data",
    "save_model": "xmil.models",
    "srg": "xmil.evaluate",
    "sufficiency": "xmil.evaluate",
    "tile_slides": "xmil.runs.tile",
    "train": "xmil.training.train",
    "view": "xmil.viewer.notebook",
    "write_bag": "xmil.data",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'xmil' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
