"""Values that a function closes over and that have a row for each instance: they stay whole in sub-bags."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from xmil.core.bag import Bag
from xmil.core.errors import InputError

DEPTH = 3
FEW = 16  # a longer list holds numbers, or a row per instance itself
Rows = dict[str, tuple[int, str]]
LIBRARIES = ("torch", "numpy", "scipy", "sklearn", "xmil.")


def values_by_row(function: Callable[..., Any] | None, module: nn.Module, n: int) -> Rows:
    """What a function and the module it calls hold with a row for each of n instances."""
    held = [*([] if function is None else held_values(function)), *plain_tensors(module).items()]
    for part in module.modules():
        if not type(part).__module__.startswith(LIBRARIES):
            held += held_values(part.forward)
    caller = getattr(module, "caller", None)  # the function of a chain
    held += [] if caller is None else held_values(caller)
    return {name: (id(value), shape) for name, value in held if (shape := _rows(value, n)) is not None}


def fixed_rows(name: str, shape: str, n: int, *, who: str) -> InputError:
    """The error for a value that would stay whole while instances leave the bag."""
    last = name.split(".")[-1]
    word = last if last.isidentifier() and "coord" not in last.lower() else "coords"
    way = "coords=..." if word == "coords" else f"extras={{{word!r}: ...}}"
    return InputError(
        f"{who} holds {name!r} {shape}, one row for each of the {n} instances, which would stay whole while "
        f"instances leave the bag; name it in forward's signature, forward=lambda net, x, *, {word}: ..., "
        f"and pass a Bag with {way}."
    )


def held_values(function: Callable[..., Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What a function reads from outside itself, by name: closure, globals, defaults, bound objects."""
    if isinstance(function, partial):
        named = {**{f"argument {i}": v for i, v in enumerate(function.args)}, **function.keywords}
        yield from _opened(named, depth)
        yield from held_values(function.func, depth)
    elif isinstance(function, MethodType):
        yield from _opened({"self": function.__self__}, depth)
        yield from held_values(function.__func__, depth)
    elif isinstance(function, FunctionType):
        yield from _opened(_captured(function), depth)
    elif not isinstance(function, type) and hasattr(function, "__dict__"):
        yield from _opened(vars(function), depth)


def _captured(function: FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            found.setdefault(name, function.__globals__[name])
    defaults = dict(enumerate(function.__defaults__ or ()))
    return {**found, **{f"default {i}": v for i, v in defaults.items()}, **(function.__kwdefaults__ or {})}


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty cell raises
    except ValueError:
        return False
    return True


def _global_names(code: CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _opened(values: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
    """The values, and those within dicts, plain objects and functions among them."""
    for name, value in values.items():
        yield name, value
        if depth >= DEPTH or isinstance(value, Tensor | np.ndarray | Bag | str):
            continue
        if isinstance(value, list | tuple):
            few = {str(i): v for i, v in enumerate(value)} if len(value) <= FEW else {}
            yield from _prefixed(name, few, depth)
        elif isinstance(value, Mapping):
            yield from _prefixed(name, {str(key): v for key, v in value.items()}, depth)
        elif isinstance(value, FunctionType | MethodType | partial):
            if not str(getattr(value, "__module__", "")).startswith(LIBRARIES):
                yield from held_values(value, depth + 1)
        elif _is_plain(value):
            yield from _prefixed(name, vars(value), depth)


def _prefixed(name: str, values: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
    return ((f"{name}.{key}", value) for key, value in _opened(values, depth + 1))


def _is_plain(value: Any) -> bool:
    """Whether an object may hold values of the user's: no class, Python module or network."""
    return hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | nn.Module)


def plain_tensors(module: nn.Module) -> dict[str, Any]:
    """Values set on a module or its parts that are neither weights nor buffers, by their path."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        own = {k: v for k, v in vars(part).items() if not k.startswith("_") and k != "caller"}
        opened = _opened({k: v for k, v in own.items() if _is_data(v)}, 0)
        found.update({f"{path}.{k}".lstrip("."): v for k, v in opened})
    return found


def _is_data(value: Any) -> bool:
    """Whether a module's attribute may be data of a bag: arrays, and what holds them."""
    return isinstance(value, Tensor | np.ndarray | Mapping | list | tuple) or hasattr(value, "tocsr")


def _rows(value: Any, n: int) -> str | None:
    """In words, the shape of a value with a row per instance; None for any other."""
    if isinstance(value, Bag):
        return f"(a bag of {n} instances)" if len(value) == n else None
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, Tensor | np.ndarray) or hasattr(value, "tocsr"):
        shape = tuple(value.shape)
        return f"of shape {shape}" if n in shape[:1] or (shape[:1] == (1,) and n in shape[1:2]) else None
    if isinstance(value, list | tuple) and len(value) == n and n > 1:
        numeric = all(isinstance(v, int | float | list | tuple | np.ndarray | Tensor) for v in value)
        return f"(a {type(value).__name__} of {n})" if numeric else None
    return None
