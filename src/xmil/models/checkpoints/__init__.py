"""Load models from checkpoints of the field's families, and save our own."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from xmil._version import __version__
from xmil.core.durable import write_bytes, write_text
from xmil.core.errors import CheckpointError, XmilError, bad_parameter, not_made
from xmil.core.text import markdown_table, shorten
from xmil.models.base import MODELS, MILModel, ModelSpec, build
from xmil.models.checkpoints import published
from xmil.models.checkpoints.families import (
    FAMILIES,
    KNOWN,
    PREFIXES,
    Converted,
    Family,
    stamp_advice,
    under_prefix,
)
from xmil.models.checkpoints.files import (
    BACKGROUND,
    BACKGROUND_KEY,
    SPEC_KEY,
    StoredWeights,
    features_beside,
    outputs_beside,
    read_weights,
)

__all__ = ["FAMILIES", "describe_checkpoint", "load_model", "published", "save_model"]


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
    """Load a checkpoint, in eval mode on the CPU; see docs/reference/checkpoints.md for the families.

    Reads tensors only and refuses a checkpoint that would run code. Weights stored in float64 keep that type;
    others become float32. Pass what neither the checkpoint nor the files beside it record, such as the `task`
    of a published survival model; `head` keeps one of the outputs, such as the log risk. The model's `notes`
    list what was assumed or left out.
    """
    outputs = {"class_names": class_names, "task": task, "reference": reference, "time_bins": time_bins}
    return _load(Path(path), {**outputs, "encoder": encoder}, head)[0]


def save_model(model: MILModel, path: str | PathLike[str]) -> None:
    """Write a model as safetensors with its spec in the header; `load_model` reads it back.

    An existing folder, or a name that ends with a slash, gets `config.json`, `model.safetensors` and a
    card, `README.md`.
    """
    from safetensors.torch import save

    if not isinstance(model, MILModel) or not hasattr(model, "spec"):
        raise CheckpointError(
            f"save_model takes a model from create_model or load_model, not {type(model).__name__}."
        )
    if os.fspath(path).endswith(("/", os.sep)) or Path(path).is_dir():
        write_config(model, Path(path))
        path = Path(path) / WEIGHTS
    if Path(path).suffix != ".safetensors":
        raise CheckpointError(f"{path}: save_model writes safetensors; end the name in .safetensors.")
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    header = {SPEC_KEY: json.dumps(asdict(model.spec))}
    if model.background is not None:
        state |= {key: torch.from_numpy(getattr(model.background, name)) for name, key in BACKGROUND.items()}
        header[BACKGROUND_KEY] = json.dumps({"n": model.background.n})
    content = save(state, metadata=header)  # bytes first: a full disk then raises a plain OSError
    write_bytes(path, content)


def describe_checkpoint(path: str | PathLike[str]) -> dict[str, Any]:
    """Describe a checkpoint: family, model, sizes, parameters, and what was assumed or ignored."""
    model, family = _load(Path(path), {}, None)
    spec = asdict(model.spec)
    weights = sum(parameter.numel() for parameter in model.parameters())
    background = None if model.background is None else model.background.title
    facts = {"path": str(path), "family": family, **spec, "weights": weights, "background": background}
    notes = [note for note in model.notes if note not in model.warnings]
    return {**facts, "notes": notes, "warnings": list(model.warnings)}


def _load(path: Path, options: Mapping[str, Any], head: int | None) -> tuple[MILModel, str]:
    weights = read_weights(path)
    overrides = {name: value for name, value in options.items() if value is not None}
    try:
        family, converted, outputs = _recognise(weights, overrides)
        if head is not None:
            converted = one_output(converted, head)
            outputs = {k: v for k, v in outputs.items() if k not in ("class_names", "time_bins")}
        with limit_size(converted.state):
            sizes = {"in_dim": converted.in_dim, "n_classes": converted.n_classes}
            own = {"name": converted.model, **sizes, "params": converted.params}
            model = build(ModelSpec(**{**own, **outputs, **overrides}))
    except XmilError as error:
        raise CheckpointError(f"{weights.path}: {error}") from None
    except (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError) as error:
        reason = " ".join(repr(error).split())[:300]
        raise CheckpointError(f"{weights.path}: the shapes of its weights do not match ({reason}).") from None
    _fill(model, converted, weights.path)
    model.background = weights.background
    if "task" not in {**outputs, **overrides}:
        model.warnings = (
            f"The {model.n_classes} outputs of the checkpoint are taken as classification: neither it nor "
            "the files beside it state a task; in Python, load_model(path, task=...) sets it.",
        )
    model.notes = (*converted.notes, *weights.notes, *model.warnings)
    return model, family


def _recognise(weights: StoredWeights, overrides: Mapping[str, Any]) -> tuple[str, Converted, dict[str, Any]]:
    """Find the family, convert, and read the outputs' meaning from the checkpoint and files beside it."""
    if weights.spec is not None:
        spec = dict(vars(ModelSpec(**weights.spec)))
        name, in_dim, n_classes = (spec.pop(key) for key in ("name", "in_dim", "n_classes"))
        return "xmil", Converted(name, in_dim, n_classes, spec.pop("params"), dict(weights.state)), spec
    family, state, notes = _find_family(weights)
    converted = family.convert(state, weights.settings)
    converted = replace(converted, notes=[*converted.notes, *notes])
    names = weights.settings.get("class_names")
    fields: dict[str, Any] = {"class_names": names} if isinstance(names, list | tuple) else {}
    fields |= features_beside(weights.path, weights.settings)
    task = overrides.get("task")
    try:
        beside = outputs_beside(weights.path.parent, weights.settings, converted.n_classes)
    except CheckpointError:
        if task is None:
            raise
        beside = {}
    fields |= beside if task in (None, beside.get("task")) else {}
    return family.name, converted, {**fields, **converted.spec}


