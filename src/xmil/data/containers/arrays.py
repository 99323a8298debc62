"""NumPy files: `.npy` by memory map, `.npz` member by member, never a pickle."""

from __future__ import annotations

import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import FloatArray
from xmil.core.budget import array_header
from xmil.core.errors import FileError
from xmil.core.pickles import check_torch_file
from xmil.data.containers.container import (
    ArrayInfo,
    Contents,
    Index,
    Rows,
    array_rows,
    check_memory,
    check_stored,
    readable,
    take_rows,
)

ARRAY = "array"  # our name of the array in a `.npy`
_NUMPY = "NumPy file"


class NpyContents(Contents):
    """The one array of a `.npy` file."""

    kind = "npy"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with readable(path, _NUMPY), open(path, "rb") as stream:
            info = _header(stream, ARRAY, path)
            check_stored(
                info.nbytes, path.stat().st_size - stream.tell(), packed=False, name=ARRAY, path=path
            )
        self.arrays = {ARRAY: info}

    def _read(self, name: str) -> npt.NDArray[Any]:  # noqa: ARG002 - there is one array
        with readable(self.path, _NUMPY):
            return np.asarray(np.load(self.path, allow_pickle=False))

    def _rows(self, name: str, shape: tuple[int, int]) -> Rows:
        return Rows(shape, self.arrays[name].dtype, partial(self._read_rows, shape))

    def _read_rows(self, shape: tuple[int, int], index: Index | None) -> FloatArray:
        """Read rows by a memory map, opened for each read."""
        with readable(self.path, _NUMPY):
            array = np.load(self.path, mmap_mode="r" if shape[0] else None, allow_pickle=False)
            return take_rows(array.reshape(shape), index)


class NpzContents(Contents):
    """The arrays of a `.npz`; opening it reads only their headers."""

    kind = "npz"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with readable(path, _NUMPY), zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.endswith(".npy"):
                    name, packed = member.filename, member.compress_type != zipfile.ZIP_STORED
                    stored = min(member.compress_size, path.stat().st_size)
                    check_stored(member.file_size, stored, packed=packed, name=name, path=path)
                    with archive.open(member) as stream:
                        info = _header(stream, name, path)
                    check_stored(info.nbytes, member.file_size, packed=False, name=name, path=path)
                    self.arrays[name[:-4]] = info

    def _read(self, name: str) -> npt.NDArray[Any]:
        check_memory(self.arrays[name].nbytes, name, self.path)
        with readable(self.path, _NUMPY), np.load(self.path, allow_pickle=False) as archive:
            return np.asarray(archive[name])

    def _rows(self, name: str, shape: tuple[int, int]) -> Rows:
        return Rows(shape, self.arrays[name].dtype, partial(self._read_member, name, shape))

    def _read_member(self, name: str, shape: tuple[int, int], index: Index | None) -> FloatArray:
        return take_rows(self._read(name).reshape(shape), index)

    def stacked(self, names: list[str]) -> Rows:
        """One row per member: the named vectors, in that order."""
        widths = {int(np.prod(self.arrays[name].shape, dtype=object)) for name in names}
        if len(widths) != 1:
            raise FileError(
                f"{self.path}: its vectors must have one width. Got {sorted(widths)[:8]} instead."
            )
        shape = (len(names), widths.pop())
        check_memory(shape[0] * shape[1] * 4, "the bag", self.path)
        return Rows(shape, self.arrays[names[0]].dtype, partial(self._read_vectors, names, shape[1]))

    def _read_vectors(self, names: list[str], width: int, index: Index | None) -> FloatArray:
        chosen = names if index is None else [names[i] for i in index]
        out = np.empty((len(chosen), width), np.float32)
        with readable(self.path, _NUMPY), np.load(self.path, allow_pickle=False) as archive:
            for row, name in enumerate(chosen):
                out[row] = archive[name].reshape(-1)
        return out


def _header(stream: IO[bytes], name: str, path: Path) -> ArrayInfo:
    shape, dtype = array_header(stream)
    if dtype.hasobject:
        raise FileError(f"{path}: {name!r} is refused: it holds Python objects, which could run code.")
    if any(length < 0 for length in shape):
        raise FileError(f"{path}: {name!r} declares the impossible shape {shape}; the file is damaged.")
    return ArrayInfo(shape, dtype)


TENSOR = "tensor"  # our name of a bare tensor


class TorchContents(Contents):
    """A tensor, a NumPy array, or a flat dict of them, memory-mapped if the file allows."""

    kind = "pt"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        loaded = load(path)
        if isinstance(loaded, list | tuple) and loaded and all(hasattr(value, "shape") for value in loaded):
            loaded = {f"{TENSOR}{i}": value for i, value in enumerate(loaded)}
        named = loaded if isinstance(loaded, dict) else {TENSOR: loaded}
        self._tensors = {
            str(name): _numpy(value, str(name), path)
            for name, value in named.items()
            if hasattr(value, "shape")
        }
        self.arrays = {name: ArrayInfo(a.shape, a.dtype) for name, a in self._tensors.items()}

    def _read(self, name: str) -> npt.NDArray[Any]:
        return np.array(self._tensors[name])

    def _rows(self, name: str, shape: tuple[int, int]) -> Rows:
        return array_rows(self._tensors[name].reshape(shape))


def load(path: Path) -> Any:
    """Load a torch file by torch's restricted unpickler."""
    import torch
    from numpy._core.multiarray import _reconstruct, scalar

    with open(path, "rb") as stream:
        zipped = stream.read(2) == b"PK"
    if zipped:
        _check_zip(path)
    check_torch_file(path)
    # what unpickling a plain NumPy array needs (TRIDENT's `.pt` mode stores one)
    homes = [f"numpy.{home}.multiarray" for home in ("core", "_core")]
    named = [(each, f"{home}.{each.__name__}") for home in homes for each in (_reconstruct, scalar)]
    kinds = [np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64, np.uint8, np.bool_]
    safe: list[Any] = [*named, np.ndarray, np.dtype, *[type(np.dtype(kind)) for kind in kinds]]
    with readable(path, "torch file"), warnings.catch_warnings(), torch.serialization.safe_globals(safe):
        warnings.simplefilter("ignore")
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        except Exception as error:
            signs = ("unsupported global", "weights_only", "unsupported operand")
            if not any(sign in str(error).lower() for sign in signs):
                raise
            raise FileError(
                f"{path}: refused, it holds other Python objects than tensors, which could run code; save "
                "only the tensor with torch.save."
            ) from None


def _check_zip(path: Path) -> None:
    """Refuse a zip with compressed or overlong members, which torch never writes."""
    with readable(path, "torch file"), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise FileError(f"{path}: refused, it is a compressed zip, which torch does not write.")
    total = sum(member.file_size for member in members)
    check_stored(total, path.stat().st_size, packed=False, name="the archive", path=path)


def _numpy(value: Any, name: str, path: Path) -> npt.NDArray[Any]:
    """View a tensor as an array; refuse expanded or sparse ones, which declare more than they store."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            raise FileError(f"{path}: {name!r} must be a dense tensor. Got layout {value.layout} instead.")
    else:
        value = np.asarray(value)
    check_stored(value.nbytes, path.stat().st_size, packed=False, name=name, path=path)
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.float() if value.dtype == torch.bfloat16 else value
    return np.asarray(value.detach().resolve_conj().resolve_neg().numpy())
