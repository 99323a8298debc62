"""Requests: the options of a command, declared once, as one frozen object.

A field has a type, bounds, a default and a help text. The Python function builds the request from its
keywords, the command line from its options and `--config`; run.json stores it, and workers receive it
unchanged. Pydantic converts and checks the values; this module adds what a command line needs to know.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from operator import index
from os import PathLike, fspath
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Concatenate,
    Protocol,
    Self,
    SupportsIndex,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from xmil.core.errors import InputError, XmilError, bad_parameter

KEY = "option"
INPUT, WHAT, OUTPUT, COMPUTE = "Input", "What to explain", "Output", "Compute"  # panels of the help
OTHER_NAMES_OF_OUT = ("output_dir", "output_folder", "outdir", "out_dir", "save_dir")


@dataclass(frozen=True)
class Option:
    """What a command line needs to know about a field, besides its type and default.

    `panel` groups options in the help; `flag` is the flag if it differs from the field's name; `argument`
    makes it positional; `decides` marks options that change results: a run only continues with the same
    values. A `rare` option has no flag: `--config NAME=VALUE` sets it.
    """

    help: str
    panel: str | None = None
    flag: str = ""
    argument: bool = False
    decides: bool = False
    rare: bool = False


def option(
    help: str,  # noqa: A002 - the word of every command line
    default: Any = ...,
    *,
    panel: str | None = None,
    flag: str = "",
    argument: bool = False,
    decides: bool = False,
    rare: bool = False,
    **bounds: Any,
) -> Any:
    """Declare a field of a request: `steps: int = option("Steps per curve.", 100, panel="Advanced", ge=1)`.

    `bounds` are pydantic's: ge, gt, le.
    """
    about = Option(help, panel=panel, flag=flag, argument=argument, decides=decides, rare=rare)
    return Field(default, description=help, json_schema_extra={KEY: cast(Any, about)}, **bounds)


class Request(BaseModel):
    """A request; subclasses declare their fields with `option`.

    `has_config`: the command line also takes `--config FILE` and `--config NAME=VALUE`.
    """

    has_config: ClassVar[bool] = False
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )

    @classmethod
    def build(cls, **values: Any) -> Self:
        """Make a request from a caller's values: check names, convert values to the fields' types.

        >>> class Draw(Request):
        ...     out: Path = option("Folder.")
        ...     names: tuple[str, ...] = option("Slides.", ())
        >>> Draw.build(out="maps", names=["a", "b"])
        Draw(out=PosixPath('maps'), names=('a', 'b'))
        """
        values = cls._one_or_several(values)
        for name in values:
            if name not in cls.model_fields:
                raise unknown_parameter(cls, name)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise first_fault(error, cls) from None

    @classmethod
    def _one_or_several(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Accept `method` for `methods` and vice versa, whichever the request has."""
        own = set(cls.model_fields) & {"method", "methods"}
        other = ({"method", "methods"} - own) & set(values)
        if len(own) != 1 or not other:
            return values
        (name,) = own
        (alias,) = other
        if name in values:
            raise InputError(f"{alias}= and {name}= are the same parameter; pass one.", parameter=name)
        value = values.pop(alias)
        if name == "method" and not isinstance(value, str):
            methods = list(value)
            if len(methods) != 1:
                raise InputError(f"{owner(cls)} takes one method. Got {methods} instead.", parameter=name)
            value = methods[0]
        return {**values, name: value}

    @field_validator("*", mode="before")
    @classmethod
    def _accept_plain_values(cls, value: Any, info: Any) -> Any:
        """Accept what stands for a value at any door: one for several, text with commas, NumPy's numbers."""
        field = cls.model_fields[info.field_name]
        kind = field_kind(field)
        if value is None and kind is not field.annotation:  # it may be missing
            return None
        if get_origin(kind) is tuple:
            return _several(get_args(kind)[0], value)
        return _one(kind, value)

    def replace(self, **values: Any) -> Self:
        """Copy the request with other values, which must have the fields' types."""
        return self.model_copy(update=values)

    def as_dict(self) -> dict[str, Any]:
        """Convert the request to plain types for run.json; a loaded model or an open run becomes a name."""
        return self.model_dump(mode="json", fallback=lambda value: type(value).__name__)

    def words(self, *leave_out: str) -> list[str]:
        """List the options that differ from their defaults, as words of a command line.

        >>> class Draw(Request):
        ...     run: Path = option("Folder.")
        ...     clip: float | None = option("Scale.", None)
        ...     names: tuple[str, ...] = option("Slides.", (), flag="--only")
        ...     alpha: float = option("Opacity.", 0.5, rare=True)
        >>> Draw(run=Path("my run"), names=("a", "b"), alpha=0.3).words()
        ['--run', 'my run', '--only', 'a,b', '--config', 'alpha=0.3']
        """
        about = options(type(self))
        known = type(self).model_fields
        required = [name for name in about if known[name].is_required()]
        words = []
        for name in dict.fromkeys([*required, *about]):
            value = getattr(self, name)
            if name not in leave_out and value is not None and value != known[name].default:
                words += _words(name, value, about[name])
        return words

    def settings(self) -> dict[str, Any]:
        """The values of options that change results."""
        values = self.as_dict()
        return {name: values[name] for name, about in options(type(self)).items() if about.decides}


