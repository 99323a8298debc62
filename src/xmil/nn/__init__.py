"""Layers that the models are made of: attention, Nyström attention, PPEG, selective scans, image networks."""

from xmil.nn.attention import (
    AttentionScores,
    DistanceAttention,
    DotProductAttention,
    SelfAttention,
    attend,
    attention_weights,
    masked_softmax,
    normalised_attention,
    row_blocks,
    split_attention,
    transposed_attention,
)
from xmil.nn.images import CTransPath, ResNet, load_ctranspath, load_resnet
from xmil.nn.nystrom import PPEG, NystromAttention, square_edge
from xmil.nn.scan import Mamba, Order, scan_adjoint, selective_scan

__all__ = [
    "PPEG",
    "AttentionScores",
    "CTransPath",
    "DistanceAttention",
    "DotProductAttention",
    "Mamba",
    "NystromAttention",
    "Order",
    "ResNet",
    "SelfAttention",
    "attend",
    "attention_weights",
    "load_ctranspath",
    "load_resnet",
    "masked_softmax",
    "normalised_attention",
    "row_blocks",
    "scan_adjoint",
    "selective_scan",
    "split_attention",
    "square_edge",
    "transposed_attention",
]
