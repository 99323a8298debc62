"""The base of every MIL model: a module from (b, n, d) features to (b, c) outputs, built from a spec."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from xmil.core.background import Background
from xmil.core.errors import (
    InputError,
    UnsupportedError,
    check_choice,
    check_count,
    check_names,
)
from xmil.core.registry import Registry
from xmil.core.task import TASKS
from xmil.nn.attention import SelfAttention, masked_softmax


@dataclass(frozen=True)
class ModelSpec:
    """All you need to rebuild a model, except its weights.

    `task` is the meaning of the outputs: "classification" (softmax, or sigmoid for one output), "multilabel"
    (a sigmoid per class), "regression" (values), "survival" (logits of the hazards of time bins) or "cox"
    (one log risk). A regression is explained relative to `reference`, such as the mean of the training
    labels; `relative` outputs are deviations from it already. `time_bins` are the n_classes - 1 times between
    the bins; the last bin is open. `columns` of the training cohort held the targets: a label, several
    labels, a value, or time and event. `features` records how the training features were made: weights of
    the encoder, patch_px, mpp and the like.
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
    relative: bool = False
    features: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("class_names", "reference", "time_bins", "columns"):
            if isinstance(value := getattr(self, name), Iterable):  # a list from JSON or the user
                values = map(str, value) if name == "class_names" else value
                object.__setattr__(self, name, tuple(values))

    @property
    def target_names(self) -> tuple[str, ...] | None:
        """Names of the targets, if known: classes, values, bins and the risk."""
        return TASKS[self.task].target_names(self.n_classes, self.class_names, self.time_bins)

    @property
    def n_targets(self) -> int:
        """The number of targets."""
        return TASKS[self.task].count_targets(self.n_classes)

    @property
    def names(self) -> list[str]:
        """Names of the classes, values or time bins; numbers if they have none."""
        return TASKS[self.task].names(self.n_classes, self.class_names, self.time_bins)


