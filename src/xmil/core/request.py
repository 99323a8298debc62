"""Requests: the options of a command, declared once, as one frozen object.

A field has a type, a default and a help text. The Python function builds the request from its keywords, the
command line from its options; run.json stores it, and workers receive it unchanged.
"""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from numbers import Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Concatenate,
    Protocol,
    Self,
    SupportsIndex,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from xmil.core.errors import InputError, bad_parameter

KEY = "option"
MOST_PASSES = 100_000  # over a bag: sub-bags, orders, steps of a path or curve; more is a typing error
FOLDERS = ("output_dir", "output_folder", "outdir", "out_dir", "save_dir")  # other common names of `out`


@dataclass(frozen=True)
class Option:
    """The properties of a field besides its type and default.

    `panel` groups options in the help; `flag` is the flag on the command line if it differs from the field's
    name; `argument` makes it positional there; `choices` lists the allowed values; `parse` reads its text,
    whose default is `text`; `least` and `most` are the smallest and the largest number. `decides` marks
    options that change results: a run only continues with the same values.
    """

    help: str
    panel: str | None = None
    flag: str = ""
    argument: bool = False
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    text: str = ""
    decides: bool = False
    least: float | None = None
    most: float = math.inf


def option(
    help: str,  # noqa: A002 - the word of every command line
    default: Any = MISSING,
    **about: Any,
) -> Any:
    """Declare a field of a request: `steps: int = option("Steps per curve.", 100, panel="Advanced")`."""
    return field(default=default, metadata={KEY: Option(help, **about)})


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request; subclasses are frozen dataclasses whose fields are declared with `option`."""

    @classmethod
    def build(cls, **values: Any) -> Self:
        """Make a request from a caller's values: check names, convert values to the fields' types.

        >>> @dataclass(frozen=True, kw_only=True)
        ... class Draw(Request):
        ...     out: Path = option("Folder.")
        ...     names: tuple[str, ...] = option("Slides.", ())
        >>> Draw.build(out="maps", names=["a", "b"])
        Draw(out=PosixPath('maps'), names=('a', 'b'))
        """
        types = field_types(cls)
        values = cls.upgrade(cls._one_or_several(values))
        for name in values:
            if name not in types:
                near = ["out"] if "out" in types and name in FOLDERS else get_close_matches(name, types, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f". Those it has: {', '.join(types)}."
                raise InputError(f"There is no parameter {name!r}{hint}")
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
        if missing:
            raise InputError(f"The parameter {missing[0]!r} is missing: {options(cls)[missing[0]].help}")
        return cls(**{name: _convert(types[name], value, name, cls) for name, value in values.items()})

    @classmethod
    def _one_or_several(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Accept `method` for `methods` and vice versa, whichever the request has."""
        own = set(field_types(cls)) & {"method", "methods"}
        other = ({"method", "methods"} - own) & set(values)
        if len(own) != 1 or not other:
            return values
        (name,), (alias,) = own, other
        if name in values:
            raise InputError(f"{alias}= and {name}= are the same parameter; pass one.")
        value = values.pop(alias)
        if name == "method" and not isinstance(value, str):
            if len(methods := list(value)) != 1:
                raise InputError(f"{owner(cls)} takes one method. Got {methods} instead.")
            value = methods[0]
        return {**values, name: value}

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert parameters of the previous version to current ones; see `pop_old`."""
        return values

    def __post_init__(self) -> None:
        for name, about in options(type(self)).items():
            value = getattr(self, name)
            if about.choices:
                for one in value if isinstance(value, tuple) else (value,):
                    if one not in about.choices:
                        must = f"one of {', '.join(about.choices)}"
                        raise bad_parameter(name, owner(type(self)), must, one)
            if about.least is not None and value is not None and not about.least <= value <= about.most:
                end = "inf)" if math.isinf(about.most) else f"{about.most:.0f}]"
                must = f"in the range [{about.least:g}, {end}"
                raise bad_parameter(name, owner(type(self)), must, value)

    def as_dict(self) -> dict[str, Any]:
        """Convert the request to plain types for run.json."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    def words(self, *leave_out: str) -> list[str]:
        """List the options that differ from their defaults, as words of a command line.

        >>> @dataclass(frozen=True, kw_only=True)
        ... class Draw(Request):
        ...     run: Path = option("Folder.")
        ...     clip: float | None = option("Scale.", None)
        ...     shown: tuple[str, ...] = option("Slides.", (), flag="--names")
        ...     to: tuple[str, ...] = option("Formats.", ("png",))
        ...     area: tuple[float, ...] | None = option("Box.", None, parse=lambda text: text.split(","))
        >>> Draw(run=Path("my run"), shown=("a", "b")).words()
        ['--run', 'my run', '--names', 'a,b']
        >>> Draw(run=Path("r"), to=(), area=(1.5, 2.0)).words("run")
        ['--to', 'none', '--area', '1.5,2.0']
        """
        defaults, types, words = {f.name: f.default for f in fields(self)}, field_types(type(self)), []
        for name in sorted(options(type(self)), key=lambda name: defaults[name] is not MISSING):
            value, about = getattr(self, name), options(type(self))[name]
            if name in leave_out or value is None or value == defaults[name]:
                continue
            flag = about.flag or f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{name.replace('_', '-')}")
            elif isinstance(value, Mapping):
                each = [(f"{method}.{key}", v) for method, own in value.items() for key, v in own.items()]
                texts = [f"{place}={v if isinstance(v, str) else json.dumps(v)}" for place, v in each]
                words += [word for text in texts for word in (flag, text)]
            elif not isinstance(value, tuple):
                words += [flag, str(value)]
            elif types[name] == tuple[str, ...] or about.parse is not None:  # one text
                words += [flag, ",".join(map(str, value)) or "none"]
            else:
                words += [word for one in value for word in (flag, str(one))]
        return words

    def settings(self) -> dict[str, Any]:
        """The values of options that change results."""
        values = self.as_dict()
        return {name: values[name] for name, about in options(type(self)).items() if about.decides}


