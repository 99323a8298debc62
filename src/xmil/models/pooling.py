"""Mean and max pooling: the two baselines without attention."""

from __future__ import annotations

from torch import Tensor, nn

from xmil.models.base import MILModel, PooledMIL, linear_relu_stack
from xmil.models.registry import MODELS


class _LinearPooling(MILModel):
    """Linear + ReLU layers before the pooling, a linear classifier behind it; no layers make it linear."""

    def __init__(
        self, in_dim: int, n_classes: int, *, dim: int = 256, n_layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__(in_dim, n_classes)
        self.dropout = nn.Dropout(dropout)
        self.instance = linear_relu_stack([in_dim] + [dim] * n_layers)
        self.classifier = nn.Linear(dim if n_layers else in_dim, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Instances, each by itself."""
        h: Tensor = self.instance(self.dropout(x))
        return h

    def head(self, z: Tensor) -> Tensor:
        """Outputs from the pooled instances, (b, 1, e) or (b, e)."""
        logits: Tensor = self.classifier(z.flatten(1))
        return logits


@MODELS.register("meanpool")
class MeanPool(_LinearPooling, PooledMIL):
    """Linear + ReLU layers, the mean over instances, linear classifier."""

    def attend(self, h: Tensor) -> Tensor:
        """Equal attention: the softmax of a constant is the mean."""
        return h.new_zeros(*h.shape[:2], 1)

    @property
    def no_attention(self) -> str | None:
        """Equal weights say nothing."""
        return "it weighs all instances alike"


@MODELS.register("maxpool")
class MaxPool(_LinearPooling):
    """Linear + ReLU layers, the largest value of each feature over instances, linear classifier."""

    pooling = "max"

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (b, c) from embedded instances (b, n, e)."""
        if mask is not None:
            h = h.masked_fill(~mask.unsqueeze(-1), float("-inf"))
        return self.head(h.amax(dim=1))
