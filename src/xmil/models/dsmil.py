"""DSMIL: dual-stream MIL.

Li et al., "Dual-stream Multiple Instance Learning Network for Whole Slide Image Classification with
Self-supervised Contrastive Learning", CVPR 2021, arXiv:2011.08939.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from xmil.models.base import MILModel
from xmil.models.registry import MODELS


@MODELS.register("dsmil")
class DSMIL(MILModel):
    """The mean of two streams: the highest instance score of each class, and a classifier on the instances
    weighted by their likeness to that critical instance."""

    class_attention = True

    def __init__(self, in_dim: int, n_classes: int, *, query_dim: int = 128, dropout: float = 0.0) -> None:
        super().__init__(in_dim, n_classes)
        self.instance_classifier = nn.Linear(in_dim, n_classes)
        self.query = nn.Sequential(
            nn.Linear(in_dim, query_dim), nn.ReLU(), nn.Linear(query_dim, query_dim), nn.Tanh()
        )
        self.dropout = nn.Dropout(dropout)
        self.bag_classifier = nn.Conv1d(n_classes, n_classes, kernel_size=in_dim)

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (b, c) from instances (b, n, d)."""
        scores = self._scores(h, mask)
        weights = F.softmax(self._likeness(h, scores, mask), dim=1)  # (b, n, c)
        pooled = weights.transpose(1, 2) @ self.dropout(h)  # (b, c, d)
        bag: Tensor = self.bag_classifier(pooled).squeeze(-1)
        return 0.5 * (scores.amax(dim=1) + bag)

    def attend(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Unnormalised attention (b, n, c): likeness of each instance to each class's critical one."""
        return self._likeness(h, self._scores(h, mask), mask)

    @property
    def no_attention(self) -> str | None:
        """None: likeness to the critical instance weighs the others."""
        return None

    def attention_weights(self, h: Tensor) -> Tensor:
        """The weight (b, n, c) of each instance in each class's mean."""
        return F.softmax(self.attend(h), dim=1)

    def _scores(self, x: Tensor, mask: Tensor | None) -> Tensor:
        scores: Tensor = self.instance_classifier(x)  # (b, n, c)
        return scores if mask is None else scores.masked_fill(~mask.unsqueeze(-1), float("-inf"))

    def _likeness(self, x: Tensor, scores: Tensor, mask: Tensor | None) -> Tensor:
        queries = self.query(x)  # (b, n, q)
        index = scores.argmax(dim=1).unsqueeze(-1).expand(-1, -1, queries.shape[-1])
        critical = queries.gather(1, index)  # (b, c, q)
        likeness: Tensor = queries @ critical.transpose(1, 2) / queries.shape[-1] ** 0.5
        return likeness if mask is None else likeness.masked_fill(~mask.unsqueeze(-1), float("-inf"))
