"""Torch files: tensors by memory map, `weights_only` always, nothing that could run code."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import FileError
from xmil.core.pickles import check_torch_file
from xmil.data.containers.container import ArrayInfo, ArrayRows, Contents, Rows, check_stored

TENSOR = "tensor"  # the name of a bare tensor, which has none of its own


class TorchContents(Contents):
    """A tensor, a NumPy array, or a flat dict of them, memory-mapped where the file allows."""

    kind = "pt"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._tensors = {name: _numpy(value, name, path) for name, value in _flat(load(path)).items()}
        self.arrays = {name: ArrayInfo(a.shape, a.dtype) for name, a in self._tensors.items()}

    def _read(self, name: str) -> npt.NDArray[Any]:
        return np.array(self._tensors[name])

    def _rows(self, name: str, shape: tuple[int, int]) -> Rows:
        return ArrayRows(self._tensors[name].reshape(shape))


def load(path: Path) -> Any:
    """What a torch file holds, by torch's restricted unpickler."""
    import torch

    with open(path, "rb") as stream:
        zipped = stream.read(2) == b"PK"
    if zipped:
        _check_zip(path)
    check_torch_file(path)
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_safe_globals()):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except MemoryError:
        raise FileError(f"{path}: declares more data than memory can hold; it is damaged.") from None
    except Exception as error:  # the unpickler raises any type on damaged or foreign input
        raise FileError(f"{path}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    text = str(error)
    if "Unsupported global" in text or "weights_only" in text.lower() or "Unsupported operand" in text:
        return (
            "holds Python objects beyond tensors, which could run code, and is not loaded; "
            "save the tensor alone with torch.save."
        )
    first = text.splitlines()[0] if text else type(error).__name__
    return f"not a readable torch file ({first[:200]}); write or copy it again."


def _check_zip(path: Path) -> None:
    """Torch stores its zip members plain; packed or overlong ones are not torch's."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise FileError(f"{path}: not a readable torch file ({error}); write or copy it again.") from None
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise FileError(f"{path}: a packed zip, which torch does not write; it is not loaded.")
    total = sum(member.file_size for member in members)
    check_stored(total, path.stat().st_size, packed=False, name="the archive", path=path)


def _safe_globals() -> list[Any]:
    """What unpickling a plain NumPy array needs (TRIDENT's `.pt` mode stores one)."""
    from numpy._core.multiarray import _reconstruct, scalar

    kinds = [np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64, np.uint8, np.bool_]
    named = [(_reconstruct, f"numpy.{home}.multiarray._reconstruct") for home in ("core", "_core")]
    named += [(scalar, f"numpy.{home}.multiarray.scalar") for home in ("core", "_core")]
    return [*named, np.ndarray, np.dtype, *[type(np.dtype(kind)) for kind in kinds]]


def _flat(loaded: Any) -> dict[str, Any]:
    if isinstance(loaded, dict):
        return {str(key): value for key, value in loaded.items() if hasattr(value, "shape")}
    if isinstance(loaded, list | tuple) and loaded and all(hasattr(value, "shape") for value in loaded):
        return {f"{TENSOR}{i}": value for i, value in enumerate(loaded)}
    return {TENSOR: loaded} if hasattr(loaded, "shape") else {}


def _numpy(value: Any, name: str, path: Path) -> npt.NDArray[Any]:
    """The tensor as an array without copying; expanded or sparse ones declare more than they store."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            raise FileError(f"{path}: {name!r} must be a dense tensor. Got layout {value.layout} instead.")
        nbytes = value.numel() * value.element_size()
        check_stored(nbytes, path.stat().st_size, packed=False, name=name, path=path)
        if value.dtype == torch.bfloat16:
            value = value.float()
        return np.asarray(value.detach().resolve_conj().resolve_neg().numpy())
    array = np.asarray(value)
    check_stored(array.nbytes, path.stat().st_size, packed=False, name=name, path=path)
    return array
