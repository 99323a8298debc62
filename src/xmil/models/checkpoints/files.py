"""Read weights from files: tensors only, never a pickle's code."""

from __future__ import annotations

import _compat_pickle
import collections
import io
import math
import os
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmil.core.background import Background
from xmil.core.budget import check_budget, read_arrays
from xmil.core.errors import CheckpointError, FileError, absent, unreadable
from xmil.core.pickles import PurePickle, check_torch_file
from xmil.core.text import parse_json, shorten

SPEC_KEY = "xmil"
HYPER_PARAMETERS = "hyper_parameters"  # Lightning's key for the settings of a model
BACKGROUND_KEY = "xmil_background"  # in the header: the number of patches in the mean
BACKGROUND = {"mean": "xmil_background.mean", "patches": "xmil_background.patches"}  # beside the weights
IN_FOLDER = ("model.safetensors", "best_model.pt", "pytorch_model.bin")
AGAIN = "download or copy it again, or name a file that torch.save or save_model wrote"
_REFUSED = re.compile(r"unsupported\s+(global|class):?\s+(?:GLOBAL\s+)?([\w.]+)", re.IGNORECASE)
_CONTAINERS = ("model_state_dict", "state_dict", "model", "model_state", "net")
_SCALAR: Any = np.float64(0).__reduce__()[0]  # numpy's own reconstructor of scalars
_NUMPY_SCALARS: list[Any] = [
    (_SCALAR, "numpy.core.multiarray.scalar"),
    _SCALAR,
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("f8", "f4", "i8", "i4", "?")),
]


