"""What a pickle would allocate, found out before it is loaded: a dry run in which nothing is made.

Torch's restricted unpickler runs no foreign code, but it does call a few functions whose result can be far
larger than the pickle: buffers by their length, codecs that double their input, tensors by their shape.
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
from xmil.core.errors import FileError

DEEP = 16  # tuples within tuples; hashing one takes time that doubles with each level
_LEGACY = 6  # pickles at the head of a file of torch's old layout


class PurePickle(pickle._Unpickler):
    """Python's own unpickler in Python: its memo is a dictionary, not an array as long as the file says.

    Tuples of tuples of tuples are refused: as keys of a dictionary they would be hashed for ever.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def _tuple(self, opcode: int) -> None:
        plain: Any = pickle._Unpickler.dispatch[opcode]
        plain(self)
        new = self.stack[-1]  # type: ignore[attr-defined]
        depths = self.__dict__.setdefault("_depths", {})
        deepest = max((depths.get(id(item), (0,))[0] for item in new), default=0)
        depths[id(new)] = (deepest + 1, new)  # held, so that the number stays its own
        if deepest >= DEEP:
            raise FileError("its pickle nests tuples too deeply; it is damaged or a trap.")

    for _code in (*pickle.TUPLE, *pickle.TUPLE1, *pickle.TUPLE2, *pickle.TUPLE3):
        dispatch[_code] = partial(lambda self, opcode: self._tuple(opcode), opcode=_code)


def check_torch_file(path: Path) -> None:
    """Refuse a torch file that would unpack or unpickle to more than its budget."""
    try:
        if zipfile.is_zipfile(path):
            check_archive(path)
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    if member.filename.endswith(".pkl") and member.compress_type == zipfile.ZIP_STORED:
                        _dry_run(io.BytesIO(archive.read(member)), path, pickles=1)
        else:
            with path.open("rb") as stream:
                _dry_run(stream, path, pickles=_LEGACY)
    except FileError:
        raise
    except Exception as error:  # damaged archives raise almost any type
        raise FileError(f"{path}: not a readable torch file ({error}); write or copy it again.") from None


def _dry_run(stream: IO[bytes], path: Path, *, pickles: int) -> None:
    """Follow the pickle with stand-ins that only count; what is no pickle is left to the loader."""
    ledger = _Count(path, allowance(path.stat().st_size))
    for _ in range(pickles):
        try:
            _DryRun(stream, ledger).load()
        except FileError as error:
            why = str(error)
            raise FileError(why if why.startswith(str(path)) else f"{path}: {why}") from None
        except Exception:
            return


class _Count:
    """Bytes that the calls of a pickle would make."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit, self.total = path, limit, 0

    def add(self, nbytes: int) -> None:
        self.total += nbytes
        if self.total > self.limit:
            check_budget(self.total, "the pickle", self.path)


class _DryRun(PurePickle):
    """Calls become stand-ins; strings, numbers and containers are as small as the file."""

    def __init__(self, stream: IO[bytes], count: _Count) -> None:
        super().__init__(stream, encoding="utf-8")
        self._count = count

    def find_class(self, module: str, name: str) -> Any:
        make = _SIZES.get((module, name), _tensor_size if name.endswith("Tensor") else lambda *_: 0)
        return type(name or "Made", (_Made,), {"count": self._count, "size": staticmethod(make)})

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002 - a storage, whose bytes are in the file
        return None


class _Made:
    """Stands for what a call would give: it has a length, and takes any state."""

    count: _Count
    size: Callable[..., int]

    def __init__(self, *args: Any) -> None:
        self.length = self.size(*args)
        self.count.add(self.length)

    def __len__(self) -> int:
        return self.length

    def __setstate__(self, _: Any) -> None:
        """Nothing is kept."""

    __setitem__ = append = extend = add = lambda *_: None


def _encoded(text: Any, codec: Any = "utf-8", *_: Any) -> int:
    """Latin-1 keeps the length, which is all that NumPy asks for; other codecs may double it."""
    return len(text) * (1 if codec in ("latin1", "latin-1") else 4)


def _buffer(source: Any = b"", *_: Any) -> int:
    return source if isinstance(source, int) else len(source)


def _tensor_size(*shape: Any) -> int:
    lengths = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    return abs(8 * math.prod(length for length in lengths if isinstance(length, int)))


def _array_size(_kind: Any = None, shape: Any = (), code: Any = b"b", *_: Any) -> int:
    """NumPy pickles an empty array of bytes and then its state; any other shape or type is made at once."""
    single = code in (b"b", "b") or (isinstance(code, _Made) and len(code) == 1)  # of eight bytes at most
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
