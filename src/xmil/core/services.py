"""Services: functions of higher rooms that nouns offer as methods, such as `Explanation.save` and `.plot`.

A room registers its services when it is imported. A lower room never imports it: the front of the package,
`xmil/__init__.py`, says what loads the room of a service that is called for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Service = TypeVar("Service", bound=Callable[..., Any])

_SERVICES: dict[str, Callable[..., Any]] = {}
_LOADERS: dict[str, Callable[[], object]] = {}


def register_service(function: Service) -> Service:
    """Decorator that offers a function to lower rooms, under its own name."""
    _SERVICES[function.__name__] = function
    return function


def load_services_by(loaders: Mapping[str, Callable[[], object]]) -> None:
    """Set what loads the room of each service; the room then registers it."""
    _LOADERS.update(loaders)


def service(name: str) -> Callable[..., Any]:
    """Get a service; its room is imported on first use.

    >>> service("write_explanations").__module__
    'xmil.storage.explanations'
    """
    if name not in _SERVICES:
        _LOADERS[name]()
    return _SERVICES[name]
