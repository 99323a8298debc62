"""HDF5: names, shapes and attributes without features; rows by hyperslab; no links out of the file."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import FloatArray
from xmil.core.errors import FileError
from xmil.data.containers.container import (
    ArrayInfo,
    Contents,
    Empty,
    Index,
    Rows,
    check_chunks,
    check_stored,
    readable,
)
from xmil.data.containers.packing import CHUNK_CACHE, check_hdf5_chunks

FLOATS = (np.dtype("<f2"), np.dtype("<f4"))  # read as stored
_MANY = 64  # no feature file has more names at its root
_GAP = 4  # reading a few unneeded rows is cheaper than another call into HDF5
_SPAN = 8192  # rows per read, to bound memory
Stamp = tuple[int, int]  # time and size of a file


class H5Contents(Contents):
    """The datasets at the root of an HDF5 file, and those one group below (`columns/...`)."""

    kind = "h5"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._faults: dict[str, FileError] = {}
        self._links: list[str] = []
        with _opened(path) as file:
            self.attrs = _attributes(file, path)
            for name in _names(file):
                self._note(file, name)

    def _note(self, file: Any, name: str) -> None:
        node = _node(file, name)
        if _is_group(node):
            inner = [f"{name}/{key}" for key in _names(node)] if "/" not in name else []
            for key in inner:
                self._note(file, key)
        elif node is not None:
            self.arrays[name] = ArrayInfo(tuple(node.shape or ()), node.dtype, _attributes(node, self.path))
            try:
                _dataset(file, name, self.path)
            except FileError as fault:  # raised when the array is read; others may be sound
                self._faults[name] = fault
        else:
            self._links.append(name)

    def describe(self) -> str:
        """The arrays, and the links that are refused."""
        links = f", and links that are not followed: {', '.join(self._links)}" if self._links else ""
        return super().describe() + links

    def _read(self, name: str) -> npt.NDArray[Any]:
        self._check(name)
        with _opened(self.path) as file:
            return np.asarray(file[name][()])

    def _rows(self, name: str, shape: tuple[int, int]) -> Rows:
        self._check(name)
        stamp = _stamp(self.path)  # the dataset is checked again if the file changes after this
        return Rows(
            shape,
            self.arrays[name].dtype,
            partial(self._read_rows, name, shape, stamp),
            partial(self._read_stored, name, shape, stamp),
        )

    def _check(self, name: str) -> None:
        if name in self._faults:
            raise self._faults[name]

    def _read_rows(self, name: str, shape: tuple[int, int], stamp: Stamp, index: Index | None) -> FloatArray:
        """Read rows of a dataset; each read opens the file, so that workers can share the object."""
        with _opened(self.path) as file:
            dataset = self._dataset(file, name, stamp)
            if 0 in shape:
                return np.zeros((shape[0] if index is None else len(index), shape[1]), np.float32)
            if index is not None:
                return _read_rows(dataset, index, path=self.path)
            if dataset.dtype != np.float32:  # NumPy widens half precision many times faster than HDF5
                return np.asarray(dataset[()].astype(np.float32).reshape(shape))
            out = np.empty(dataset.shape, np.float32)
            dataset.read_direct(out)
            return out.reshape(shape)

    def _read_stored(self, name: str, shape: tuple[int, int], stamp: Stamp, empty: Empty) -> npt.NDArray[Any]:
        with _opened(self.path) as file:
            dataset = self._dataset(file, name, stamp)
            offset = dataset.id.get_offset()
            if dataset.dtype not in FLOATS or dataset.ndim != 2 or offset is None or 0 in shape:
                return self._read_rows(name, shape, stamp, None)
        out = empty(shape, dataset.dtype)
        buffer = out.reshape(-1).view(np.uint8).data
        with self.path.open("rb", buffering=0) as stream:  # unlike HDF5, this lets other threads run
            stream.seek(int(offset))
            while buffer:
                count = stream.readinto(buffer)
                if not count:
                    raise FileError(f"{self.path}: truncated within its features; write or copy it again.")
                buffer = buffer[count:]
        return out

    def _dataset(self, file: Any, name: str, stamp: Stamp) -> Any:
        return file[name] if _stamp(self.path) == stamp else _dataset(file, name, self.path)


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _read_rows(dataset: Any, index: Index, *, path: Path) -> FloatArray:
    """Read some rows in the cheapest way that the layout allows."""
    from h5py import h5s

    offset = dataset.id.get_offset()
    if offset is not None:  # one plain block in the file
        shape = (dataset.shape[-2], dataset.shape[-1])
        return np.asarray(np.memmap(path, dataset.dtype, "r", offset, shape)[index], dtype=np.float32)
    out = np.empty((len(index), dataset.shape[-1]), np.float32)
    packed = dataset.id.get_create_plist().get_nfilters()
    rowwise = dataset.ndim == 2 and dataset.chunks == (1, dataset.shape[1])  # as CLAM and TRIDENT write
    if rowwise and not packed:
        width = dataset.dtype.itemsize * dataset.shape[1]
        for i, row in enumerate(index.tolist()):
            if dataset.id.get_chunk_info_by_coord((row, 0)).size != width:  # h5py would read beyond its end
                raise FileError(f"{path}: a chunk differs from its declared size; write the file again.")
            out[i] = np.frombuffer(dataset.id.read_direct_chunk((row, 0))[1], dataset.dtype)
        return out
    order = np.argsort(index, kind="stable")
    rows = index[order]
    lead = dataset.ndim - 2  # axes of length 1
    for start, stop, members in _spans(rows, chunk=dataset.chunks[-2] if dataset.chunks else None):
        count = (1,) * lead + (stop - start, dataset.shape[-1])
        block = np.empty(count, dataset.dtype)
        space = dataset.id.get_space()
        space.select_hyperslab((*(0,) * lead, start, 0), count)
        dataset.id.read(h5s.create_simple(count), space, block)
        out[order[members]] = block.reshape(count[-2:])[rows[members] - start]
    return out


def _spans(rows: Index, *, chunk: int | None) -> Iterator[tuple[int, int, slice]]:
    """Spans of ascending rows to read together: (first row, row after the last, their slice of `rows`)."""
    step = max(_GAP, chunk or 0)
    first = 0
    for i in range(1, len(rows) + 1):
        ends = i == len(rows) or rows[i] - rows[i - 1] > step or rows[i] - rows[first] >= _SPAN
        if ends:
            yield int(rows[first]), int(rows[i - 1]) + 1, slice(first, i)
            first = i


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open the file, and turn any error of HDF5 into one sentence."""
    import h5py

    with (
        readable(path, "HDF5 file"),
        h5py.File(path, "r", locking=False, rdcc_nbytes=CHUNK_CACHE) as file,
    ):
        yield file