NEAREST = 3  # families that the error names if none fits


def _find_family(weights: StoredWeights) -> tuple[Family, dict[str, Tensor], list[str]]:
    """Find the family, its keys without prefixes, and a note on the keys left out."""
    stored = weights.state
    for network in KNOWN:
        if network.fits(stored):
            raise CheckpointError(network.advice())
    for prefix in ("", *PREFIXES):
        state, others = under_prefix(stored, prefix)
        for name in FAMILIES:
            if not FAMILIES[name].missing(state):
                note = f"dropped {shorten(others, 6)}: not under the model's prefix {prefix!r}"
                return FAMILIES[name], state, [note] if others else []
    if (advice := stamp_advice(weights.settings)) is not None:
        raise CheckpointError(advice)
    state, _ = under_prefix(stored, "")
    keys = ", ".join(list(state)[:6]) + (", ..." if len(state) > 6 else "")
    lacking = {name: FAMILIES[name].missing(state) for name in FAMILIES}
    nearest = sorted(lacking, key=lambda name: len(lacking[name]) / len(FAMILIES[name].needs))[:NEAREST]
    tried = "; ".join(f"{name} lacks {lacking[name][0]}" for name in nearest)
    raise CheckpointError(
        f"of an unknown family. Keys: {keys}. Tried: {tried.replace(chr(92), '')}; and "
        f"{len(lacking) - NEAREST} more. For your own network, name a function that builds it and loads the "
        "weights: `model=FILE.py:FUNCTION`."
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
    faults = [("missing", missing), ("unexpected", extra), ("of the wrong shape", shapes)]
    if any(keys for _, keys in faults):
        listing = "; ".join(f"{fault}: {', '.join(keys)}" for fault, keys in faults if keys)
        raise CheckpointError(f"{path}: the keys do not match {converted.model}. {listing}.")
    if {value.dtype for value in converted.state.values() if value.is_floating_point()} == {torch.float64}:
        model.double()
    model.load_state_dict(converted.state)


def one_output(converted: Converted, head: int) -> Converted:
    """Reduce a conversion to the output `head`, such as the log risk beside an unused second output."""
    if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < converted.n_classes:
        raise bad_parameter("head", "load_model", f"an int in the range [0, {converted.n_classes})", head)
    layer = MODELS[converted.model].last_layer
    if layer is None:
        raise CheckpointError(
            f"the outputs of {converted.model} do not come from one linear layer; leave out `head=`."
        )
    state = dict(converted.state)
    for key in (f"{layer}.weight", f"{layer}.bias"):
        if key in state:
            state[key] = state[key][head : head + 1]
    notes = [*converted.notes, f"kept output {head} of {converted.n_classes}"]
    return replace(converted, n_classes=1, state=state, notes=notes)


_WIDER = 4  # weights stored in 8 or 16 bits become float32
_SLACK = 1 << 20


@contextmanager
def limit_size(state: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise as soon as a model under construction has more parameters than the stored weights fill."""
    room = _SLACK + _WIDER * sum(value.numel() * value.element_size() for value in state.values())
    most, thread = 64 + 4 * len(state), threading.get_ident()
    n_bytes = n_parameters = 0

    def count(_module: Any, _name: str, parameter: Tensor | None) -> None:
        nonlocal n_bytes, n_parameters
        if threading.get_ident() != thread or parameter is None:
            return
        n_bytes += parameter.numel() * parameter.element_size()
        n_parameters += 1
        if n_bytes > room or n_parameters > most:
            raise CheckpointError("its settings describe a larger model than the stored weights can fill.")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


def write_config(model: MILModel, folder: Path) -> None:
    """Write the settings and the card beside the weights; keep an existing card."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(not_made(folder, error, "name")) from None
    spec = model.spec
    config = {
        "model_type": spec.name,
        "library_name": "xmil",
        "xmil_version": __version__,
        "id2label": {str(i): name for i, name in enumerate(spec.names)},
        "label2id": {name: i for i, name in enumerate(spec.names)},
        SPEC_KEY: asdict(spec),
    }
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    if not (folder / CARD).exists():
        write_text(folder / CARD, card(model))


def card(model: MILModel) -> str:
    """A model card to complete: what the model is and how to load it."""
    spec = model.spec
    weights = sum(parameter.numel() for parameter in model.parameters())
    facts = {
        "architecture": spec.name,
        "task": spec.task,
        "outputs": ", ".join(spec.names),
        "features": f"{spec.in_dim} per patch" + (f", of {spec.encoder}" if spec.encoder else ""),
        "weights": f"{weights:,}",
    }
    return (
        "---\nlibrary_name: xmil\ntags:\n- multiple-instance-learning\n- pathology\n---\n\n"
        f"# {spec.name} for {spec.task}\n\n{markdown_table(['', ''], list(facts.items()))}\n\n"
        '```python\nimport xmil\n\nmodel = xmil.load_model("this folder")\n'
        'explanation = xmil.explain(model, "slide.h5")\n```\n\n'
        "Not recorded here: the cohort it was trained on, its results, its limits, its licence.\n"
    )
