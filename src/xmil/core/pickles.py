"""Find out what a pickle would allocate before loading it, by a dry run that allocates nothing.

Torch's restricted unpickler runs no foreign code, but it calls a few functions with results far larger than
the pickle: buffers by their length, codecs that double their input, tensors by their shape.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar

from xmil.core.budget import allowance, check_archive, check_budget
from xmil.core.errors import FileError, refuse_damage

DEEP = 16  # levels of nested tuples; the time to hash one doubles with each level
_LEGACY = 6  # pickles at the start of a file in torch's old layout


class PurePickle(pickle._Unpickler):
    """Python's unpickler in pure Python: its memo is a dictionary, not an array of a length set by the file.

    Deeply nested tuples are refused: as keys of a dictionary, they would take forever to hash.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def _tuple(self, opcode: int) -> None:
        plain: Any = pickle._Unpickler.dispatch[opcode]
        plain(self)
        new = self.stack[-1]  # type: ignore[attr-defined]
        depths = self.__dict__.setdefault("_depths", {})
        deepest = max((depths.get(id(item), (0,))[0] for item in new), default=0)
        depths[id(new)] = (deepest + 1, new)  # kept alive, so that its id stays unique
        if deepest >= DEEP:
            raise FileError("its pickle nests tuples too deeply; it is damaged or malicious.")

    for _code in (*pickle.TUPLE, *pickle.TUPLE1, *pickle.TUPLE2, *pickle.TUPLE3):
        dispatch[_code] = partial(lambda self, opcode: self._tuple(opcode), opcode=_code)


def check_torch_file(path: Path) -> None:
    """Refuse a torch file that would unpack or unpickle to more than its budget."""
    fault, way = f"{path}: not a readable torch file", "write or copy it again"
    with refuse_damage(fault, way=way, kinds=(Exception,)):  # damaged archives raise almost any type
        if zipfile.is_zipfile(path):
            check_archive(path)
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    if member.filename.endswith(".pkl") and member.compress_type == zipfile.ZIP_STORED:
                        _dry_run(io.BytesIO(archive.read(member)), path, pickles=1)
        else:
            with path.open("rb") as stream:
                _dry_run(stream, path, pickles=_LEGACY)


def _dry_run(stream: IO[bytes], path: Path, *, pickles: int) -> None:
    """Run the pickle with stand-ins that only count; leave anything that is not a pickle to the loader."""
    count = _Count(path, allowance(path.stat().st_size))
    for _ in range(pickles):
        try:
            _DryRun(stream, count).load()
        except FileError as error:
            text = str(error)
            raise FileError(text if text.startswith(str(path)) else f"{path}: {text}") from None
        except Exception:
            return


class _Count:
    """Count the bytes that the calls of a pickle would allocate."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit, self.total = path, limit, 0

    def add(self, nbytes: int) -> None:
        self.total += nbytes
        if self.total > self.limit:
            check_budget(self.total, "the pickle", self.path)


class _DryRun(PurePickle):
    """Replace calls by stand-ins; strings, numbers and containers are only as large as the file."""

    def __init__(self, stream: IO[bytes], count: _Count) -> None:
        super().__init__(stream, encoding="utf-8")
        self._count = count

    def find_class(self, module: str, name: str) -> Any:
        make = _SIZES.get((module, name), _tensor_size if name.endswith("Tensor") else lambda *_: 0)
        return type(name or "StandIn", (_StandIn,), {"count": self._count, "size": staticmethod(make)})

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002 - a storage, whose bytes are in the file
        return None


class _StandIn:
    """Replaces the result of a call: it has a length, and takes any state."""

    count: _Count
    size: Callable[..., int]

    def __init__(self, *args: Any) -> None:
        self.length = self.size(*args)
        self.count.add(self.length)

    def __len__(self) -> int:
        return self.length

    def __setstate__(self, _: Any) -> None:
        """Ignore the state."""

    __setitem__ = append = extend = add = lambda *_: None


def _encoded(text: Any, codec: Any = "utf-8", *_: Any) -> int:
    """Latin-1, which NumPy uses, keeps the length; other codecs may increase it."""
    return len(text) * (1 if codec in ("latin1", "latin-1") else 4)


def _buffer(source: Any = b"", *_: Any) -> int:
    return source if isinstance(source, int) else len(source)


def _tensor_size(*shape: Any) -> int:
    lengths = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    return abs(8 * math.prod(length for length in lengths if isinstance(length, int)))


def _array_size(_kind: Any = None, shape: Any = (), code: Any = b"b", *_: Any) -> int:
    """NumPy pickles an empty array of bytes and then its state; other arrays are allocated at once."""
    single = code in (b"b", "b") or (isinstance(code, _StandIn) and len(code) == 1)  # at most eight bytes
    return _tensor_size(shape) if single else 1 << 62


_SIZES: dict[tuple[str, str], Callable[..., int]] = {
    ("_codecs", "encode"): _encoded,
    ("builtins", "bytearray"): _buffer,
    ("__builtin__", "bytearray"): _buffer,
    ("torch.storage", "UntypedStorage"): _tensor_size,
    ("torch.storage", "TypedStorage"): _tensor_size,
    ("numpy.core.multiarray", "_reconstruct"): _array_size,
    ("numpy._core.multiarray", "_reconstruct"): _array_size,
}
