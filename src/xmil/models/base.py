"""What every MIL model is: a module from (b, n, d) features to (b, c) outputs, with a spec to rebuild it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from xmil.core.background import Background
from xmil.core.errors import InputError
from xmil.models.tasks import target_names
from xmil.nn.attention import masked_softmax


@dataclass(frozen=True)
class ModelSpec:
    """All it takes to build a model again, apart from its weights.

    `task` says what the outputs are: "classification" (softmax, or sigmoid for one output), "multilabel" (a
    sigmoid per class), "regression" (values), "survival" (logits of the hazards of time bins) or "cox" (one
    log risk). `reference` is what a regression's value is explained against, such as the mean of the training
    labels; `time_bins` are the n_classes - 1 times that part the bins, the last of which is open.
    `columns` of the training cohort held the targets: a label, several labels, a value, or time and event.
    """

    name: str
    in_dim: int
    n_classes: int
    params: Mapping[str, Any] = field(default_factory=dict)
    class_names: tuple[str, ...] | None = None
    task: str = "classification"
    encoder: str | None = None
    reference: float | tuple[float, ...] | None = None
    time_bins: tuple[float, ...] | None = None
    columns: tuple[str, ...] | None = None

    @property
    def target_names(self) -> tuple[str, ...] | None:
        """Names of what can be explained, where they are known: classes, values, bins and the risk."""
        return target_names(self.task, self.n_classes, self.class_names, self.time_bins)


class MILModel(nn.Module, ABC):
    """A bag classifier: instances are embedded one by one, then aggregated to the bag's outputs.

    `forward` takes (b, n, d) and an optional mask (b, n), true for real instances. The output of a bag
    depends neither on its batch mates nor on its padding.
    """

    spec: ModelSpec
    background: Background | None = None  # of its training patches; saved and loaded with the model

    def __init__(self, in_dim: int, n_classes: int) -> None:
        super().__init__()
        self.in_dim = in_dim
        self.n_classes = n_classes

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes, where the model knows them."""
        return self.spec.class_names if hasattr(self, "spec") else None

    @property
    def task(self) -> str:
        """What the outputs mean, see `ModelSpec`."""
        return self.spec.task if hasattr(self, "spec") else "classification"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (b, c) of bags (b, n, d)."""
        return self.aggregate(self.embed(checked_bags(x, mask)), mask)

    def embed(self, x: Tensor) -> Tensor:
        """Instances, each by itself: (b, n, d) to (b, n, e)."""
        return x

    @abstractmethod
    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (b, c) from embedded instances (b, n, e)."""


class PooledMIL(MILModel):
    """A model that weighs embedded instances by a softmax and reads the weighted means.

    attend: (b, n, e) to attention logits (b, n, k); head: the k weighted means (b, k, e) to outputs (b, c).
    """

    @abstractmethod
    def attend(self, h: Tensor) -> Tensor:
        """Unnormalised attention of the embedded instances, one column per attention branch."""

    @abstractmethod
    def head(self, z: Tensor) -> Tensor:
        """Outputs from the weighted means."""

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (b, c) from embedded instances (b, n, e)."""
        weights = masked_softmax(self.attend(h), mask)  # (b, n, k)
        return self.head(weights.transpose(1, 2) @ h)


def checked_bags(x: Tensor, mask: Tensor | None) -> Tensor:
    """The bags with zeros outside the mask; bags without an instance are refused."""
    if x.ndim != 3 or x.shape[1] == 0:
        raise InputError(f"A model takes bags of shape (b, n, d) with n >= 1. Got {tuple(x.shape)} instead.")
    if mask is None:
        return x
    if mask.shape != x.shape[:2] or mask.dtype != torch.bool:
        raise InputError(
            f"The mask must be a bool tensor of shape {tuple(x.shape[:2])}. Got {tuple(mask.shape)}."
        )
    if not bool(mask.any(dim=1).all()):
        raise InputError("Each bag of a batch needs at least one instance in its mask.")
    return x.masked_fill(~mask.unsqueeze(-1), 0.0)


def linear_relu_stack(widths: list[int], *, bias: bool = True, first_bias: bool = True) -> nn.Sequential:
    """Linear + ReLU blocks through the given widths; `bias` is for the blocks after the first."""
    blocks = [
        nn.Sequential(nn.Linear(a, b, bias=first_bias if i == 0 else bias), nn.ReLU())
        for i, (a, b) in enumerate(pairwise(widths))
    ]
    return nn.Sequential(*blocks)
