"""Named extensions: entries of registries, and users' functions by `module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, all_suffixes
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Generic, TypeVar
from zlib import crc32

from xmil.core.errors import FileError, InputError, absent, unknown_name

logger = logging.getLogger(__name__)
SUFFIX = ".py"
LOADING = threading.RLock()  # one for all registries, because a plugin may use another registry
IMPORT_SYSTEM = ("importlib", "_frozen_importlib", "_frozen_importlib_external")
T = TypeVar("T")


class Registry(Generic[T]):
    """Names mapped to objects; the entry points of the group are loaded on the first look-up.

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
        """Add an entry under a new name; with `replace`, the name may exist."""
        if name in self._entries and not replace:
            raise InputError(f"The {self.kind} {name!r} is registered already; choose another name.")
        self._entries[name] = entry
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds an entry."""
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
        """Import the entry points of the group; log broken plugins."""
        if self._plugins_loaded:
            return
        with LOADING:  # other threads wait until all are loaded
            if self._plugins_loading or self._plugins_loaded:
                return
            self._plugins_loading = True  # a plugin may use its own registry while loading
            for point in entry_points(group=self.group):
                try:
                    point.load()
                except Exception as error:  # any failure of foreign code
                    logger.warning(
                        "The plugin %s of %s could not be loaded: %s", point.value, self.group, error
                    )
            self._plugins_loaded = True


def load_function(name: str, *, kind: str) -> Callable[..., Any]:
    """Load the function that `module:function` or `file.py:function` names; errors name its `kind`.

    The module may be in the current folder. It may import modules beside it, and so may a file, but installed
    ones come first. No other module can import from these folders.

    >>> load_function("math:hypot", kind="method")(3, 4)
    5.0
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise InputError(f"The {kind} {name!r} must look like file.py:function or module:function.")
    module = load_module(place, kind=kind)
    value: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(value):
        beside = f"{place}{SUFFIX}"
        hint = f"; write {beside}:{function} for the file here" if Path(beside).is_file() else ""
        raise InputError(f"The {kind} {name!r} cannot be used: {place} has no {function!r} to call{hint}.")
    return value


def load_module(place: str, *, kind: str) -> ModuleType:
    """Import a module by its name, or by its file if the name ends with `.py`."""
    path = Path(place)
    if path.suffix == SUFFIX and not path.is_file():
        raise FileError(absent(path))
    try:
        if path.suffix == SUFFIX:
            return _run_file(path.resolve())
        here, loaded = Path.cwd(), set[str]()
        named = _FolderFinder(here, loaded, place.partition(".")[0]) if _contains(here, place) else None
        with _finders(first=named, last=_FolderFinder(here, loaded)):
            return importlib.import_module(place)
    except Exception as error:  # whatever foreign code raises on import
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise InputError(f"The {kind} {place!r} cannot be imported ({reason}).") from error


def source_file(name: str) -> Path | None:
    """Find the file of a named function, if its module has one."""
    file = getattr(load_module(name.rpartition(":")[0], kind="function"), "__file__", None)
    return None if file is None else Path(file)


def _run_file(path: Path) -> ModuleType:
    """Run the current content of a file, under a module name that is unique to its path."""
    name = f"xmil_file_{path.stem}_{crc32(str(path).encode()):08x}"
    loader = _Uncached(name, str(path))
    spec = ModuleSpec(name, loader, origin=str(path))
    spec.has_location = True
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _finders(last=_FolderFinder(path.parent, {name})):
        loader.exec_module(module)
    return module


class _Uncached(SourceFileLoader):
    """Compile the file each time: cached bytecode is dated in seconds, and would miss quick changes."""

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


@contextmanager
def _finders(*, first: MetaPathFinder | None = None, last: MetaPathFinder) -> Iterator[None]:
    """Find modules in more ways within the block."""
    importlib.invalidate_caches()
    added = [finder for finder in (first, last) if finder is not None]
    sys.meta_path[:] = [*added[:-1], *sys.meta_path, last]
    try:
        yield
    finally:
        for finder in added:
            sys.meta_path.remove(finder)


def _contains(folder: Path, module: str) -> bool:
    """Whether a folder has the file of a module, which may be in a package."""
    path = folder.joinpath(*module.split("."))
    files = [f"{path}{suffix}" for suffix in all_suffixes()]
    files += [str(path / f"__init__{suffix}") for suffix in all_suffixes()]
    return any(map(os.path.isfile, files))


@dataclass(eq=False)
class _FolderFinder(MetaPathFinder):
    """Find one module in a folder, or without its name those that modules loaded from there import.

    With the folder on `sys.path`, every library would find stray modules there, such as its optional
    dependencies.
    """

    folder: Path
    loaded: set[str]  # from the folder; top-level names
    name: str | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:  # in a package
            return None
        wanted = _importing_module() in self.loaded if self.name is None else fullname == self.name
        spec = PathFinder.find_spec(fullname, [str(self.folder)], target) if wanted else None
        if spec is not None:
            self.loaded.add(fullname)
        return spec


def _importing_module() -> str:
    """Name the top-level module or package whose code runs the current import."""
    frame: FrameType | None = sys._getframe(2)  # that called the finder
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in IMPORT_SYSTEM:
            return name
        frame = frame.f_back
    return ""


def is_function_name(text: str) -> bool:
    """Whether a text looks like `module:function` or `file.py:function`, and is not a file.

    >>> is_function_name("mine:build"), is_function_name("nets/mine.py:build"), is_function_name("model.pt")
    (True, True, False)
    """
    place, _, function = text.rpartition(":")
    if not place or not function.isidentifier():
        return False
    with suppress(OSError):  # too long for a file name
        if Path(text).exists():
            return False
    return place.endswith(SUFFIX) or all(part.isidentifier() for part in place.split("."))