def _names(group: Any) -> list[str]:
    return [] if len(group) > _MANY else [str(name) for name in group]


def _node(file: Any, name: str) -> Any:
    """The object of a name, or None for links that are broken or leave the file."""
    import h5py

    link = file.get(name, getlink=True)
    return file[name] if isinstance(link, h5py.HardLink) else None


def _is_group(node: Any) -> bool:
    return node is not None and not hasattr(node, "shape")


def _dataset(file: Any, name: str, path: Path) -> Any:
    dataset = _node(file, name)
    if dataset is None or _is_group(dataset):
        raise FileError(f"{path}: {name!r} is refused: it is a link out of the file; copy the data in.")
    if dataset.is_virtual or dataset.external:
        raise FileError(f"{path}: {name!r} is refused: it is stored in other files; copy the data in.")
    if not _is_standard(dataset.id.get_type()):
        raise FileError(f"{path}: {name!r} must hold plain numbers. Got another type; the file is damaged.")
    packed = bool(dataset.id.get_create_plist().get_nfilters())
    stored = min(int(dataset.id.get_storage_size()), path.stat().st_size)
    declared = int(dataset.dtype.itemsize * np.prod(dataset.shape or (1,), dtype=object))
    check_stored(declared, stored, packed=packed, name=name, path=path)
    if dataset.chunks is not None:
        chunk = int(dataset.dtype.itemsize * np.prod(dataset.chunks, dtype=object))
        check_stored(chunk, max(declared, 1 << 26), packed=False, name=f"a chunk of {name}", path=path)
        grid = [-(-length // edge) for length, edge in zip(dataset.shape, dataset.chunks, strict=True)]
        if packed or sum(cells > 1 for cells in grid) > 1:
            chunks = int(np.prod(grid, dtype=object))
            check_chunks(int(dataset.id.get_num_chunks()), chunks, name=name, path=path)
        if packed:
            check_hdf5_chunks(dataset, name, path)
        elif dataset.id.get_storage_size() != dataset.id.get_num_chunks() * chunk:
            raise FileError(
                f"{path}: the chunks of {name!r} differ from their declared size; write it again."
            )
    return dataset


def _attributes(node: Any, path: Path) -> dict[str, Any]:
    """Read small attributes as plain values; None for those that cannot be read safely.

    The text `None`, which TRIDENT writes, means None.
    """
    from h5py import h5o

    names = list(node.attrs)[:_MANY]
    values: dict[str, Any] = dict.fromkeys(map(str, names))
    texts = read_texts(path, int(h5o.get_info(node.id).addr)) if names else {}
    for name in names:
        stored = node.attrs.get_id(name)
        if name in texts:
            values[str(name)] = _plain(texts[name])
        elif _is_standard(stored.get_type()) and stored.get_storage_size() <= 1 << 16:
            values[str(name)] = _plain(node.attrs[name])
    return values


def _is_standard(kind: Any) -> bool:
    """Whether HDF5 can read the values without conversion: it can hang on damaged types."""
    from h5py import h5t

    if isinstance(kind, h5t.TypeStringID):
        return not kind.is_variable_str()
    simple = isinstance(kind, h5t.TypeIntegerID | h5t.TypeFloatID | h5t.TypeEnumID)
    return simple and bool(kind.equal(h5t.py_create(kind.dtype, logical=True)))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray):
        return value.item() if value.ndim == 0 else value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, str) and value == "None" else value