R = TypeVar("R", bound=Request)
T = TypeVar("T")


def options(request: type[Request]) -> dict[str, Option]:
    """List the options of a request by name: its own first, then inherited ones."""
    names = [name for kind in request.__mro__ for name in inspect.get_annotations(kind)]
    about = {name: cast(Any, field.json_schema_extra) for name, field in request.model_fields.items()}
    return {name: about[name][KEY] for name in dict.fromkeys(names) if name in about}


def field_kind(field: FieldInfo) -> Any:
    """The type of a field, without None.

    >>> field_kind(FieldInfo(annotation=int | None))
    <class 'int'>
    """
    kind: Any = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not NoneType)
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind


def owner(request: type[Request]) -> str:
    """Name the command of a request, for errors.

    >>> owner(type("ExplainRequest", (Request,), {}))
    'explain'
    """
    return request.__name__.removesuffix("Request").lower()


def unknown_parameter(request: type[Request], name: str) -> InputError:
    """Make the error for a parameter that a request does not have: what to write instead."""
    instead = REMOVED.get(f"{owner(request)}.{name}")
    if instead is not None:
        return InputError(f"The parameter {name!r} was removed: {instead}.", parameter=name)
    known = request.model_fields
    near = ["out"] if "out" in known and name in OTHER_NAMES_OF_OUT else get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else f". Those it has: {', '.join(known)}."
    return InputError(f"There is no parameter {name!r}{hint}", parameter=name)


def first_fault(error: ValidationError, request: type[Request]) -> XmilError:
    """Turn the first of pydantic's faults into the error of this package."""
    fault = error.errors()[0]
    own = fault.get("ctx", {}).get("error")
    if isinstance(own, XmilError):  # raised by a check of our own
        return own
    name = str(fault["loc"][0]) if fault["loc"] else ""
    if fault["type"] == "missing":
        what = f"is missing: {options(request)[name].help}"
        return InputError(f"The parameter {name!r} {what}", parameter=name, requirement=what)
    if not name:
        return InputError(fault["msg"].removeprefix("Value error, "))
    return bad_parameter(name, owner(request), requirement(fault, request.model_fields[name]), fault["input"])


_TYPES = {
    "int": "of type int",
    "float": "of type float",
    "bool": "of type bool",
    "string": "of type str",
    "path": "of type Path",
    "dict": "a table of names and values",
    "mapping": "a table of names and values",
    "is": "of another type",
}


