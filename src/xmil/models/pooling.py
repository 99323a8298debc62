"""Mean and max pooling: the two baselines without attention."""

from __future__ import annotations

from torch import Tensor, nn

from xmil.models.base import MILModel, PooledMIL, linear_relu_stack
from xmil.models.registry import MODELS


@MODELS.register("meanpool")
class MeanPool(PooledMIL):
    """Linear + ReLU layers, the mean over instances, linear classifier."""

    def __init__(
        self, in_dim: int, n_classes: int, *, dim: int = 256, n_layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__(in_dim, n_classes)
        self.dropout = nn.Dropout(dropout)
        self.instance = linear_relu_stack([in_dim] + [dim] * n_layers)
        self.classifier = nn.Linear(dim, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Instances, each by itself."""
        h: Tensor = self.instance(self.dropout(x))
        return h

    def attend(self, h: Tensor) -> Tensor:
        """Equal attention: the softmax of a constant is the mean."""
        return h.new_zeros(*h.shape[:2], 1)

    def head(self, z: Tensor) -> Tensor:
        """Outputs from the mean."""
        logits: Tensor = self.classifier(z.squeeze(1))
        return logits


@MODELS.register("maxpool")
class MaxPool(MILModel):
    """Linear + ReLU layers, the largest value of each feature over instances, linear classifier."""

    def __init__(
        self, in_dim: int, n_classes: int, *, dim: int = 256, n_layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__(in_dim, n_classes)
        self.dropout = nn.Dropout(dropout)
        self.instance = linear_relu_stack([in_dim] + [dim] * n_layers)
        self.classifier = nn.Linear(dim, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Instances, each by itself."""
        h: Tensor = self.instance(self.dropout(x))
        return h

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (b, c) from embedded instances (b, n, e)."""
        if mask is not None:
            h = h.masked_fill(~mask.unsqueeze(-1), float("-inf"))
        return self.head(h.amax(dim=1))

    def head(self, z: Tensor) -> Tensor:
        """Outputs from the largest values."""
        logits: Tensor = self.classifier(z)
        return logits
