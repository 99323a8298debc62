"""MIL models: one file each. They know nothing of explanations."""

from xmil.models import addmil, attnmil, clam, dsmil, mambamil, pooling, stamp_vit, transmil
from xmil.models.base import MILModel, ModelSpec, PooledMIL
from xmil.models.chained import Chain, chain
from xmil.models.checkpoints import describe_checkpoint, load_model, save_model
from xmil.models.registry import MODELS, create_model, list_models

__all__ = [
    "MODELS",
    "Chain",
    "MILModel",
    "ModelSpec",
    "PooledMIL",
    "addmil",
    "attnmil",
    "chain",
    "clam",
    "create_model",
    "describe_checkpoint",
    "dsmil",
    "list_models",
    "load_model",
    "mambamil",
    "pooling",
    "save_model",
    "stamp_vit",
    "transmil",
]