def requirement(fault: ErrorDetails, field: FieldInfo) -> str:
    """Say what a value must be, by pydantic's fault and the field's bounds."""
    context = fault.get("ctx", {})
    if fault["type"] == "literal_error":
        return f"one of {str(context['expected']).replace(' or ', ', ').replace(chr(39), '')}"
    limits: dict[str, float] = {}
    for bound in field.metadata:
        limits |= {key: getattr(bound, key) for key in ("ge", "gt", "le") if hasattr(bound, key)}
    if context.keys() & limits.keys():
        low = f"({limits['gt']:g}" if "gt" in limits else f"[{limits['ge']:g}" if "ge" in limits else "(-inf"
        high = f"{limits['le']:.0f}]" if "le" in limits else "inf)"
        what = "an int" if field_kind(field) is int else "a float"
        return f"{what} in the range {low}, {high}"
    word = _TYPES.get(fault["type"].partition("_")[0])
    return word or fault["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


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
        with_attributes.run = function
        with_attributes.__signature__ = _signature(request, positional)
        return cast(Verb[T], verb)

    return decorate


def _signature(request: type[Request], positional: tuple[str, ...]) -> inspect.Signature:
    known = request.model_fields
    required = [name for name in options(request) if known[name].is_required()]
    parameters = []
    for name in dict.fromkeys([*positional, *required, *options(request)]):
        kind: Any = inspect.Parameter.KEYWORD_ONLY
        if name in positional:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = known[name].default
        if default is PydanticUndefined:
            default = inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=known[name].annotation))
    return inspect.Signature(parameters)


def _several(kind: Any, value: Any) -> Any:
    """Accept one value for several, and text with commas for a list of anything but paths."""
    if isinstance(value, str) and kind is not Path and kind is not Any:
        value = [] if value == "none" else [part.strip() for part in value.split(",") if part.strip()]
    if (
        isinstance(value, str | PathLike)
        or not isinstance(value, Iterable)
        or (kind is Any and not isinstance(value, list | tuple))
    ):
        value = [value]
    return tuple(_one(kind, one) for one in value)


def _one(kind: Any, value: Any) -> Any:
    if kind in (int, float) and isinstance(value, bool):
        raise ValueError(f"of type {kind.__name__}")
    if kind is str and isinstance(value, PathLike):
        return fspath(value)
    if kind is str and isinstance(value, SupportsIndex) and not isinstance(value, bool):  # NumPy's, too
        return str(index(value))
    return value


def _words(name: str, value: Any, about: Option) -> list[str]:
    """The words that set one option on a command line."""
    flag = about.flag or f"--{name.replace('_', '-')}"
    if about.rare:
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return ["--config", f"{name}={text.lower() if isinstance(value, bool) else text}"]
    if isinstance(value, bool):
        return [flag if value else f"--no-{name.replace('_', '-')}"]
    if isinstance(value, Mapping):
        return words_of_parameters(flag, value)
    if isinstance(value, tuple) and any(not isinstance(one, str | float) for one in value):
        return [word for one in value for word in (flag, str(one))]
    if isinstance(value, tuple):
        return [flag, ",".join(map(str, value)) or "none"]
    return [flag, str(value)]


def words_of_parameters(flag: str, parameters: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Write methods' own parameters as words of a command line.

    >>> words_of_parameters("--param", {"ig": {"steps": 100}, "lrp": {"preset": "paper"}})
    ['--param', 'ig.steps=100', '--param', 'lrp.preset=paper']
    """
    words = []
    for method, own in parameters.items():
        for name, value in own.items():
            text = value if isinstance(value, str) else json.dumps(value)
            words += [flag, f"{method}.{name}={text}"]
    return words


REMOVED = {  # parameters of the version before, by command, and what to write instead
    "explain.preset": "use `params={'lrp': {'preset': 'paper'}}`",
    "explain.contexts": "use `params={'lrp': {'contexts': 24}}`",
    "evaluate.run": "readers' annotations are compared by xmil study agreement",
    "evaluate.annotations": "readers' annotations are compared by xmil study agreement",
    "train.label": "use `set=data.label=COLUMN`",
    "train.device": "use `set=train.device=cuda`",
    "train.seed": "use `set=train.seed=1`",
    "train.follow_links": "use `set=data.follow_links=false`",
}
