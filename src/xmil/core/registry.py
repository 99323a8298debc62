"""Named things that others bring: entries of registries, and functions of the user's by `module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Generic, TypeVar
from zlib import crc32

from xmil.core.errors import FileError, InputError, absent, unknown_name

logger = logging.getLogger(__name__)
SUFFIX = ".py"
LOADING = threading.RLock()  # one for all registries: a plugin may look into another one
T = TypeVar("T")


class Registry(Generic[T]):
    """Names mapped to objects; the entry points of the group are loaded on the first look.

    >>> verbs: Registry[object] = Registry("verb", group="xmil.verbs")
    >>> _ = verbs.add("greet", lambda: "hello")
    >>> verbs["greet"]()
    'hello'
    """

    def __init__(self, kind: str, *, group: str) -> None:
        self.kind = kind
        self.group = group
        self._entries: dict[str, T] = {}
        self._plugins_loading = False
        self._plugins_loaded = False

    def add(self, name: str, entry: T, *, replace: bool = False) -> T:
        """File an entry under a name; a name can be taken once, unless it is to be replaced."""
        if name in self._entries and not replace:
            raise InputError(f"The {self.kind} {name!r} is registered already; choose another name.")
        self._entries[name] = entry
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """`add` as a decorator."""
        return lambda entry: self.add(name, entry)

    def __getitem__(self, name: str) -> T:
        if not isinstance(name, str) or (name not in self._entries and name not in self):
            raise unknown_name(self.kind, name, self)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load_plugins()
        return iter(sorted(self._entries))

    def _load_plugins(self) -> None:
        """Import what installed packages name under the group; a broken plugin is logged, not fatal."""
        if self._plugins_loaded:
            return
        with LOADING:  # other threads wait until all are there
            if self._plugins_loading or self._plugins_loaded:
                return
            self._plugins_loading = True  # a plugin that looks into its own registry sees what there is
            for point in entry_points(group=self.group):
                try:
                    point.load()
                except Exception as error:  # any failure of foreign code
                    logger.warning(
                        "The plugin %s of %s could not be loaded: %s", point.value, self.group, error
                    )
            self._plugins_loaded = True


def load_function(name: str, *, kind: str) -> Callable[..., Any]:
    """The function that `module:function` or `file.py:function` names; `kind` says in errors what it is for.

    Modules are looked for in the current folder too, and those that a file imports beside it.

    >>> load_function("math:hypot", kind="method")(3, 4)
    5.0
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise InputError(f"The {kind} {name!r} must look like file.py:function or module:function.")
    module = load_module(place, kind=kind)
    value: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(value):
        raise InputError(f"The {kind} {name!r} cannot be used: {place} has no {function!r} to call.")
    return value


def load_module(place: str, *, kind: str) -> ModuleType:
    """A module by its name, or by its file where the name ends with `.py`."""
    path = Path(place)
    if path.suffix == SUFFIX and not path.is_file():
        raise FileError(absent(path))
    try:
        if path.suffix == SUFFIX:
            return _run_file(path.resolve())
        with _importable(Path.cwd()):
            return importlib.import_module(place)
    except Exception as error:  # whatever foreign code raises on import
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise InputError(f"The {kind} {place!r} cannot be imported ({reason}).") from error


def source_file(name: str) -> Path | None:
    """The file that holds a named function, where its module has one."""
    file = getattr(load_module(name.rpartition(":")[0], kind="function"), "__file__", None)
    return None if file is None else Path(file)


def _run_file(path: Path) -> ModuleType:
    """Runs the file as it is now; its name among the modules tells it from others of that name."""
    name = f"xmil_file_{path.stem}_{crc32(str(path).encode()):08x}"
    loader = _Uncached(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    if spec is None:
        raise ImportError(f"{path.name} is not a Python file")
    spec.has_location = True
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _importable(path.parent):
        loader.exec_module(module)
    return module


class _Uncached(SourceFileLoader):
    """Compiles the file each time: cached bytecode goes by the second, in which a file may change."""

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """The folder is on the path of imports within the block."""
    importlib.invalidate_caches()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def is_function_name(text: str) -> bool:
    """Whether a text reads as `module:function` or `file.py:function`, and is no file.

    >>> is_function_name("mine:build"), is_function_name("nets/mine.py:build"), is_function_name("model.pt")
    (True, True, False)
    """
    place, _, function = text.rpartition(":")
    if not place or not function.isidentifier():
        return False
    with suppress(OSError):  # too long for the name of a file
        if Path(text).exists():
            return False
    return place.endswith(SUFFIX) or all(part.isidentifier() for part in place.split("."))
