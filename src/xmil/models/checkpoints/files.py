"""Reading weights from files: tensors only, never a pickle's code."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmil.core.absence import absent, unreadable
from xmil.core.background import Background
from xmil.core.budget import check_budget
from xmil.core.errors import CheckpointError, FileError
from xmil.core.parsing import parse_json
from xmil.core.pickles import check_torch_file
from xmil.models.checkpoints.side_files import read_settings
from xmil.models.checkpoints.stubs import read_lightning

SPEC_KEY = "xmil"
HYPER_PARAMETERS = "hyper_parameters"  # where Lightning keeps the settings of a model
BACKGROUND_KEY = "xmil_background"  # in the header: how many patches the mean is over
BACKGROUND = {
    "mean": "xmil_background.mean",
    "patches": "xmil_background.patches",
}  # tensors beside the weights
IN_FOLDER = ("model.safetensors", "best_model.pt", "pytorch_model.bin")
AGAIN = "download or copy it again, or give what torch.save or save_model wrote"
UNKNOWN = "its pickle is not one of tensors"
_REFUSED = re.compile(r"unsupported\s+(global|class):?\s+(?:GLOBAL\s+)?([\w.]+)", re.IGNORECASE)
_CONTAINERS = ("model_state_dict", "state_dict", "model", "model_state", "net")


@dataclass(frozen=True)
class StoredWeights:
    """Tensors by key, with the settings stored beside or inside their file."""

    path: Path
    state: Mapping[str, Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    background: Background | None = None


def checkpoint_files(path: Path) -> list[Path]:
    """The checkpoints a path stands for: itself, or the best models of a folder that `xmil train` wrote."""
    best = path / "best.json"
    if not path.is_dir() or not best.is_file():
        return [path]
    try:
        names = list(parse_json(best.read_text(encoding="utf-8"))["models"])
        return [path / str(name) for name in names]
    except (ValueError, OSError, KeyError, TypeError):
        raise CheckpointError(f"{best}: names no models; name their checkpoints instead.") from None


def read_weights(path: Path) -> StoredWeights:
    """The tensors of a checkpoint file, or of the checkpoint in a folder."""
    if path.is_dir():
        path = in_folder(path)
    if not path.is_file():
        raise CheckpointError(absent(path))
    _check_head(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    content = _load_tensors(path)
    state, notes = _state_dict(content, path)
    _check_state(state, path)
    settings = read_settings(path.parent)
    if isinstance(content, Mapping) and isinstance(content.get(HYPER_PARAMETERS), Mapping):
        settings[HYPER_PARAMETERS] = dict(content[HYPER_PARAMETERS])
    return StoredWeights(path, state, settings, notes=tuple(notes))


def _check_state(state: Mapping[str, Tensor], path: Path) -> None:
    """Views can claim shapes far beyond the stored bytes."""
    try:
        nbytes = sum(value.numel() * value.element_size() for value in state.values())
        check_budget(nbytes, "the weights", path)
    except FileError as error:
        raise CheckpointError(str(error)) from None


def in_folder(folder: Path) -> Path:
    """The checkpoint in a folder of a model."""
    for name in IN_FOLDER:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(
        f"{folder}: a folder without any of {', '.join(IN_FOLDER)}; name the checkpoint file, or a folder of "
        "`xmil train`."
    )


def _read_safetensors(path: Path) -> StoredWeights:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a mapping
        spec = dict(parse_json(metadata[SPEC_KEY])) if SPEC_KEY in metadata else None
        background = _background(state, metadata)
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        told = _first_line(error)
        raise CheckpointError(f"{path}: not a readable safetensors file ({told}); {AGAIN}.") from None
    settings = read_settings(path.parent)
    if spec is None and isinstance(settings.get(SPEC_KEY), Mapping):
        spec = settings[SPEC_KEY]  # the folder's config.json: another tool has written the weights anew
    return StoredWeights(path, state, settings, spec, background=background)


def _background(state: dict[str, Tensor], metadata: Mapping[str, str]) -> Background | None:
    """The background of a model of ours, taken out of the weights."""
    if BACKGROUND_KEY not in metadata or not set(BACKGROUND.values()) <= state.keys():
        return None
    arrays = {name: state.pop(key).float().numpy() for name, key in BACKGROUND.items()}
    return Background(n=int(parse_json(metadata[BACKGROUND_KEY])["n"]), **arrays)


def _load_tensors(path: Path) -> Any:
    """`torch.load` of tensors, numbers and containers; NumPy scalars of optimisers are let through."""
    try:
        check_torch_file(path)
        with warnings.catch_warnings(), torch.serialization.safe_globals(_numpy_scalars()):
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)  # it is refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileError as error:
        raise CheckpointError(str(error)) from None
    except pickle.UnpicklingError as error:
        if zipfile.is_zipfile(path) and (content := _inert(path)) is not None:
            return content
        reason = _reason(error)
        if reason == UNKNOWN and not _begins_as_checkpoint(path):
            raise _damaged(path, error, "") from None
        raise CheckpointError(
            f"{path}: refused, it holds more than tensors and loading it could run code "
            f"({reason}). Save the model's state_dict() alone and load that."
        ) from None
    except (
        RuntimeError,
        OSError,
        EOFError,
        ValueError,
        KeyError,
        AttributeError,
        zipfile.BadZipFile,
    ) as error:
        raise _damaged(path, error, "truncated or not a checkpoint") from None
    except Exception as error:  # a damaged pickle can fail in any way; none of them may pass as success
        raise _damaged(path, error, "damaged") from None


def _inert(path: Path) -> dict[str, Any] | None:
    """A Lightning checkpoint with inert stubs for the classes it names; None for others, and harmful ones."""
    try:
        return read_lightning(path)
    except CheckpointError:
        return None


def _numpy_scalars() -> list[Any]:
    scalar = np.float64(0).__reduce__()[0]  # numpy's own reconstructor of scalars
    kinds = [type(np.dtype(kind)) for kind in ("f8", "f4", "i8", "i4", "?")]
    return [(scalar, "numpy.core.multiarray.scalar"), scalar, np.dtype, *kinds]


def _state_dict(content: Any, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The mapping of names to tensors, wherever the writer put it, and notes on what was left out."""
    if not isinstance(content, Mapping):
        what = type(content).__name__
        raise CheckpointError(f"{path}: holds a {what}, not a state dict; for features use xmil.read_bag.")
    notes = []
    for name in _CONTAINERS:
        if isinstance(content.get(name), Mapping):
            notes = _other_weights(content, name)
            content = content[name]
            break
    state = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if not state:
        raise CheckpointError(
            f"{path}: holds no tensors; keys: {', '.join(map(str, list(content)[:8])) or 'none'}."
        )
    strangers = [str(key) for key in content if str(key) not in state]
    return state, notes + ([f"left out {listed(strangers)}: not tensors"] if strangers else [])