R = TypeVar("R", bound=Request)
T = TypeVar("T")


def options(request: type[Request]) -> dict[str, Option]:
    """List the options of a request by name: its own first, then inherited ones."""
    about = {f.name: f.metadata[KEY] for f in fields(request)}
    names = [name for kind in request.__mro__ for name in inspect.get_annotations(kind)]
    return {name: about[name] for name in dict.fromkeys(names) if name in about}


def field_types(request: type[Request]) -> dict[str, Any]:
    hints = get_type_hints(request)
    return {f.name: hints[f.name] for f in fields(request)}


def pop_old(values: dict[str, Any], name: str, advice: str) -> Any:
    """Remove a parameter of the previous version from the values, with a warning; None if it is missing."""
    if name not in values:
        return None
    _warn_caller(f"The parameter {name!r} will be removed in the next version: {advice}")
    return values.pop(name)


def _warn_caller(text: str) -> None:
    """Warn at the calling line outside this package, where Python shows deprecations."""
    frame, level, package = inspect.currentframe(), 1, __name__.partition(".")[0]
    while frame is not None and frame.f_globals["__name__"].partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, DeprecationWarning, stacklevel=level)


def owner(request: type[Request]) -> str:
    """Name the command of a request, for errors.

    >>> owner(type("ExplainRequest", (Request,), {}))
    'explain'
    """
    return request.__name__.removesuffix("Request").lower()


class Verb(Protocol[T]):
    """A function of a request's options; `run` takes the request itself, which the command line builds."""

    run: Callable[..., T]

    def __call__(self, *values: Any, **named: Any) -> T: ...


def takes(request: type[R], *positional: str) -> Callable[[Callable[Concatenate[R, ...], T]], Verb[T]]:
    """Turn a function of a request into one of its options: the first ones by position, the rest by name.

    Its signature, for `help`, comes from the request's fields. Other parameters of the function are passed by
    name.
    """

    def decorate(function: Callable[Concatenate[R, ...], T]) -> Verb[T]:
        others = list(inspect.signature(function).parameters)[1:]

        @wraps(function)
        def verb(*values: Any, **named: Any) -> T:
            if len(values) > len(positional):
                raise InputError(f"{function.__name__} takes {len(positional)} values by position.")
            extra = {name: named.pop(name) for name in others if name in named}
            return function(request.build(**dict(zip(positional, values, strict=False)), **named), **extra)

        with_attributes = cast(Any, verb)
        with_attributes.run, with_attributes.__signature__ = function, _signature(request, positional)
        return cast(Verb[T], verb)

    return decorate


def _signature(request: type[Request], positional: tuple[str, ...]) -> inspect.Signature:
    types, defaults = field_types(request), {f.name: f.default for f in fields(request)}
    required = [name for name in options(request) if defaults[name] is MISSING]
    parameters = []
    for name in dict.fromkeys([*positional, *required, *options(request)]):
        by_position = name in positional
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if by_position else inspect.Parameter.KEYWORD_ONLY
        default = inspect.Parameter.empty if defaults[name] is MISSING else defaults[name]
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=types[name]))
    return inspect.Signature(parameters)


def _convert(wanted: Any, value: Any, name: str, request: type[Request]) -> Any:
    """Convert a value to the type of its field, or refuse it by the parameter's name."""
    choices = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    if value is None and NoneType in choices:
        return None
    kind = next(one for one in choices if one is not NoneType)
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind)[0], value, name, request)
    accepted: dict[Any, Any] = {
        Path: (str, PathLike),
        str: (str, PathLike, SupportsIndex),
        bool: bool,
        int: SupportsIndex,
        float: Real,
    }
    if kind not in accepted:
        return value
    if isinstance(value, accepted[kind]) and (kind is bool) == isinstance(value, bool):
        return kind(value)
    raise bad_parameter(name, owner(request), f"of type {kind.__name__}", value)


def _tuple(kind: Any, value: Any, name: str, request: type[Request]) -> tuple[Any, ...]:
    """Convert one value or a list to a tuple; warn of text with commas, as on the command line."""
    if isinstance(value, str) and kind is str and "," in value:
        text = f"{name}={value!r}: pass a list, such as {[part.strip() for part in value.split(',')]}."
        _warn_caller(text)
        value = [part.strip() for part in value.split(",") if part.strip()]
    if kind is str and value in ("", "none"):
        return ()
    if isinstance(value, str | PathLike) or not isinstance(value, Iterable) or kind is Any:
        value = value if isinstance(value, list | tuple) else [value]
    return tuple(_convert(kind, one, name, request) for one in value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value) if isinstance(value, Path) else type(value).__name__  # a loaded model, an open run
