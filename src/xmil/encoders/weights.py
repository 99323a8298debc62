"""State dicts from files and downloads; pickles are never run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xmil.core.errors import CheckpointError, FileError

WRAPPERS = ("model", "state_dict", "model_state_dict", "teacher", "module")
PREFIXES = ("module.", "model.", "backbone.", "encoder.")


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a weights file, out of their wrapping and without a prefix all of them share."""
    if not path.is_file():
        raise FileError(f"{path}: no such file.")
    state = _loaded(path)
    while (inner := _inner(state)) is not None:
        state = inner
    tensors = {str(key): value for key, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{path}: holds no weights; give a state dict.")
    return _without_prefix(tensors)


def download_state(name: str, url: str) -> dict[str, Tensor]:
    """The published weights, from torch's cache or by download; their hash is checked."""
    try:
        state: dict[str, Tensor] = torch.hub.load_state_dict_from_url(
            url, map_location="cpu", check_hash=True, progress=False, weights_only=True
        )
    except Exception as error:  # network, hash, disk
        reason = " ".join(str(error).split())
        raise FileError(
            f"The weights of {name} cannot be downloaded ({reason}); get {url} elsewhere and pass --weights."
        ) from None
    return state


def file_digest(path: Path) -> str:
    """The first 16 hexadecimal digits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _loaded(path: Path) -> Mapping[str, Any]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged archives raise almost any type
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: not readable as weights ({reason}).") from None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: holds {type(found).__name__}, not a state dict.")
    return found


def _inner(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((state[key] for key in WRAPPERS if isinstance(state.get(key), Mapping)), None)


def _without_prefix(state: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in PREFIXES:
        if all(key.startswith(prefix) for key in state):
            return _without_prefix({key.removeprefix(prefix): value for key, value in state.items()})
    return state