def _other_weights(content: Mapping[Any, Any], chosen: str) -> list[str]:
    """A note on further sets of weights beside the chosen one, such as an average over training."""
    others = [
        str(key)
        for key, value in content.items()
        if key != chosen and isinstance(value, Mapping) and value and _all_tensors(value)
    ]
    return [f"left out {listed(others)}: other weights beside {chosen!r}, which was taken"] if others else []


def _all_tensors(values: Mapping[Any, Any]) -> bool:
    return all(isinstance(value, Tensor) for value in values.values())


def listed(names: list[str], most: int = 6) -> str:
    """Names in one line, the first few of them.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _reason(error: BaseException) -> str:
    """What torch refused, in few words; its advice to load without the check is never passed on."""
    found = _REFUSED.search(str(error))
    return f"unsupported {found[1].lower()} {found[2]}" if found else UNKNOWN


def _check_head(path: Path) -> None:
    """Name what is no torch file at a glance: one that cannot be opened, an empty one, safetensors."""
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from None
    if not head:
        raise CheckpointError(f"{path}: is empty (0 bytes); {AGAIN}.")
    if (
        path.suffix != ".safetensors"
        and head[8:] == b"{"
        and int.from_bytes(head[:8], "little") < path.stat().st_size
    ):
        raise CheckpointError(f"{path}: holds safetensors; rename it so that it ends in .safetensors.")


def _damaged(path: Path, error: BaseException, fault: str) -> CheckpointError:
    """The error for a file that does not load, by how it begins: as a checkpoint, or as something else."""
    if not _begins_as_checkpoint(path):
        return CheckpointError(f"{path}: not a checkpoint ({_beginning(path)}); {AGAIN}.")
    line = _first_line(error)
    told = line if " " in line else f"{type(error).__name__} {line}"
    return CheckpointError(f"{path}: {fault} ({told}); {AGAIN}.")


def _beginning(path: Path) -> str:
    """How a file begins, where that can be read: often it is a web page, or a pointer to the file."""
    with path.open("rb") as file:
        line = file.read(60).split(b"\n")[0].decode("ascii", "replace").strip()
    plain = line and line.isprintable() and line.isascii()
    return f"it begins with {line!r}" if plain else "it does not begin like one"


def _begins_as_checkpoint(path: Path) -> bool:
    """Whether the first bytes are those of a zip or a pickle: both could hold code."""
    with path.open("rb") as file:
        head = file.read(2)
    return head[:1] == b"\x80" or head == b"PK" or zipfile.is_zipfile(path)
