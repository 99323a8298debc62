"""CLAM with one or several attention branches; the instance-level clustering loss is not part of the output.

Lu et al., "Data-efficient and weakly supervised computational pathology on whole-slide images",
Nature Biomedical Engineering 2021, arXiv:2004.09666.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xmil.models.base import PooledMIL, linear_relu_stack
from xmil.models.registry import MODELS
from xmil.nn.attention import AttentionScores


class _Clam(PooledMIL):
    """Linear + ReLU, gated attention."""

    def __init__(
        self,
        in_dim: int,
        n_classes: int,
        *,
        branches: int,
        dim: int,
        attention_dim: int,
        gated: bool,
        dropout: float,
    ) -> None:
        super().__init__(in_dim, n_classes)
        self.instance = linear_relu_stack([in_dim, dim])
        self.instance_dropout = nn.Dropout(dropout)
        self.attention = AttentionScores(dim, attention_dim, gated=gated, branches=branches, dropout=dropout)

    def embed(self, x: Tensor) -> Tensor:
        """Instances, each by itself."""
        h: Tensor = self.instance_dropout(self.instance(x))
        return h

    def attend(self, h: Tensor) -> Tensor:
        """Unnormalised attention of the embedded instances, one column per branch."""
        scores: Tensor = self.attention(h)
        return scores


@MODELS.register("clam_sb")
class ClamSB(_Clam):
    """CLAM with a single attention branch."""

    def __init__(
        self,
        in_dim: int,
        n_classes: int,
        *,
        dim: int = 512,
        attention_dim: int = 256,
        gated: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(
            in_dim, n_classes, branches=1, dim=dim, attention_dim=attention_dim, gated=gated, dropout=dropout
        )
        self.classifier = nn.Linear(dim, n_classes)

    def head(self, z: Tensor) -> Tensor:
        """Outputs from the weighted mean."""
        logits: Tensor = self.classifier(z.squeeze(1))
        return logits


@MODELS.register("clam_mb")
class ClamMB(_Clam):
    """CLAM with an attention branch and a linear classifier of its own for each class."""

    class_attention = True
    last_layer = None

    def __init__(
        self,
        in_dim: int,
        n_classes: int,
        *,
        dim: int = 512,
        attention_dim: int = 256,
        gated: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(
            in_dim,
            n_classes,
            branches=n_classes,
            dim=dim,
            attention_dim=attention_dim,
            gated=gated,
            dropout=dropout,
        )
        self.classifiers = nn.ModuleList(nn.Linear(dim, 1) for _ in range(n_classes))

    def head(self, z: Tensor) -> Tensor:
        """Output c from the weighted mean of branch c."""
        return torch.cat([layer(z[:, c]) for c, layer in enumerate(self.classifiers)], dim=1)
