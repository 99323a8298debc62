"""Models that join their instances by pooling: mean, max, attention, and a sum of instance logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xmil.core.errors import check_choice
from xmil.models.base import MODELS, MILModel, PooledMIL, linear_relu_stack
from xmil.nn.attention import AttentionScores, masked_softmax

DROPOUT_PLACES = {"features": (1, 0, 0), "all": (1, 1, 1), "last": (0, 0, 1)}


class _LinearPooling(MILModel):
    """Linear + ReLU layers, pooling, a linear classifier; linear if `n_layers` is 0."""

    def __init__(
        self, in_dim: int, n_classes: int, *, dim: int = 256, n_layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__(in_dim, n_classes)
        self.dropout = nn.Dropout(dropout)
        self.instance = linear_relu_stack([in_dim] + [dim] * n_layers)
        self.classifier = nn.Linear(dim if n_layers else in_dim, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        return self.instance(self.dropout(x))

    def head(self, z: Tensor) -> Tensor:
        """Outputs from the pooled instances, (b, 1, e) or (b, e)."""
        return self.classifier(z.flatten(1))


@MODELS.register("meanpool")
class MeanPool(_LinearPooling, PooledMIL):
    """Linear + ReLU layers, the mean over instances, linear classifier."""

    no_attention = "it weighs all patches equally"

    def attend(self, h: Tensor) -> Tensor:
        """Equal attention: the softmax of a constant is the mean."""
        return h.new_zeros(*h.shape[:2], 1)


@MODELS.register("maxpool")
class MaxPool(_LinearPooling):
    """Linear + ReLU layers, the largest value of each feature over instances, linear classifier."""

    pooling = "max"

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            h = h.masked_fill(~mask.unsqueeze(-1), float("-inf"))
        return self.head(h.amax(dim=1))


@MODELS.register("attnmil")
class AttnMIL(PooledMIL):
    """Linear + ReLU layers, attention pooling, optional linear + ReLU layers, linear classifier.

    `dropout_at`: on the features ("features"), on the features, the embedded instances and the bag ("all"),
    or on the bag alone ("last"). With several attention branches their weighted means are concatenated.

    Ilse et al., "Attention-based Deep Multiple Instance Learning", ICML 2018, arXiv:1802.04712.
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
        check_choice("dropout_at", dropout_at, DROPOUT_PLACES, owner="attnmil")
        places = [nn.Dropout(dropout * on) for on in DROPOUT_PLACES[dropout_at]]
        self.feature_dropout, self.instance_dropout, self.bag_dropout = places
        self.instance = linear_relu_stack([in_dim] + [dim] * n_layers, bias=bias)
        self.attention = AttentionScores(dim, attention_dim, gated=gated, branches=branches)
        widths = [dim * branches] + [dim] * n_out_layers
        self.out = linear_relu_stack(widths, bias=bias, first_bias=bias)
        self.classifier = nn.Linear(widths[-1], n_classes, bias=bias)

    def embed(self, x: Tensor) -> Tensor:
        return self.instance_dropout(self.instance(self.feature_dropout(x)))

    def head(self, z: Tensor) -> Tensor:
        return self.classifier(self.bag_dropout(self.out(z.flatten(1))))


@MODELS.register("clam_sb")
class ClamSB(PooledMIL):
    """CLAM with a single attention branch; the instance-level clustering loss is not part of the output.

    Lu et al., "Data-efficient and weakly supervised computational pathology on whole-slide images",
    Nature Biomedical Engineering 2021, arXiv:2004.09666.
    """

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
        super().__init__(in_dim, n_classes)
        branches = n_classes if self.class_attention else 1
        self.instance = linear_relu_stack([in_dim, dim])
        self.instance_dropout = nn.Dropout(dropout)
        self.attention = AttentionScores(dim, attention_dim, gated=gated, branches=branches, dropout=dropout)
        if self.class_attention:
            self.classifiers = nn.ModuleList(nn.Linear(dim, 1) for _ in range(n_classes))
        else:
            self.classifier = nn.Linear(dim, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        return self.instance_dropout(self.instance(x))

    def head(self, z: Tensor) -> Tensor:
        return self.classifier(z.squeeze(1))


@MODELS.register("clam_mb")
class ClamMB(ClamSB):
    """CLAM with one attention branch and one linear classifier per class."""

    class_attention = True
    last_layer = None

    def head(self, z: Tensor) -> Tensor:
        """Output c from the weighted mean of branch c."""
        return torch.cat([layer(z[:, c]) for c, layer in enumerate(self.classifiers)], dim=1)


@MODELS.register("addmil")
class AddMIL(MILModel):
    """Attention MLP with batch norm, then a classifier MLP on each attended instance, outputs summed.

    Javed et al., "Additive MIL", NeurIPS 2022, arXiv:2206.01794.
    """

    pooling = "additive"
    last_layer = "classifier.4"
    no_attention = None

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
        return self.dropout(x)

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (b, c): the sum over instances."""
        return self.instance_logits(h, mask).sum(dim=1)

    def instance_logits(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """What each instance adds to the outputs, (b, n, c); zero outside the mask."""
        logits = self.classifier(masked_softmax(self.attend(h, mask), mask) * h)
        return logits if mask is None else logits.masked_fill(~mask.unsqueeze(-1), 0.0)

    def attend(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Unnormalised attention (b, n, 1); batch norm sees real instances only."""
        if mask is None:
            return self.attention(h.flatten(0, 1)).unflatten(0, h.shape[:2])
        scattered = h.new_zeros(*h.shape[:2], 1)
        scattered[mask] = self.attention(h[mask])
        return scattered

    def attention_weights(self, h: Tensor) -> Tensor:
        """The factor of each instance, (b, n, 1)."""
        return masked_softmax(self.attend(h), None)