class MILModel(nn.Module, ABC):
    """A bag classifier: instances are embedded one by one, then aggregated to the bag's outputs.

    `forward` takes (b, n, d) and an optional mask (b, n), true for real instances. The output of a bag
    depends neither on its batch mates nor on its padding.

    `pooling` tells how a model joins instances if outputs of parts of a bag have a closed form ("softmax":
    weighted means, "max": the largest of each feature, "additive": a sum of instance logits). A subclass that
    replaces `forward`, `aggregate` or `instance_logits` has to set it again.
    """

    spec: ModelSpec
    notes: tuple[str, ...] = ()  # what loading it assumed, ignored or left out
    warnings: tuple[str, ...] = ()  # the notes to show with every explanation
    last_layer: ClassVar[str | None] = "classifier"  # the linear layer whose rows are the outputs
    background: Background | None = None  # its training patches; saved and loaded with the model
    pooling: ClassVar[str | None] = None
    class_attention: ClassVar[bool] = False  # whether attention has a column for each class
    no_attention: str | None = (
        "it has no attention of a known kind"  # why it has no attention; None if it has
    )
    needs_coords: bool = False  # whether outputs depend on coordinates; `aggregate` takes them

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "pooling" not in own and any(name in own for name in ("forward", "aggregate", "instance_logits")):
            cls.pooling = None

    def __init__(self, in_dim: int, n_classes: int) -> None:
        super().__init__()
        self.in_dim = in_dim
        self.n_classes = n_classes

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes, if the model knows them."""
        return self.spec.class_names if hasattr(self, "spec") else None

    @property
    def task(self) -> str:
        """The meaning of the outputs, see `ModelSpec`."""
        return self.spec.task if hasattr(self, "spec") else "classification"

    def forward(self, x: Tensor, mask: Tensor | None = None, **companions: Tensor | None) -> Tensor:
        """Outputs (b, c) of bags (b, n, d); companions, such as coordinates, go to `aggregate`."""
        if x.ndim != 3 or x.shape[1] == 0:
            raise InputError(
                f"A model takes bags of shape (b, n, d) with n >= 1. Got {tuple(x.shape)} instead."
            )
        if mask is not None:
            if mask.shape != x.shape[:2] or mask.dtype != torch.bool:
                raise InputError(
                    f"The mask must be a bool tensor of shape {tuple(x.shape[:2])}. "
                    f"Got {mask.dtype} of shape {tuple(mask.shape)} instead."
                )
            if not bool(mask.any(dim=1).all()):
                raise InputError("Each bag of a batch needs at least one patch in its mask.")
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        return self.aggregate(self.embed(x), mask, **companions)

    def embed(self, x: Tensor) -> Tensor:
        """Embed each instance by itself: (b, n, d) to (b, n, e)."""
        return x

    @abstractmethod
    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (b, c) from embedded instances (b, n, e)."""

    def attention_weights(self, h: Tensor) -> Tensor:
        """The weights (b, n, k) of embedded instances in the pooling, one column per branch."""
        raise UnsupportedError(f"{type(self).__name__} does not join patches by weights.")

    def attention_layers(self) -> list[SelfAttention]:
        """The self-attention layers in order; in each, the first row is a class token's attention."""
        return []

    def instance_logits(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """What each instance adds to the outputs of an additive model, (b, n, c); zero outside the mask."""
        raise UnsupportedError(f"The outputs of {type(self).__name__} are not sums over patches.")


class PooledMIL(MILModel):
    """A model that classifies weighted means of embedded instances, with softmax weights.

    attend: (b, n, e) to attention logits (b, n, k); head: the k weighted means (b, k, e) to outputs (b, c).
    """

    pooling = "softmax"
    no_attention: str | None = None
    attention: nn.Module

    def attend(self, h: Tensor) -> Tensor:
        """Unnormalised attention of the embedded instances, one column per attention branch."""
        return self.attention(h)

    @abstractmethod
    def head(self, z: Tensor) -> Tensor:
        """Outputs from the weighted means."""

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.pool_weighted(h, self.attend(h), mask)

    def pool_weighted(self, h: Tensor, attention: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (b, c) from embedded instances (b, n, e) and their unnormalised attention (b, n, k)."""
        weights = masked_softmax(attention, mask)
        return self.head(weights.transpose(1, 2) @ h)

    def attention_weights(self, h: Tensor) -> Tensor:
        """The weights (b, n, k) of the instances in each mean."""
        return masked_softmax(self.attend(h), None)


def run_by_length(
    aggregate: Callable[..., Tensor], h: Tensor, mask: Tensor, **companions: Tensor | None
) -> Tensor:
    """Outputs (b, c) of padded bags (b, n, e), for models that padding would change: bags of equal length
    run together without padding."""
    lengths = mask.sum(dim=1)
    logits: list[Tensor] = [h.new_empty(0)] * len(h)
    for n in lengths.unique().tolist():
        index = (lengths == n).nonzero().squeeze(1)

        def pick(value: Tensor, index: Tensor = index, n: int = int(n)) -> Tensor:
            return value[index][mask[index]].view(len(index), n, *value.shape[2:])

        picked = {name: None if value is None else pick(value) for name, value in companions.items()}
        for i, row in zip(index.tolist(), aggregate(pick(h), **picked), strict=True):
            logits[i] = row
    return torch.stack(logits)


def linear_relu_stack(widths: list[int], *, bias: bool = True, first_bias: bool = True) -> nn.Sequential:
    """Linear + ReLU blocks through the given widths; `bias` is for the blocks after the first."""
    blocks = [
        nn.Sequential(nn.Linear(a, b, bias=first_bias if i == 0 else bias), nn.ReLU())
        for i, (a, b) in enumerate(pairwise(widths))
    ]
    return nn.Sequential(*blocks)


MODELS: Registry[type[MILModel]] = Registry("model", group="xmil.models")


def list_models() -> list[str]:
    """Names that `create_model` takes.

    >>> list_models()
    ['addmil', 'attnmil', 'clam_mb', 'clam_sb', 'dsmil', 'mambamil', 'maxpool', 'meanpool',
     'stamp_vit', 'transmil']
    """
    return list(MODELS)


def create_model(
    name: str,
    *,
    in_dim: int,
    n_classes: int,
    seed: int | None = None,
    class_names: Sequence[str] | None = None,
    task: str = "classification",
    encoder: str | None = None,
    reference: float | Sequence[float] | None = None,
    time_bins: Sequence[float] | None = None,
    columns: Sequence[str] | None = None,
    features: Mapping[str, Any] | None = None,
    **params: Any,
) -> MILModel:
    """Create a model with fresh weights, in eval mode; `params` are the model's own.

    `task`, `reference` and `time_bins` say what the `n_classes` outputs mean, `columns` names the cohort
    columns that they predict; see `ModelSpec`.

    >>> create_model("transmil", in_dim=768, n_classes=2, dim=64).in_dim
    768
    """
    outputs: dict[str, Any] = {  # the spec turns lists into tuples
        "class_names": class_names,
        "reference": reference,
        "time_bins": time_bins,
        "columns": columns,
    }
    about = None if features is None else dict(features)
    spec = ModelSpec(name, in_dim, n_classes, params, task=task, encoder=encoder, features=about, **outputs)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        return build(spec)


def build(spec: ModelSpec) -> MILModel:
    """Build the model of a spec, with fresh weights, in eval mode."""
    make = MODELS[spec.name]
    for name in ("in_dim", "n_classes"):
        check_count(name, getattr(spec, name), owner=spec.name)
    parameters = model_parameters(make)
    check_names(f"parameter of {spec.name}", spec.params, parameters)
    check_choice("task", spec.task, TASKS, owner=spec.name)
    TASKS[spec.task].check(spec)
    model = make(spec.in_dim, spec.n_classes, **spec.params)
    model.spec = replace(spec, params=dict(spec.params))
    return model.eval()


def model_parameters(make: type[MILModel]) -> dict[str, Any]:
    """A model's own parameters and their defaults."""
    signature = inspect.signature(make)
    return {p.name: p.default for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
