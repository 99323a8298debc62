"""Named things that third parties can add to: models, methods, checkpoint families, readers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from xmil.core.errors import InputError, unknown_name

logger = logging.getLogger(__name__)

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
        self._plugins_loaded = False

    def add(self, name: str, entry: T) -> T:
        """File an entry under a name; a name can be taken once."""
        if name in self._entries:
            raise InputError(f"The {self.kind} {name!r} is registered already; choose another name.")
        self._entries[name] = entry
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """`add` as a decorator."""
        return lambda entry: self.add(name, entry)

    def __getitem__(self, name: str) -> T:
        if not isinstance(name, str):
            raise unknown_name(self.kind, name, self)
        if name not in self._entries:
            self._load_plugins()
        try:
            return self._entries[name]
        except (KeyError, TypeError):
            raise unknown_name(self.kind, name, self._entries) from None

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
        self._plugins_loaded = True
        for point in entry_points(group=self.group):
            try:
                point.load()
            except Exception as error:  # any failure of foreign code
                logger.warning("The plugin %s of %s could not be loaded: %s", point.value, self.group, error)
