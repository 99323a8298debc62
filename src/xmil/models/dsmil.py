"""DSMIL: dual-stream MIL.

Li et al., "Dual-stream Multiple Instance Learning Network for Whole Slide Image Classification with
Self-supervised Contrastive Learning", CVPR 2021, arXiv:2011.08939.
"""

from __future__ import annotations

from torch import Tensor, nn

from xmil.core.errors import check_choice
from xmil.models.base import MODELS, MILModel, linear_relu_stack
from xmil.nn.attention import masked_softmax


@MODELS.register("dsmil")
class DSMIL(MILModel):
    """The mean of two streams: the highest instance score of each class, and a classifier on the instances
    weighted by their similarity to that critical instance.

    `dim` adds `n_layers` of Linear + ReLU in front, `values` a linear layer (and a ReLU) before averaging,
    `norm` a layer norm on the averages. With `streams="bag"` the instance scores only choose the critical
    instances and are not part of the output.
    """

    class_attention = True
    last_layer = None
    no_attention = None

    def __init__(
        self,
        in_dim: int,
        n_classes: int,
        *,
        dim: int | None = None,
        n_layers: int = 1,
        query_dim: int = 128,
        query_layers: int = 2,
        values: str | None = None,
        norm: bool = False,
        streams: str = "mean",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(in_dim, n_classes)
        check_choice("streams", streams, ("mean", "bag"), owner="dsmil")
        check_choice("values", values, (None, "linear", "relu"), owner="dsmil")
        width = in_dim if dim is None else dim
        self.streams = streams
        self.instance = linear_relu_stack([in_dim] + ([width] * n_layers if dim is not None else []))
        self.instance_classifier = nn.Linear(width, n_classes)
        first = nn.Linear(width, query_dim)
        second = (nn.ReLU(), nn.Linear(query_dim, query_dim), nn.Tanh()) if query_layers == 2 else ()
        self.query = nn.Sequential(first, *second)
        self.dropout = nn.Dropout(dropout)
        layers = [] if values is None else [nn.Linear(width, width)]
        self.values = nn.Sequential(*layers, *([nn.ReLU()] if values == "relu" else []))
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.bag_classifier = nn.Conv1d(n_classes, n_classes, kernel_size=width)

    def embed(self, x: Tensor) -> Tensor:
        return self.instance(x)

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.instance_classifier(h)  # (b, n, c)
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(-1), float("-inf"))
        weights = masked_softmax(self._similarity(h, scores), mask)  # (b, n, c)
        pooled = self.norm(weights.transpose(1, 2) @ self.values(self.dropout(h)))  # (b, c, e)
        bag = self.bag_classifier(pooled).squeeze(-1)
        return bag if self.streams == "bag" else 0.5 * (scores.amax(dim=1) + bag)

    def attention_weights(self, h: Tensor) -> Tensor:
        """The weight (b, n, c) of each instance in each class's mean."""
        return masked_softmax(self._similarity(h, self.instance_classifier(h)), None)

    def _similarity(self, h: Tensor, scores: Tensor) -> Tensor:
        """Similarity (b, n, c) of each instance to each class's critical instance."""
        queries = self.query(h)  # (b, n, q)
        index = scores.argmax(dim=1).unsqueeze(-1).expand(-1, -1, queries.shape[-1])
        critical = queries.gather(1, index)  # (b, c, q)
        return queries @ critical.transpose(1, 2) / queries.shape[-1] ** 0.5
