"""The vision transformer of STAMP: a class token among projected instances.

El Nahhas et al., "From whole-slide image to biomarker prediction: end-to-end weakly supervised deep learning
in computational pathology", Nature Protocols 2025, arXiv:2312.10944.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xmil.core.errors import InputError
from xmil.models.base import MODELS, MILModel, run_by_length
from xmil.nn.attention import DistanceAttention, DotProductAttention, SelfAttention


class VitLayer(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, dim: int, attn: SelfAttention, *, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = attn
        self.feed = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, feedforward),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(feedforward, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor, rows: int | None = None, **places: Tensor) -> Tensor:
        """(b, n, d) to (b, n, d), or to its first rows."""
        h = x[:, :rows] + self.attn(self.norm(x), rows, **places)
        return h + self.feed(h)


@MODELS.register("stamp_vit")
class StampViT(MILModel):
    """Linear + GELU, class token, attention and MLP layers, norm, classifier on the class token.

    `alibi` subtracts each head's multiple of the distances, in microns, from its attention weights, as STAMP
    does; it needs coordinates in microns.
    """

    def __init__(
        self,
        in_dim: int,
        n_classes: int,
        *,
        dim: int = 512,
        heads: int = 8,
        n_layers: int = 2,
        feedforward: int = 512,
        alibi: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(in_dim, n_classes)
        kind = DistanceAttention if alibi else DotProductAttention
        settings = {"heads": heads, "residual_kernel": None, "qkv_bias": True, "dropout": dropout}
        self.alibi = alibi
        self.no_attention = "it subtracts distances from attention, which can be negative" if alibi else None
        self.instance = nn.Sequential(nn.Linear(in_dim, dim), nn.GELU(), nn.Dropout(dropout))
        self.class_token = nn.Parameter(torch.randn(dim))
        self.layers = nn.ModuleList(
            VitLayer(dim, kind(dim, **settings), feedforward=feedforward, dropout=dropout)  # type: ignore[arg-type]
            for _ in range(n_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.classifier = nn.Linear(dim, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        return self.instance(x)

    def aggregate(self, h: Tensor, mask: Tensor | None = None, *, microns: Tensor | None = None) -> Tensor:
        """Outputs (b, c) from embedded instances (b, n, e); `microns` (b, n, 2) are their positions."""
        if mask is not None:
            return run_by_length(self.aggregate, h, mask, microns=microns)
        places = {}
        if self.alibi:
            if microns is None:
                raise InputError(
                    "stamp_vit with alibi needs positions in microns: explain a Bag from a STAMP file, or "
                    "one with coords and mpp, or call model(x, microns=...) with (b, n, 2)."
                )
            origin = microns.new_zeros(len(h), 1, 2)  # the class token's position, as in STAMP
            places = {"places": torch.cat([origin, microns], dim=1).to(h.dtype)}
        h = torch.cat([self.class_token.expand(len(h), 1, -1), h], dim=1)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            h = layer(h, 1 if i == last else None, **places)  # the last layer only needs the class token
        return self.classifier(self.norm(h[:, 0]))

    def attention_layers(self) -> list[SelfAttention]:
        return [] if self.alibi else [layer.attn for layer in self.layers if isinstance(layer, VitLayer)]
