"""Checkpoints: any of the field's into a model, ours out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from xmil.core.errors import CheckpointError, XmilError
from xmil.core.storage import write_atomically
from xmil.models.base import MILModel, ModelSpec
from xmil.models.checkpoints import authors, mil_lab, published, stamp, torchmils
from xmil.models.checkpoints.families import (
    FAMILIES,
    PREFIXES,
    Converted,
    Family,
    strip_prefixes,
    under_prefix,
)
from xmil.models.checkpoints.files import (
    BACKGROUND,
    BACKGROUND_KEY,
    SPEC_KEY,
    StoredWeights,
    listed,
    read_weights,
)
from xmil.models.checkpoints.foreign import advice_for, stamps_advice
from xmil.models.checkpoints.heads import one_output
from xmil.models.checkpoints.pretrained import WEIGHTS, is_folder_name, write_config
from xmil.models.checkpoints.side_files import outputs_beside
from xmil.models.checkpoints.sizes import no_larger_than
from xmil.models.registry import build

__all__ = [
    "FAMILIES",
    "authors",
    "describe_checkpoint",
    "load_model",
    "mil_lab",
    "published",
    "save_model",
    "stamp",
    "torchmils",
]


def load_model(
    path: str | PathLike[str],
    *,
    class_names: Sequence[str] | None = None,
    task: str | None = None,
    reference: float | Sequence[float] | None = None,
    time_bins: Sequence[float] | None = None,
    encoder: str | None = None,
    head: int | None = None,
) -> MILModel:
    """The model in a checkpoint, in eval mode on the CPU; see docs/checkpoints.md for the families.

    Only tensors are read: a checkpoint that would run code is refused. Weights stored in float64 stay so; any
    others become float32. What the checkpoint and the files beside it cannot say of its outputs, such as the
    `task` of a published survival model, can be given; `head` keeps one of the outputs, such as the one that
    is the log risk. What was assumed or left out is in the model's `notes`.
    """
    given = {"class_names": class_names, "task": task, "reference": reference, "time_bins": time_bins}
    return _load(Path(path), {**given, "encoder": encoder}, head)[0]


def save_model(model: MILModel, path: str | PathLike[str]) -> None:
    """Write a model as safetensors with its spec in the header; `load_model` reads it back.

    A folder that is there, or a name that ends with a slash, gets `config.json`, `model.safetensors` and a
    card, `README.md`.
    """
    from safetensors.torch import save

    if not isinstance(model, MILModel) or not hasattr(model, "spec"):
        raise CheckpointError(
            f"save_model takes a model of create_model or load_model, not {type(model).__name__}."
        )
    if is_folder_name(path):
        write_config(model, Path(path))
        path = Path(path) / WEIGHTS
    if Path(path).suffix != ".safetensors":
        raise CheckpointError(f"{path}: save_model writes safetensors; end the name in .safetensors.")
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    header = {SPEC_KEY: json.dumps(asdict(model.spec))}
    if model.background is not None:
        state |= {key: torch.from_numpy(getattr(model.background, name)) for name, key in BACKGROUND.items()}
        header[BACKGROUND_KEY] = json.dumps({"n": model.background.n})
    content = save(state, metadata=header)  # bytes first: a full disk is then an OSError, told in one line
    write_atomically(path, lambda temporary: _put(temporary, content))


def _put(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)


def describe_checkpoint(path: str | PathLike[str]) -> dict[str, Any]:
    """What a checkpoint is: family, model, sizes, parameters, and what was assumed or ignored."""
    model, family = _load(Path(path), {}, None)
    spec = asdict(model.spec)
    weights = sum(parameter.numel() for parameter in model.parameters())
    found = {"path": str(path), "family": family, **spec, "weights": weights}
    notes = [note for note in model.notes if note not in model.warnings]
    return {**found, "notes": notes, "warnings": list(model.warnings)}


def _load(path: Path, given: Mapping[str, Any], head: int | None) -> tuple[MILModel, str]:
    weights = read_weights(path)
    asked = {name: value for name, value in given.items() if value is not None}
    try:
        family, converted, says = _recognise(weights, asked)
        if head is not None:
            converted = one_output(converted, head)
            says = {name: value for name, value in says.items() if name not in ("class_names", "time_bins")}
        with no_larger_than(converted.state):
            model = build(_spec({**_fields(converted), **says, **asked}))
    except XmilError as error:
        raise CheckpointError(f"{weights.path}: {error}") from None
    except (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError) as error:
        told = " ".join(repr(error).split())[:300]
        raise CheckpointError(f"{weights.path}: its shapes do not fit together ({told}).") from None
    _fill(model, converted, weights.path)
    model.background = weights.background
    model.warnings = () if "task" in {**says, **asked} else (_assumed(model),)
    model.notes = (*converted.notes, *weights.notes, *model.warnings)
    return model, family


def _recognise(weights: StoredWeights, asked: Mapping[str, Any]) -> tuple[str, Converted, dict[str, Any]]:
    """The family, the conversion, and what the checkpoint and the files beside it say of the outputs."""
    if weights.spec is not None:
        spec = _fields_of(_spec(weights.spec))
        name, in_dim, n_classes = (spec.pop(key) for key in ("name", "in_dim", "n_classes"))
        return "xmil", Converted(name, in_dim, n_classes, spec.pop("params"), dict(weights.state)), spec
    family, state, notes = _find_family(weights)
    converted = family.convert(state, weights.settings)
    converted = replace(converted, notes=[*converted.notes, *notes])
    names = _tuple(weights.settings.get("class_names"))
    says = {} if names is None else {"class_names": names}
    if "task" not in asked:
        says |= outputs_beside(weights.path.parent, weights.settings, converted.n_classes)
    elif asked["task"] in ("regression", "survival"):
        says |= _settled(weights, asked["task"], converted.n_classes)
    return family.name, converted, {**says, **converted.says}


def _settled(weights: StoredWeights, task: str, n_outputs: int) -> dict[str, Any]:
    """What the files beside a checkpoint say, where they are of the task that was asked for."""
    try:
        beside = outputs_beside(weights.path.parent, weights.settings, n_outputs)
    except CheckpointError:
        return {}
    return beside if beside.get("task") == task else {}


def _assumed(model: MILModel) -> str:
    return (
        f"The {model.n_classes} outputs of the checkpoint are taken as classification: nothing in it or "
        "beside it says what they mean; in Python load_model(path, task=...) does."
    )


def _fields(converted: Converted) -> dict[str, Any]:
    return {
        "name": converted.model,
        "in_dim": converted.in_dim,
        "n_classes": converted.n_classes,
        "params": converted.params,
    }


def _find_family(weights: StoredWeights) -> tuple[Family, dict[str, torch.Tensor], list[str]]:
    """The family, its keys without prefixes, and a note on keys that had to be left out to find it."""
    stored = weights.state
    if (advice := advice_for(stored)) is not None:
        raise CheckpointError(advice)
    state = strip_prefixes(stored)
    try:
        return _family_of(state), state, []
    except CheckpointError:
        for prefix in PREFIXES:
            inner, foreign = under_prefix(stored, prefix)
            if any(not FAMILIES[name].missing(inner) for name in FAMILIES):
                return _family_of(inner), inner, _dropped(foreign, prefix)
        if (advice := stamps_advice(weights.settings)) is not None:
            raise CheckpointError(advice) from None
        raise


def _dropped(keys: list[str], prefix: str) -> list[str]:
    return [f"dropped {listed(keys)}: not under {prefix!r}, where the model is"] if keys else []


def _family_of(state: dict[str, torch.Tensor]) -> Family:
    tried = []
    for name in FAMILIES:
        missing = FAMILIES[name].missing(state)
        if not missing:
            return FAMILIES[name]
        tried.append(f"{name} lacks {missing[0]}")
    keys = ", ".join(list(state)[:6]) + (", ..." if len(state) > 6 else "")
    raise CheckpointError(
        f"of no known family. Keys: {keys}. Tried: {'; '.join(tried).replace(chr(92), '')}."
    )


def _fill(model: MILModel, converted: Converted, path: Path) -> None:
    own = model.state_dict()
    missing = sorted(own.keys() - converted.state.keys())
    extra = sorted(converted.state.keys() - own.keys())
    shapes = [
        f"{key} {tuple(value.shape)}, expected {tuple(own[key].shape)}"
        for key, value in converted.state.items()
        if key in own and own[key].shape != value.shape
    ]
    faults = [("missing", missing), ("not expected", extra), ("of the wrong shape", shapes)]
    if any(keys for _, keys in faults):
        told = "; ".join(f"{fault}: {', '.join(keys)}" for fault, keys in faults if keys)
        raise CheckpointError(f"{path}: the keys do not fit {converted.model}. {told}.")
    if {value.dtype for value in converted.state.values() if value.is_floating_point()} == {torch.float64}:
        model.double()
    model.load_state_dict(converted.state)


def _spec(fields: Mapping[str, Any]) -> ModelSpec:
    """A spec from what JSON or a user gives: lists become tuples."""
    listed = ("reference", "time_bins", "columns")
    tuples = {name: tuple(fields[name]) for name in listed if isinstance(fields.get(name), list | tuple)}
    return ModelSpec(**{**fields, **tuples, "class_names": _tuple(fields.get("class_names"))})


def _fields_of(spec: ModelSpec) -> dict[str, Any]:
    return {key: getattr(spec, key) for key in spec.__dataclass_fields__}


def _tuple(names: Any) -> tuple[str, ...] | None:
    return tuple(map(str, names)) if isinstance(names, list | tuple) else None