_CONTINUATION, _ATTRIBUTE, _VARIABLE_LENGTH = 0x10, 0x0C, 9
_BLOCKS = 64  # continuation blocks of one header
_HEAP = 1 << 26  # bytes of one heap
Message = tuple[int, int, bytes]


def read_texts(path: Path, address: int) -> dict[str, str]:
    """Read the sound variable-length text attributes of the object at `address`."""
    texts: dict[str, str] = {}
    try:
        with open(path, "rb") as file:
            for kind, flags, body in _messages(file, address):
                if kind != _ATTRIBUTE or flags & 2:
                    continue
                name, datatype, data = _attribute(body)
                if datatype[0] & 0x0F == _VARIABLE_LENGTH and 16 <= len(data) < 32:  # one value
                    text = _heap_object(file, *struct.unpack_from("<IQI", data))
                    if text is not None:
                        texts[name] = text.decode("utf-8", "replace")
    except (struct.error, ValueError, OSError, OverflowError, IndexError):
        pass
    return texts


def _attribute(body: bytes) -> tuple[str, bytes, bytes]:
    version, flags, *sizes = struct.unpack_from("<BBHHH", body)
    if version not in (1, 2, 3) or (version > 1 and flags):
        raise ValueError
    at, parts = (9 if version == 3 else 8), []
    for size in sizes:
        parts.append(body[at : at + size])
        at += -(-size // 8) * 8 if version == 1 else size
    name, datatype, _ = parts
    return name.split(b"\0")[0].decode("utf-8", "replace"), datatype, body[at:]


def _messages(file: IO[bytes], address: int) -> Iterator[Message]:
    head, order = _read(file, address, 32), None
    if head.startswith(b"OHDR"):  # version 2
        flags = head[5]
        at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width, order = 1 << (flags & 3), 2 if flags & 4 else 0
        blocks = [(address + at + width, int.from_bytes(head[at : at + width], "little"))]
    else:
        version, _, _, _, size = struct.unpack_from("<BBHII", head)
        if version != 1:
            raise ValueError
        blocks = [(address + 16, size)]
    for count, (start, length) in enumerate(blocks):
        if count >= _BLOCKS:
            raise ValueError
        for kind, flags, body in _block(_read(file, start, length), order):
            if kind == _CONTINUATION:
                offset, size = struct.unpack_from("<QQ", body)
                blocks.append((offset, size) if order is None else (offset + 4, size - 8))
            yield kind, flags, body


def _block(block: bytes, order: int | None) -> Iterator[Message]:
    """Messages of one block; `order` is the size of the creation-order field in version 2 headers."""
    at = 0
    while at + (8 if order is None else 4) <= len(block):
        if order is None:
            kind, size, flags = struct.unpack_from("<HHB", block, at)
            at += 8
        else:
            kind, size, flags = struct.unpack_from("<BHB", block, at)
            at += 4 + order
        yield kind, flags, block[at : at + size]
        at += size


def _heap_object(file: IO[bytes], length: int, address: int, index: int) -> bytes | None:
    """An object of the heap at an address, or None if the heap is damaged."""
    if length == 0:
        return b""
    magic, version, _, _, size = struct.unpack("<4sBBHQ", _read(file, address, 16))
    if magic != b"GCOL" or version != 1 or not 16 <= size <= _HEAP:
        return None
    heap, at = _read(file, address, size), 16
    while at + 16 <= len(heap):
        number, _, _, stored = struct.unpack_from("<HHIQ", heap, at)
        if number == index:
            data = heap[at + 16 : at + 16 + min(length, stored)]
            return data if len(data) == length else None
        step = 16 + -(-stored // 8) * 8 if number else stored
        if step < 16:
            return None
        at += step
    return None


def _read(file: IO[bytes], start: int, length: int) -> bytes:
    if length > _HEAP:
        raise ValueError
    file.seek(start)
    data = file.read(length)
    if not data:
        raise ValueError
    return data
