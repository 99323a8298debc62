"""A model as a folder, laid out as model hubs expect it: config.json, model.safetensors and a card."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from xmil._version import __version__
from xmil.core.absence import not_made
from xmil.core.errors import CheckpointError
from xmil.core.storage import write_text
from xmil.models.base import MILModel, ModelSpec
from xmil.models.checkpoints.files import SPEC_KEY

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


def is_folder_name(path: str | PathLike[str]) -> bool:
    """Whether a path names a folder to write: one that is there, or a name that ends with a slash.

    >>> is_folder_name("hub/my-model/"), is_folder_name("hub/my-model"), is_folder_name("model.pt")
    (True, False, False)
    """
    return os.fspath(path).endswith(("/", os.sep)) or Path(path).is_dir()


def write_config(model: MILModel, folder: Path) -> None:
    """The settings and the card beside the weights; a card that is there is left alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(not_made(folder, error, "name")) from None
    write_text(folder / CONFIG, json.dumps(config(model.spec), indent=2) + "\n")
    if not (folder / CARD).exists():
        write_text(folder / CARD, card(model))


def config(spec: ModelSpec) -> dict[str, Any]:
    """What config.json says: the spec, and what hubs look for."""
    names = spec.names
    return {
        "model_type": spec.name,
        "library_name": "xmil",
        "xmil_version": __version__,
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        SPEC_KEY: asdict(spec),
    }


def card(model: MILModel) -> str:
    """A card to be completed: what the model is and how it is loaded."""
    spec = model.spec
    weights = sum(parameter.numel() for parameter in model.parameters())
    facts = {
        "architecture": spec.name,
        "task": spec.task,
        "outputs": ", ".join(spec.names),
        "features": f"{spec.in_dim} per patch" + (f", of {spec.encoder}" if spec.encoder else ""),
        "weights": f"{weights:,}",
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return (
        "---\nlibrary_name: xmil\ntags:\n- multiple-instance-learning\n- pathology\n---\n\n"
        f"# {spec.name} for {spec.task}\n\n| | |\n|---|---|\n{rows}\n\n"
        '```python\nimport xmil\n\nmodel = xmil.load_model("this folder")\n'
        'explanation = xmil.explain(model, "slide.h5")\n```\n\n'
        "Not said here: the cohort it was trained on, its results, its limits, its licence.\n"
    )
