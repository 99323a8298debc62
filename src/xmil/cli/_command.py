"""Commands from requests: every option of a request becomes an option of the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from xmil.cli._screen import Screen
from xmil.core.request import Option, Request, field_types, options
from xmil.core.text import listed
from xmil.runs.requests import ADVANCED, COMPUTE, INPUT, OUTPUT, SLIDES, WHAT, parse_parameters

PANELS = (INPUT, SLIDES, WHAT, OUTPUT, COMPUTE, ADVANCED)
R = TypeVar("R", bound=Request)
F = TypeVar("F", bound=Callable[..., Any])
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes a GPU if there is one.")]
Layout = Annotated[
    str, typer.Option("--format", help="Layout of the feature files, if it cannot be recognised.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.", rich_help_panel="Output")]


def command(request: type[R]) -> Callable[[Callable[[R, Screen], int]], Callable[..., int]]:
    """Turn a function of a request and a screen into a command with the request's options and --json."""

    def decorate(function: Callable[[R, Screen], int]) -> Callable[..., int]:
        types, about = field_types(request), options(request)
        defaults = {f.name: f.default for f in fields(request)}

        def run(**values: Any) -> int:
            screen = Screen(values.pop("as_json"))
            read = {name: _read(types[name], about[name], value) for name, value in values.items()}
            return function(request.build(**{k: v for k, v in read.items() if v is not MISSING}), screen)

        panels = list(dict.fromkeys((None, *PANELS, *(about[name].panel for name in about))))
        order = sorted(
            about,
            key=lambda name: (
                not about[name].argument, panels.index(about[name].panel), defaults[name] is not MISSING
            ),
        )  # fmt: skip
        parameters = [_parameter(name, types[name], about[name], defaults[name]) for name in order]
        last = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
        run.__signature__ = inspect.Signature([*parameters, last])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*parameters, last)}
        run.__name__, run.__module__ = function.__name__, function.__module__
        run.__doc__ = function.__doc__ or request.__doc__
        return run

    return decorate


def with_examples(*lines: str) -> Callable[[F], F]:
    """Add example commands to the help of a command, after its first sentence."""

    def decorate(function: F) -> F:
        first, *rest = (" ".join(part.split()) for part in (function.__doc__ or "").split("\n\n"))
        shown = "\n".join(f"    xmil {line}" for line in lines)
        function.__doc__ = "\n\n".join((first, "Examples:", shown, *rest))
        return function

    return decorate


def _parameter(name: str, kind: Any, about: Option, default: Any) -> inspect.Parameter:
    """Declare an option of a request for typer."""
    settings: dict[str, Any] = {"help": about.help, "rich_help_panel": about.panel}
    shown, text = _on_the_line(kind, about)
    spelling: Any
    if default is not MISSING:
        default = text(default)
    if about.argument:
        spelling = typer.Argument(help=about.help)
    else:
        flag = about.flag or f"--{name.replace('_', '-')}"
        if shown is bool and default is True:
            flag = f"{flag}/--no-{name.replace('_', '-')}"
        if _is_list_of_text(kind):
            settings["metavar"] = "A,B,..."
        spelling = typer.Option(flag, **settings)
    annotation = Annotated.__class_getitem__((shown, spelling))  # type: ignore[attr-defined]
    empty = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=empty, annotation=annotation)


def _is_list_of_text(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[0] is str


def _on_the_line(kind: Any, about: Option) -> tuple[Any, Callable[[Any], Any]]:
    """Return the type of an option on the command line, and a function that writes its default."""
    if about.parse is not None:
        return str, lambda _: about.text
    if kind is Any:
        return Path, lambda value: value
    if _is_list_of_text(kind):
        return str, ",".join
    if get_origin(kind) is tuple:
        return list[Path], lambda value: list(value) or None
    if get_origin(kind) is UnionType and Mapping in {get_origin(one) for one in get_args(kind)}:
        return list[str] | None, lambda _: None
    if kind == str | None:
        return str, lambda value: value or ""
    return kind, lambda value: value


def _read(kind: Any, about: Option, value: Any) -> Any:
    """Convert an option from the command line to its value; MISSING if it was not used."""
    if about.parse is not None:
        return about.parse(value) if value else MISSING
    if _is_list_of_text(kind):
        return listed(value)
    if get_origin(kind) is UnionType and Mapping in {get_origin(one) for one in get_args(kind)}:
        return parse_parameters(value or [])
    if value is None or (kind == str | None and not value):
        return MISSING
    return value
