"""The registry of models, and the verbs that make, save and list them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from xmil.core.errors import bad_parameter, unknown_name
from xmil.core.registry import Registry
from xmil.core.task import TASKS
from xmil.models.base import MILModel, ModelSpec

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
    """A model with fresh weights, in eval mode; `params` are the model's own.

    `task`, `reference` and `time_bins` say what the `n_classes` outputs mean, `columns` where a cohort has
    what they predict; see `ModelSpec`.

    >>> create_model("transmil", in_dim=768, n_classes=2, dim=64).in_dim
    768
    """
    spec = ModelSpec(
        name,
        in_dim,
        n_classes,
        params,
        class_names=None if class_names is None else tuple(class_names),
        task=task,
        encoder=encoder,
        reference=tuple(reference) if isinstance(reference, Sequence) else reference,
        time_bins=None if time_bins is None else tuple(time_bins),
        columns=None if columns is None else tuple(columns),
        features=None if features is None else dict(features),
    )
    if seed is None:
        return build(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(spec)


def build(spec: ModelSpec) -> MILModel:
    """The model of a spec, with fresh weights, in eval mode."""
    make = MODELS[spec.name]
    _check(spec, make)
    model = make(spec.in_dim, spec.n_classes, **spec.params)
    model.spec = replace(spec, params=dict(spec.params))
    return model.eval()


def model_parameters(make: type[MILModel]) -> dict[str, Any]:
    """A model's own parameters and their defaults."""
    signature = inspect.signature(make)
    return {p.name: p.default for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}


def _check(spec: ModelSpec, make: type[MILModel]) -> None:
    for name in ("in_dim", "n_classes"):
        value = getattr(spec, name)
        if not isinstance(value, int) or value < 1:
            raise bad_parameter(name, spec.name, "an int in the range [1, inf)", value)
    parameters = model_parameters(make)
    for name in spec.params:
        if name not in parameters:
            raise unknown_name(f"parameter of {spec.name}", name, parameters)
    if spec.task not in TASKS:
        raise bad_parameter("task", spec.name, f"one of {list(TASKS)}", spec.task)
    TASKS[spec.task].check(spec)
