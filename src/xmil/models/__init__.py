"""MIL models. They know nothing of explanations."""

from xmil.models.base import MODELS, MILModel, ModelSpec, PooledMIL, create_model, list_models
from xmil.models.chained import Chain, chain
from xmil.models.checkpoints import describe_checkpoint, load_model, save_model
from xmil.models.dsmil import DSMIL
from xmil.models.mambamil import MambaMIL
from xmil.models.pooling import AddMIL, AttnMIL, ClamMB, ClamSB, MaxPool, MeanPool
from xmil.models.stamp_vit import StampViT
from xmil.models.transmil import TransMIL

__all__ = [
    "DSMIL",
    "MODELS",
    "AddMIL",
    "AttnMIL",
    "Chain",
    "ClamMB",
    "ClamSB",
    "MILModel",
    "MambaMIL",
    "MaxPool",
    "MeanPool",
    "ModelSpec",
    "PooledMIL",
    "StampViT",
    "TransMIL",
    "chain",
    "create_model",
    "describe_checkpoint",
    "list_models",
    "load_model",
    "save_model",
]
