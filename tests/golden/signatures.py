"""A snapshot for review: the signatures of the public names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import xmil


def signatures() -> str:
    """Every public name: functions with their defaults, classes with fields, properties and methods."""
    named: dict[str, Any] = {name: getattr(xmil, name) for name in xmil.__all__ if name != "__version__"}
    for value in list(named.values()):  # what functions give back is public, too
        for other in _returned(value):
            named.setdefault(other.__name__, other)
    return "\n\n".join("\n".join(_lines(name, named[name])) for name in sorted(named)) + "\n"


def _returned(value: Any) -> Iterator[type]:
    """Classes of the package that a function returns."""
    text = getattr(value, "__annotations__", {}).get("return")
    scope = getattr(inspect.unwrap(value), "__globals__", {}) if inspect.isfunction(value) else {}
    for word in re.findall(r"\w+", text) if isinstance(text, str) else []:
        found = scope.get(word)
        if inspect.isclass(found) and found.__module__.startswith("xmil"):
            yield found


def _lines(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"def {name}{_signature(value)}"
        return
    yield f"class {name}"
    if is_dataclass(value):
        for field in fields(value):
            yield f"    {field.name}{_default(field)}"
    for name, field in getattr(value, "model_fields", {}).items():  # of pydantic
        yield f"    {name}{_default(field)}"
    own = (base for base in value.__mro__ if base.__module__.startswith("xmil"))
    for member in sorted({member for base in own for member in vars(base)}):
        shown = _member(value, member)
        if shown is not None:
            yield f"    {shown}"


def _member(owner: type, name: str) -> str | None:
    value = inspect.getattr_static(owner, name)
    written = name == "__init__" and not (is_dataclass(owner) and owner.__dataclass_params__.init)
    if name.startswith("_") and not written:
        return None
    if isinstance(value, classmethod | staticmethod):
        return f"@{type(value).__name__} def {name}{_signature(value.__func__)}"
    if inspect.isfunction(value):
        return f"def {name}{_signature(value)}"
    kind = type(value).__name__
    if kind in ("property", "cached_property"):
        return f"property {name}"
    return None


def _signature(function: Any) -> str:
    """Names, kinds and defaults of the parameters, whatever their types are called, and what is returned."""
    plain = inspect.unwrap(function)
    if not inspect.isfunction(plain):
        return "(...)"
    parts, marked = [], False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not marked:
            parts.append("*")
        marked |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else f" = {_value(p.default)}"
        options = re.match(r"Unpack\[(\w+)\]", str(p.annotation))
        keys = "" if options is None else f": {', '.join(plain.__globals__[options[1]].__annotations__)}"
        parts.append(f"{star}{p.name}{default}{keys}")
    return f"({', '.join(parts)}) -> {_type(plain.__annotations__.get('return'))}"


def _type(annotation: Any) -> str:
    """A type without the modules that it comes from."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)


def _value(default: Any) -> str:
    return default.__name__ if inspect.isroutine(default) or inspect.isclass(default) else repr(default)


def _default(field: Any) -> str:
    if field.default is not MISSING and repr(field.default) != "PydanticUndefined":
        return f" = {_value(field.default)}"
    if field.default_factory not in (MISSING, None):
        return f" = {_value(field.default_factory)}()"
    return ""