@dataclass(frozen=True)
class StoredWeights:
    """Tensors by key, with the settings stored in or beside their file."""

    path: Path
    state: Mapping[str, Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    background: Background | None = None


def checkpoint_files(path: Path) -> list[Path]:
    """The checkpoints of a path: itself, or the best models of a folder that `xmil train` wrote.

    The folder's best.json is untrusted: it may only name files inside the folder.
    """
    best = path / "best.json"
    if not path.is_dir() or not best.is_file():
        return [path]
    try:
        names = list(parse_json(best.read_text(encoding="utf-8"))["models"])
        if not names:
            raise ValueError("none")
    except (ValueError, OSError, KeyError, TypeError):
        raise CheckpointError(f"{best}: lists no models; name their checkpoints instead.") from None
    for name in names:
        if not isinstance(name, str) or not _is_inside(path, name):
            raise CheckpointError(
                f"{best}: names {str(name)[:200]!r}, which is not a file in its folder; put the models back, "
                "or name their checkpoints instead."
            )
    return [path / name for name in names]


def _is_inside(folder: Path, name: str) -> bool:
    """Whether a name is a file in a folder after all links are resolved."""
    try:
        path = (folder / name).resolve()
        return path.is_relative_to(folder.resolve()) and path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, links in a circle
        return False


def read_weights(path: Path) -> StoredWeights:
    """Read the tensors of a checkpoint file, or of the checkpoint in a folder."""
    if path.is_dir():
        path = in_folder(path)
    if not path.is_file():
        raise CheckpointError(absent(path))
    _check_head(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    content = _load_tensors(path)
    state, notes = _state_dict(content, path)
    try:
        nbytes = sum(value.numel() * value.element_size() for value in state.values())
        check_budget(nbytes, "the weights", path)
    except FileError as error:
        raise CheckpointError(str(error)) from None
    settings = read_settings(path.parent)
    if isinstance(content, Mapping) and isinstance(content.get(HYPER_PARAMETERS), Mapping):
        settings[HYPER_PARAMETERS] = dict(content[HYPER_PARAMETERS])
    return StoredWeights(path, state, settings, notes=tuple(notes))


def in_folder(folder: Path) -> Path:
    """Find the checkpoint in a model's folder."""
    for name in IN_FOLDER:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(
        f"{folder}: this folder has none of {', '.join(IN_FOLDER)}; name the checkpoint file, or a folder "
        "that `xmil train` wrote."
    )


def _read_safetensors(path: Path) -> StoredWeights:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a mapping
        spec = dict(parse_json(metadata[SPEC_KEY])) if SPEC_KEY in metadata else None
        background = None
        if BACKGROUND_KEY in metadata and set(BACKGROUND.values()) <= state.keys():
            arrays = {name: state.pop(key).float().numpy() for name, key in BACKGROUND.items()}
            background = Background(n=int(parse_json(metadata[BACKGROUND_KEY])["n"]), **arrays)
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        reason = _first_line(error)
        raise CheckpointError(f"{path}: not a readable safetensors file ({reason}); {AGAIN}.") from None
    settings = read_settings(path.parent)
    if spec is None and isinstance(settings.get(SPEC_KEY), Mapping):
        spec = settings[SPEC_KEY]  # from config.json: another tool rewrote the weights
    return StoredWeights(path, state, settings, spec, background=background)


def _load_tensors(path: Path) -> Any:
    """Run `torch.load` on tensors, numbers, containers, and the NumPy scalars of optimisers."""
    try:
        check_torch_file(path)
        with warnings.catch_warnings(), torch.serialization.safe_globals(_NUMPY_SCALARS):
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)  # refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileError as error:
        raise CheckpointError(str(error)) from None
    except pickle.UnpicklingError as error:
        try:  # a Lightning checkpoint, with stubs for the classes it names
            if zipfile.is_zipfile(path) and (content := read_lightning(path)) is not None:
                return content
        except CheckpointError:
            pass  # the error below names what it holds besides tensors
        except FileError as bomb:
            raise CheckpointError(str(bomb)) from None
        match = _REFUSED.search(str(error))
        if match is None and not _starts_as_checkpoint(path):
            raise _damaged(path, error) from None
        reason = f"unsupported {match[1].lower()} {match[2]}" if match else "its pickle holds other objects"
        raise CheckpointError(
            f"{path}: refused, it holds more than tensors and loading it could run code "
            f"({reason}). Save only the model's state_dict() and load that."
        ) from None
    except Exception as error:  # a damaged pickle can fail in any way; none of them may pass as success
        raise _damaged(path, error) from None


def _state_dict(content: Any, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Find the mapping of names to tensors, and note what is left out."""
    if not isinstance(content, Mapping):
        what = type(content).__name__
        raise CheckpointError(f"{path}: holds a {what}, not a state dict; for features use xmil.read_bag.")
    notes = []
    name = next((name for name in _CONTAINERS if isinstance(content.get(name), Mapping)), None)
    if name is not None:
        groups = {str(key): values for key, values in content.items() if isinstance(values, Mapping)}
        others = [
            key
            for key, values in groups.items()
            if key != name and values and all(isinstance(value, Tensor) for value in values.values())
        ]
        if others:
            notes = [f"left out {shorten(others, 6)}: other weights than {name!r}"]
        content = content[name]
    state = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if not state:
        raise CheckpointError(
            f"{path}: holds no tensors; keys: {', '.join(map(str, list(content)[:8])) or 'none'}."
        )
    foreign = [str(key) for key in content if str(key) not in state]
    return state, notes + ([f"left out {shorten(foreign, 6)}: not tensors"] if foreign else [])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _check_head(path: Path) -> None:
    """Refuse files that cannot be opened, are empty, or hold safetensors under another suffix."""
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
        raise CheckpointError(f"{path}: holds safetensors; rename it to end in .safetensors.")


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    """The error for a file that does not load: a damaged checkpoint, or another kind of file."""
    if _starts_as_checkpoint(path):
        line = _first_line(error)
        reason = line if " " in line else f"{type(error).__name__} {line}"
        return CheckpointError(f"{path}: truncated or not a checkpoint ({reason}); {AGAIN}.")
    with path.open("rb") as file:  # often a web page, or a Git LFS pointer
        line = file.read(60).split(b"\n")[0].decode("ascii", "replace").strip()
    is_text = line and line.isprintable() and line.isascii()
    start = f"it starts with {line!r}" if is_text else "it has another file signature"
    return CheckpointError(f"{path}: not a checkpoint ({start}); {AGAIN}.")


def _starts_as_checkpoint(path: Path) -> bool:
    """Whether the file starts like a zip or a pickle, which could both hold code."""
    with path.open("rb") as file:
        head = file.read(2)
    return head[:1] == b"\x80" or head == b"PK" or zipfile.is_zipfile(path)


MARKS = ("state_dict", "pytorch-lightning_version")
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
HARMLESS = {
    "collections": {"OrderedDict", "defaultdict", "deque", "Counter"},
    "builtins": {"set", "frozenset", "slice", "range", "complex", "bytearray", "list", "dict", "tuple"},
    "pathlib": {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "datetime": {"datetime", "date", "time", "timedelta", "timezone"},
    "_codecs": {"encode"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "uuid": {"UUID"},
    "copyreg": {"_reconstructor"},
}  # from the standard library: replaced by stubs too, but not refused


class Stub:
    """Placeholder for an object of an unknown class; ignores all calls of a pickle."""

    def ignore(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    __init__ = __setstate__ = __setitem__ = append = extend = add = ignore


def read_lightning(path: Path) -> dict[str, Any] | None:
    """Read a Lightning checkpoint with stubs for foreign objects; None for any other file."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(names) != 1 or any(i.compress_type != zipfile.ZIP_STORED for i in archive.infolist()):
                return None  # torch.save never compresses
            content = _Reader(archive, names[0].removesuffix("data.pkl"), path).load()
    except FileError:
        raise
    except Exception as error:  # a crafted pickle can fail in any way; none of them may pass as success
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}).") from None
    is_lightning = isinstance(content, Mapping) and all(mark in content for mark in MARKS)
    return dict(content) if is_lightning else None


