"""AddMIL: additive MIL, whose outputs are sums over instances.

Javed et al., "Additive MIL", NeurIPS 2022, arXiv:2206.01794.
"""

from __future__ import annotations

from torch import Tensor, nn

from xmil.models.base import MILModel
from xmil.models.registry import MODELS
from xmil.nn.attention import masked_softmax


@MODELS.register("addmil")
class AddMIL(MILModel):
    """Attention MLP with batch norm, then a classifier MLP on each attended instance, outputs summed."""

    pooling = "additive"
    last_layer = "classifier.4"

    def __init__(self, in_dim: int, n_classes: int, *, hidden: int = 256, dropout: float = 0.0) -> None:
        super().__init__(in_dim, n_classes)
        self.dropout = nn.Dropout(dropout)
        self.attention = nn.Sequential(
            nn.Linear(in_dim, hidden),
            nn.BatchNorm1d(hidden),
            nn.LeakyReLU(0.2),
            nn.Linear(hidden, hidden),
            nn.BatchNorm1d(hidden),
            nn.LeakyReLU(0.2),
            nn.Linear(hidden, 1),
        )
        self.classifier = nn.Sequential(
            nn.Linear(in_dim, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, n_classes),
        )

    def embed(self, x: Tensor) -> Tensor:
        """Instances as they are."""
        h: Tensor = self.dropout(x)
        return h

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (b, c): the sum over instances."""
        return self.instance_logits(h, mask).sum(dim=1)

    def instance_logits(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """What each instance adds to the outputs, (b, n, c); zero outside the mask."""
        logits: Tensor = self.classifier(masked_softmax(self.attend(h, mask), mask) * h)
        return logits if mask is None else logits.masked_fill(~mask.unsqueeze(-1), 0.0)

    def attend(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Unnormalised attention (b, n, 1); batch norm sees real instances only."""
        if mask is None:
            scores: Tensor = self.attention(h.flatten(0, 1)).unflatten(0, h.shape[:2])
            return scores
        scattered = h.new_zeros(*h.shape[:2], 1)
        scattered[mask] = self.attention(h[mask])
        return scattered

    @property
    def no_attention(self) -> str | None:
        """None: instances are scaled by their attention."""
        return None

    def attention_weights(self, h: Tensor) -> Tensor:
        """The factor of each instance, (b, n, 1)."""
        return masked_softmax(self.attend(h), None)
