"""TransMIL: a transformer over instances with Nyström attention.

Shao et al., "TransMIL: Transformer based Correlated Multiple Instance Learning for Whole Slide Image
Classification", NeurIPS 2021, arXiv:2106.00908.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xmil.core.errors import bad_parameter, check_choice
from xmil.models.base import MODELS, MILModel, linear_relu_stack, run_by_length
from xmil.nn.attention import DotProductAttention, SelfAttention
from xmil.nn.nystrom import PPEG, NystromAttention, square_edge

KINDS: dict[str, type[SelfAttention]] = {"nystrom": NystromAttention, "dot_product": DotProductAttention}


class TransLayer(nn.Module):
    """x + attention(norm(x))."""

    def __init__(self, dim: int, attn: SelfAttention) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = attn

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        """(b, n, d) to (b, n, d), or to its first rows."""
        return x[:, :rows] + self.attn(self.norm(x), rows)


@MODELS.register("transmil")
class TransMIL(MILModel):
    """Linear + ReLU, the square, class token, attention, PPEG, attention, norm, class token, classifier.

    The instances fill a square in the order of the bag; repeats of the first ones fill what remains.
    `landmarks=None` means dim // 2; `residual_kernel=None` leaves out the residual convolution.
    `pool="sum"` adds up the tokens' outputs and has no class token.
    """

    def __init__(
        self,
        in_dim: int,
        n_classes: int,
        *,
        dim: int = 256,
        heads: int = 8,
        head_dim: int | None = None,
        n_feature_layers: int = 1,
        n_layers: int = 2,
        attention: str = "nystrom",
        landmarks: int | None = None,
        pinv_iterations: int = 6,
        residual_kernel: int | None = 33,
        qkv_bias: bool = False,
        ppeg: bool = True,
        pool: str = "class_token",
        n_out_layers: int = 0,
        bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        bag_dropout: float = 0.0,
    ) -> None:
        super().__init__(in_dim, n_classes)
        check_choice("attention", attention, KINDS, owner="transmil")
        check_choice("pool", pool, ("class_token", "sum"), owner="transmil")
        if qkv_bias and attention == "nystrom":
            raise bad_parameter("qkv_bias", "transmil with nystrom attention", "False", qkv_bias)
        settings = {
            "heads": heads,
            "head_dim": head_dim,
            "residual_kernel": residual_kernel,
            "qkv_bias": qkv_bias,
            "bias": bias,
            "dropout": attention_dropout,
        }
        if attention == "nystrom":
            settings |= {"landmarks": landmarks or max(1, dim // 2), "pinv_iterations": pinv_iterations}
        self.instance = linear_relu_stack([in_dim] + [dim] * n_feature_layers, bias=bias, first_bias=bias)
        self.feature_dropout = nn.Dropout(dropout)
        self.class_token = nn.Parameter(torch.randn(1, 1, dim)) if pool == "class_token" else None
        self.no_attention = "it has no class token" if self.class_token is None else None
        self.layers = nn.ModuleList(
            TransLayer(dim, KINDS[attention](dim, **settings))  # type: ignore[arg-type]  # mixed values
            for _ in range(n_layers)
        )
        self.ppeg = PPEG(dim) if ppeg else None
        self.norm = nn.LayerNorm(dim)
        self.out = linear_relu_stack([dim] * (n_out_layers + 1), bias=bias, first_bias=bias)
        self.bag_dropout = nn.Dropout(bag_dropout)
        self.classifier = nn.Linear(dim, n_classes, bias=bias)

    def embed(self, x: Tensor) -> Tensor:
        return self.feature_dropout(self.instance(x))

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (b, c) from embedded instances (b, n, e); bags of different lengths run by length."""
        if mask is not None:
            return run_by_length(self.aggregate, h, mask)
        edge = square_edge(h.shape[1])
        if self.ppeg is not None:
            h = torch.cat([h, h[:, : edge * edge - h.shape[1]]], dim=1)
        if self.class_token is not None:
            h = torch.cat([self.class_token.expand(len(h), -1, -1), h], dim=1)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            # the last layer only needs the class token, unless positions are encoded after it
            h = layer(h, 1 if i == last > 0 and self.class_token is not None else None)
            if i == 0 and self.ppeg is not None and self.class_token is not None:
                h = torch.cat([h[:, :1], self.ppeg(h[:, 1:], edge)], dim=1)
            elif i == 0 and self.ppeg is not None:
                h = self.ppeg(h, edge)
        tokens = h[:, :1] if self.class_token is not None else h
        return self.classifier(self.bag_dropout(self.out(self.norm(tokens)))).sum(dim=1)

    def attention_layers(self) -> list[SelfAttention]:
        return [layer.attn for layer in self.layers if isinstance(layer, TransLayer)]
