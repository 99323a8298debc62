"""AttnMIL: attention-based MIL.

Ilse et al., "Attention-based Deep Multiple Instance Learning", ICML 2018, arXiv:1802.04712.
"""

from __future__ import annotations

from torch import Tensor, nn

from xmil.core.errors import bad_parameter
from xmil.models.base import PooledMIL, linear_relu_stack
from xmil.models.registry import MODELS
from xmil.nn.attention import AttentionScores

DROPOUT_PLACES = {"features": (1, 0, 0), "all": (1, 1, 1), "last": (0, 0, 1)}


@MODELS.register("attnmil")
class AttnMIL(PooledMIL):
    """Linear + ReLU layers, attention pooling, optional linear + ReLU layers, linear classifier.

    `dropout_at`: on the features ("features"), on the features, the embedded instances and the bag ("all"),
    or on the bag alone ("last"). With several attention branches their weighted means are concatenated.
    """

    def __init__(
        self,
        in_dim: int,
        n_classes: int,
        *,
        dim: int = 256,
        attention_dim: int = 128,
        gated: bool = False,
        branches: int = 1,
        n_layers: int = 1,
        n_out_layers: int = 0,
        bias: bool = True,
        dropout: float = 0.0,
        dropout_at: str = "features",
    ) -> None:
        super().__init__(in_dim, n_classes)
        if dropout_at not in DROPOUT_PLACES:
            raise bad_parameter("dropout_at", "attnmil", f"one of {sorted(DROPOUT_PLACES)}", dropout_at)
        places = [nn.Dropout(dropout * on) for on in DROPOUT_PLACES[dropout_at]]
        self.feature_dropout, self.instance_dropout, self.bag_dropout = places
        self.instance = linear_relu_stack([in_dim] + [dim] * n_layers, bias=bias)
        self.attention = AttentionScores(dim, attention_dim, gated=gated, branches=branches)
        widths = [dim * branches] + [dim] * n_out_layers
        self.out = linear_relu_stack(widths, bias=bias, first_bias=bias)
        self.classifier = nn.Linear(widths[-1], n_classes, bias=bias)

    def embed(self, x: Tensor) -> Tensor:
        """Instances, each by itself."""
        h: Tensor = self.instance_dropout(self.instance(self.feature_dropout(x)))
        return h

    def attend(self, h: Tensor) -> Tensor:
        """Unnormalised attention of the embedded instances."""
        scores: Tensor = self.attention(h)
        return scores

    def head(self, z: Tensor) -> Tensor:
        """Outputs from the weighted means."""
        logits: Tensor = self.classifier(self.bag_dropout(self.out(z.flatten(1))))
        return logits
