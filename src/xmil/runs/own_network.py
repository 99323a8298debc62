"""Networks of the user's in runs over slides: built by `module:function`, tried out on one bag."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from xmil.core.errors import InputError
from xmil.core.named_function import load_function
from xmil.core.task import TASKS
from xmil.data import feature_files, open_bag
from xmil.data.whereabouts import folder_advice
from xmil.methods.declared import declared_names, declared_references
from xmil.methods.opening import open_network
from xmil.models import MILModel
from xmil.models.base import ModelSpec
from xmil.runs.inputs import Unsaid

TRIED = 64  # instances of the bag that a network is tried out on


def build_own(name: str, unsaid: Unsaid) -> MILModel:
    """The network that a function of yours builds, with what a run asks of a model beside it.

    The function takes no arguments and gives a torch module. Its sizes are those of a trial call; `task`,
    `class_names` and the like are attributes of the module, where it has them.
    """
    made = load_function(name, kind="model")()
    if not isinstance(made, nn.Module):
        raise InputError(
            f"The model {name!r} must give a torch.nn.Module. Got {type(made).__name__} instead."
        )
    own = made.eval()
    if isinstance(own, MILModel) and hasattr(own, "spec"):
        return own
    n_classes, in_dim = _sizes(own, name, unsaid)
    task, owner = _task(own), f"the model {name!r}"
    given = unsaid.class_names or getattr(own, "class_names", None)
    names = declared_names(given, n_classes, task=task, owner=owner)
    spec = ModelSpec(type(own).__name__, in_dim, n_classes, class_names=names, task=task)
    if (reference := getattr(own, "reference", None)) is not None and TASKS[task].takes_reference:
        found = declared_references(reference, n_classes, task=task, owner=owner)
        spec = replace(spec, reference=tuple(found))
    held: dict[str, Any] = {"spec": spec, "class_names": names, "task": task, "background": None}
    for key, value in held.items():
        setattr(own, key, value)
    return cast(MILModel, own)  # methods ask for no more than a module and these


def state_digest(model: nn.Module) -> str:
    """A digest of a network's weights: a run goes on only with the same."""
    digest = sha256()
    for key, value in model.state_dict().items():
        array = value.detach().cpu().contiguous()
        digest.update(f"{key} {array.dtype} {tuple(array.shape)}".encode())
        digest.update(array.reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    return digest.hexdigest()


def _sizes(own: nn.Module, name: str, unsaid: Unsaid) -> tuple[int, int]:
    """Outputs and inputs, by a call on a few instances of the first feature file."""
    if unsaid.features is None:
        raise InputError(f"The model {name!r} needs features to be tried out on; give --features.")
    files = feature_files(unsaid.features)[0]
    if not files:
        where = folder_advice(unsaid.features)
        raise InputError(f"{unsaid.features}: no feature files to try the model {name!r} out on; {where}.")
    header = open_bag(files[0], **unsaid.reading)
    bag = header.read(np.arange(min(TRIED, len(header))))
    with torch.no_grad():
        network, x = open_network(own, bag)
        return int(network(x).shape[-1]), int(x.shape[-1])


def _task(own: nn.Module) -> str:
    task = getattr(own, "task", None)
    return task if isinstance(task, str) else "classification"
