"""Layers of the models: attention, Nyström attention, PPEG, selective scans, image networks."""

from xmil.nn.attention import (
    AttentionScores,
    DotProductAttention,
    SelfAttention,
    masked_softmax,
    normalised_attention,
    row_blocks,
    split_attention,
    transposed_attention,
)
from xmil.nn.images import CTransPath, ResNet, load_resnet
from xmil.nn.nystrom import PPEG, NystromAttention
from xmil.nn.scan import scan_adjoint, selective_scan

__all__ = [
    "PPEG",
    "AttentionScores",
    "CTransPath",
    "DotProductAttention",
    "NystromAttention",
    "ResNet",
    "SelfAttention",
    "load_resnet",
    "masked_softmax",
    "normalised_attention",
    "row_blocks",
    "scan_adjoint",
    "selective_scan",
    "split_attention",
    "transposed_attention",
]
