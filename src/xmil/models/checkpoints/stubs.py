"""Lightning checkpoints that hold more than tensors: read without running anything.

Such files pickle classes of the code that wrote them among their settings. Here a class of another package
becomes an inert stub, which takes any arguments and any state and does nothing; a name from Python's own
library, which could do harm if called, is refused. Tensors are made from the stored bytes. Neither
`torch.load` nor any code the file names is run.
"""

from __future__ import annotations

import _compat_pickle
import collections
import io
import pickle
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xmil.core.budget import allowance
from xmil.core.errors import CheckpointError
from xmil.core.pickles import PurePickle

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
}  # of Python's own library: still stubs, but no reason to refuse a file


class Stub:
    """Stands in for an object of an unknown class."""

    def __new__(cls, *_: Any, **__: Any) -> Stub:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Whatever the arguments are, nothing is done with them."""

    def __setstate__(self, _: Any) -> None:
        """Nor with the state."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Nor with items, which dictionaries of unknown classes are given."""

    def append(self, _: Any) -> None:
        """Nor with those of lists."""

    def extend(self, _: Any) -> None:
        """Nor with several."""

    def add(self, _: Any) -> None:
        """Nor with those of sets."""


def read_lightning(path: Path) -> dict[str, Any] | None:
    """The content of a Lightning checkpoint with stubs for foreign objects; None for any other file."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(names) != 1 or any(i.compress_type != zipfile.ZIP_STORED for i in archive.infolist()):
                return None  # torch.save never compresses
            content = _Reader(archive, names[0].removesuffix("data.pkl")).load()
    except CheckpointError:
        raise
    except (zipfile.BadZipFile, OSError, pickle.UnpicklingError, EOFError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}).") from None
    except Exception as error:  # a crafted pickle can fail in any way; none of them may pass as success
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}).") from None
    is_lightning = isinstance(content, Mapping) and all(mark in content for mark in MARKS)
    return dict(content) if is_lightning else None


class _Reader(PurePickle):
    """Unpickles `data.pkl` of a zip that `torch.save` wrote."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{folder}data.pkl")), encoding="utf-8")
        self._archive, self._folder = archive, folder
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Tensors and ordered dictionaries are made; all else is a stub, or refused."""
        if module == "torch._utils" and name in _REBUILD:
            return _REBUILD[name]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return _Kind(STORAGES[name])
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        module, name = _of_today(module, name)
        root = module.partition(".")[0]
        if root in sys.stdlib_module_names and name.partition(".")[0] not in HARMLESS.get(module, set()):
            raise CheckpointError(
                f"refused, it names {module}.{name}, which no settings need and which could run code."
            )
        return type(name.rpartition(".")[2] or "Stub", (Stub,), {})

    def persistent_load(self, pid: Any) -> Tensor:
        """The bytes of a storage as a flat tensor."""
        kind, key = pid[1], str(pid[2])
        dtype = kind.dtype if isinstance(kind, _Kind) else torch.uint8
        if key not in self._storages:
            data = bytearray(self._archive.read(f"{self._folder}data/{key}"))
            empty = torch.empty(0, dtype=dtype)
            self._storages[key] = torch.frombuffer(data, dtype=dtype) if data else empty
        return self._storages[key]


class _Kind:
    """The type of a storage, by name."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _of_today(module: str, name: str) -> tuple[str, str]:
    """The name that Python 3 has for one of Python 2, which older pickles use."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def _tensor(storage: Tensor, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    """A view of a storage; torch refuses one that would reach beyond it."""
    view = storage.as_strided(tuple(size), tuple(stride), int(offset))
    if view.numel() * view.element_size() > allowance(storage.numel() * storage.element_size()):
        raise CheckpointError("a tensor claims far more numbers than are stored.")
    return view.clone()


def _parameter(data: Tensor, *_: Any) -> Tensor:
    return data


_REBUILD: dict[str, Callable[..., Tensor]] = {
    "_rebuild_tensor_v2": _tensor,
    "_rebuild_tensor": _tensor,
    "_rebuild_parameter": _parameter,
}
