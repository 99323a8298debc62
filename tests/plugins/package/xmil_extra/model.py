"""A model: the mean of embedded instances, through an operation that LRP has no rule for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xmil.models import MODELS, MILModel


@MODELS.register("sincpool")
class SincPool(MILModel):
    """Linear layer, x sinc(x / 8), mean, linear classifier."""

    def __init__(self, in_dim: int, n_classes: int, *, dim: int = 8) -> None:
        super().__init__(in_dim, n_classes)
        self.instance, self.classifier = nn.Linear(in_dim, dim), nn.Linear(dim, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Instances, each by itself."""
        h: Tensor = self.instance(x)
        return h * torch.sinc(h / 8)

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs of the mean."""
        weights = h.new_ones(h.shape[:2]) if mask is None else mask.to(h)
        mean = (h * weights.unsqueeze(-1)).sum(dim=1) / weights.sum(dim=1, keepdim=True)
        logits: Tensor = self.classifier(mean)
        return logits
