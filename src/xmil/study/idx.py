"""IDX files, the format of MNIST: big-endian header, then bytes."""

from __future__ import annotations

import gzip
import zlib
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt

from xmil.core.errors import FileError

UNSIGNED_BYTES = 0x08


def read_idx(path: str | PathLike[str]) -> npt.NDArray[np.uint8]:
    """The array of an IDX file of unsigned bytes, plain or gzipped."""
    data = _read(Path(path))
    if len(data) < 4 or data[:2] != b"\x00\x00":
        raise FileError(f"{path}: not an IDX file (its first two bytes must be zero); download it again.")
    if data[2] != UNSIGNED_BYTES:
        raise FileError(
            f"{path}: an IDX file of type 0x{data[2]:02x}; only unsigned bytes (0x08) are images or labels."
        )
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise FileError(f"{path}: cut off within the header; download it again.")
    shape = tuple(int(n) for n in np.frombuffer(data, dtype=">u4", count=data[3], offset=4))
    expected = int(np.prod(shape, dtype=np.int64))
    if len(data) - start != expected:
        raise FileError(
            f"{path}: {shape} promises {expected} bytes, but {len(data) - start} follow the header; "
            "the file is damaged, download it again."
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except FileNotFoundError:
        raise FileError(f"{path}: no such file.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"{path}: cannot be read ({error}).") from None