class _Reader(PurePickle):
    """Unpickles `data.pkl` of a zip that `torch.save` wrote."""

    def __init__(self, archive: zipfile.ZipFile, folder: str, path: Path) -> None:
        super().__init__(io.BytesIO(archive.read(f"{folder}data.pkl")), encoding="utf-8")
        self._archive, self._folder, self._path, self._total = archive, folder, path, 0
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Resolve tensors and ordered dictionaries; replace other classes by stubs, or refuse them."""
        if module == "torch._utils" and name in _REBUILD:
            return (lambda data, *_: data) if name == "_rebuild_parameter" else self._tensor
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        renamed = _compat_pickle.IMPORT_MAPPING.get(module, module), name  # names from Python 2
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), renamed)
        root = module.partition(".")[0]
        if root in sys.stdlib_module_names and name.partition(".")[0] not in HARMLESS.get(module, set()):
            raise CheckpointError(
                f"refused, it names {module}.{name}, which settings do not need and which could run code."
            )
        return type(name.rpartition(".")[2] or "Stub", (Stub,), {})

    def persistent_load(self, pid: Any) -> Tensor:
        """Read a storage as a flat tensor."""
        kind, key = pid[1], str(pid[2])
        dtype = kind if isinstance(kind, torch.dtype) else torch.uint8
        if key not in self._storages:
            data = bytearray(self._archive.read(f"{self._folder}data/{key}"))
            empty = torch.empty(0, dtype=dtype)
            self._storages[key] = torch.frombuffer(data, dtype=dtype) if data else empty
        return self._storages[key]

    def _tensor(self, storage: Tensor, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
        """Copy a view of a storage; torch refuses views that exceed it.

        Views may share memory that copies do not, so the budget counts every copy first.
        """
        view = storage.as_strided(tuple(size), tuple(stride), int(offset))
        self._total += view.numel() * view.element_size()
        check_budget(self._total, "the weights", self._path)
        return view.clone()


_REBUILD = ("_rebuild_tensor_v2", "_rebuild_tensor", "_rebuild_parameter")

SETTINGS = ("args.json", "config.json")  # xMIL's and MIL-Lab's
REFERENCE, BINS = "ref_value.json", "survival_bins.npy"  # for a regression, for a survival model
HEAD_TYPES = ("classification", "regression", "survival")


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings that xMIL (args.json) or MIL-Lab (config.json) wrote beside the weights."""
    for name in SETTINGS:
        if _is_beside(folder / name):
            settings = _json(folder / name)
            return dict(settings) if isinstance(settings, Mapping) else {}
    return {}


def _is_beside(path: Path) -> bool:
    """Whether a side file is there; one that leads nowhere is not the same as none."""
    if not path.is_file() and os.path.lexists(path):
        raise CheckpointError(
            f"{path.name} beside it is a broken link, a pipe or a folder; put the file there or remove it."
        )
    return path.is_file()


def outputs_beside(folder: Path, settings: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
    """Read the meaning of the outputs from the files in a folder, as fields of a `ModelSpec`, if any.

    The paper's settings have no `head_type`: they belong to a classifier.
    """
    task = _task(folder, settings)
    if task == "regression":
        return {"task": task, "reference": _reference(folder, settings), "relative": True}
    if task == "survival":
        return {"task": task, "time_bins": _time_bins(folder, n_outputs)}
    return {} if task is None else {"task": task}


ENCODER_KEYS = ("encoder", "patch_encoder", "encoder_name", "extractor", "feature_extractor")
_MIL_LAB = re.compile(r"\.base\.([A-Za-z0-9_-]+)\.")  # abmil.base.uni_v2.pc108-24k


def features_beside(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Find the training features in a checkpoint's settings, or in MIL-Lab's name for it.

    >>> features_beside(Path("abmil.base.uni_v2.pc108-24k/model.safetensors"), {"tile_size_px": 224})
    {'encoder': 'uni_v2', 'features': {'patch_px': 224}}
    """
    merged: dict[str, Any] = {**settings, **(settings.get(HYPER_PARAMETERS) or {})}
    encoder = next((merged[key] for key in ENCODER_KEYS if isinstance(merged.get(key), str)), None)
    match = _MIL_LAB.search(str(path))
    encoder = encoder or (match[1] if match else None)
    px, um, mpp = (_positive(merged.get(key)) for key in ("tile_size_px", "tile_size_um", "mpp"))
    mpp = mpp or (round(um / px, 4) if um and px else None)
    features = {"patch_px": None if px is None else int(px), "mpp": mpp}
    features = {name: value for name, value in features.items() if value is not None}
    fields = {"encoder": encoder, "features": features}
    return {name: value for name, value in fields.items() if value}


def _positive(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 < value < math.inf else None


def _task(folder: Path, settings: Mapping[str, Any]) -> str | None:
    files = {"regression": REFERENCE, "survival": BINS}
    beside = {task: name for task, name in files.items() if _is_beside(folder / name)}
    head_type = settings.get("head_type")
    if head_type not in (None, *HEAD_TYPES):
        types = ", ".join(HEAD_TYPES)
        raise CheckpointError(f"args.json has the head_type {head_type!r}, not one of {types}; pass `task=`.")
    tasks = {*beside, head_type} - {None}
    if len(tasks) > 1:
        stated = f"head_type {head_type!r}" if head_type is not None else "no head_type"
        raise CheckpointError(
            f"the files beside it contradict each other: {stated} in args.json, and "
            f"{' and '.join(beside.values())}; pass `task=`."
        )
    if tasks:
        return str(tasks.pop())
    return "classification" if "aggregation_model" in settings else None


def _reference(folder: Path, settings: Mapping[str, Any]) -> float | tuple[float, ...] | None:
    """Read the value that the outputs are deviations from."""
    path = folder / REFERENCE
    stored = _json(path) if _is_beside(path) else settings.get("ref_value")
    if stored is None:
        return None
    values = stored if isinstance(stored, list) else [stored]
    if not values or not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        raise CheckpointError(f"{path.name} beside it holds {stored!r}, not a number; pass `reference=`.")
    return tuple(map(float, values)) if isinstance(stored, list) else float(stored)


def _time_bins(folder: Path, n_outputs: int) -> tuple[float, ...] | None:
    """Read the times between the bins: the stored edges without the first and the last."""
    path = folder / BINS
    if not _is_beside(path):
        return None
    try:
        edges = read_arrays(path)[""]
    except (OSError, LookupError, ValueError, FileError) as error:
        raise CheckpointError(
            f"{BINS} beside it is not an array of numbers ({_first_line(error)}); pass `time_bins=`."
        ) from None
    if not isinstance(edges, np.ndarray) or edges.dtype.kind not in "fiu" or edges.shape != (n_outputs + 1,):
        shape = getattr(edges, "shape", None)
        raise CheckpointError(
            f"{BINS} beside it has the shape {shape}, not {n_outputs + 1} edges of {n_outputs} bins; "
            "pass `time_bins=`."
        )
    return tuple(float(edge) for edge in edges[1:-1])


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable JSON ({_first_line(error)}).") from None
