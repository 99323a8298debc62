"""Commands from requests: every field of a request becomes an option of the command line."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from xmil.cli._screen import Screen
from xmil.core.errors import InputError, XmilError, name_parameters
from xmil.core.request import (
    COMPUTE,
    INPUT,
    OUTPUT,
    REMOVED,
    WHAT,
    Option,
    Request,
    field_kind,
    options,
    owner,
    words_of_parameters,
)
from xmil.core.text import parse_toml_value, read_toml

SLIDES = "Slides without features"
PANELS = (None, INPUT, SLIDES, WHAT, OUTPUT, COMPUTE)
R = TypeVar("R", bound=Request)
F = TypeVar("F", bound=Callable[..., Any])
CONFIG = "A TOML file with options under their names, or NAME=VALUE; may be repeated."
REQUESTS: dict[str, type[Request]] = {}  # of the commands that are imported, by name
COMMANDS = {  # of requests with other names than their commands
    "draw": "heatmap",
    "study": "study init",
    "studyreport": "study report",
    "agreement": "study agreement",
}
ABSTRACT = ("", "run", "device", "seeded", "files", "cohort")  # requests that commands share
TYPED = "COMMANDLINE"  # where click has a value from that the user typed


def command(request: type[R]) -> Callable[[Callable[[R, Screen], int]], Callable[..., int]]:
    """Turn a function of a request and a screen into a command with the request's options and --json."""

    def decorate(function: Callable[[R, Screen], int]) -> Callable[..., int]:
        flags = flags_of(request)
        REQUESTS[function.__name__] = request

        def run(context: typer.Context, **values: Any) -> int:
            screen = Screen(lambda sentence: in_flags(sentence, flags), as_json=values.pop("as_json"))
            typed = {name: value for name, value in values.items() if is_typed(context, name)}
            for name in typed.keys() & request.model_fields.keys():
                if is_list_of_text(field_kind(request.model_fields[name])):
                    typed[name] = ",".join(typed[name])  # given once with commas, or several times
            try:
                texts = typed.pop("config", ()) if request.has_config else ()
                settings = read_config(texts, request)
                return function(request.build(**{**settings, **typed}), screen)
            except XmilError as error:
                raise XmilError(say_error(error, flags)) from error

        parameters = parameters_of(request)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__module__ = function.__name__, function.__module__
        run.__doc__ = function.__doc__ or request.__doc__
        run.epilog = rare_options(request)  # type: ignore[attr-defined]
        return run

    return decorate


def parameters_of(request: type[Request]) -> list[inspect.Parameter]:
    """Declare for typer its context, the options of a request that have a flag, --config and --json."""
    about = options(request)
    panels = list(dict.fromkeys((*PANELS, *(one.panel for one in about.values()))))

    def place(name: str) -> tuple[bool, int, bool]:
        is_optional = not request.model_fields[name].is_required()
        return not about[name].argument, panels.index(about[name].panel), is_optional

    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("context", by_name, annotation=typer.Context)]
    shown = sorted((name for name in about if not about[name].rare), key=place)
    parameters += [_parameter(name, request, about[name]) for name in shown]
    if request.has_config:
        config = typer.Option(help=CONFIG, rich_help_panel=OUTPUT, metavar="FILE|NAME=VALUE")
        parameters.append(_keyword("config", list[str] | None, config, None))
    as_json = typer.Option("--json", help="Print the report as JSON.", rich_help_panel=OUTPUT)
    return [*parameters, _keyword("as_json", bool, as_json, False)]


def instead_of(flag: str, command_name: str | None) -> str | None:
    """Say what to type instead of a flag that a command does not have; None if nothing is known."""
    request = REQUESTS.get(command_name or "")
    name = flag.lstrip("-").removeprefix("no-").replace("-", "_")
    if request is None:
        return None
    if name in request.model_fields and options(request)[name].rare:
        return f"{flag} has no flag of its own: use --config {name}=VALUE, or a file of --config."
    instead = REMOVED.get(f"{owner(request)}.{name}")
    return (
        None if instead is None else f"The option {flag} was removed: {in_flags(instead, flags_of(request))}."
    )


def with_examples(*lines: str) -> Callable[[F], F]:
    """Add example commands to the help of a command, after its first sentence."""

    def decorate(function: F) -> F:
        first, *rest = (function.__doc__ or "").split("\n\n")
        shown = "\n".join(f"    xmil {line}" for line in lines)
        function.__doc__ = "\n\n".join((first, "Examples:", shown, *rest))
        return function

    return decorate


def flags_of(request: type[Request]) -> dict[str, str]:
    """Map each parameter of a request to what one types for it."""
    flags = {}
    for name, about in options(request).items():
        flags[name] = about.flag or f"--{name.replace('_', '-')}"
        if about.rare:
            flags[name] = f"--config {name}="
        elif about.argument:
            flags[name] = name.upper()
    for name, other in (("method", "methods"), ("methods", "method")):
        if name in flags:
            flags.setdefault(other, flags[name])
    return flags


def in_flags(sentence: str, flags: Mapping[str, str]) -> str:
    """Put the parameters of a sentence into the words of the command line.

    An option that the command lacks is written as the setting of `xmil train`, or with a command that has it.

    >>> own = {"out": "--out", "restart": "--restart", "links": "--links", "size": "--config size="}
    >>> in_flags("choose another `out=`, or `restart=True`; `links=False`; `size=`", own)
    'choose another --out, or --restart; --no-links; --config size=...'
    >>> in_flags("pass `patch_size=`, or `forward=`", own)
    'pass --patch-size of xmil explain, or forward='
    """

    def say(name: str, value: str | None) -> str:
        if value is None:  # it is at fault
            return flags.get(name, f"The {name!r} parameter").removesuffix("=")
        if name == "params" and name in flags and value.startswith("{"):
            return " ".join(words_of_parameters(flags[name], ast.literal_eval(value)))
        value = value.strip("'\"")
        if name in flags:
            return _with_value(flags[name], value)
        setting = find_setting(name) if "set" in flags else None
        if setting is not None:
            return f"--set {setting}={value}"
        method = find_method(name) if "params" in flags else None
        if method is not None:
            return f"{flags['params']} {method}.{name}={value}"
        for command_name, flag in find_elsewhere(name):
            is_named = re.search(rf"\b{command_name}\b", sentence) is not None
            return _with_value(flag, value) + ("" if is_named else f" of xmil {command_name}")
        return f"{name}={value}"

    return name_parameters(sentence, say)


def _with_value(flag: str, value: str) -> str:
    """Write a flag with its value.

    >>> _with_value("--links", "False"), _with_value("--config tiff=", "True"), _with_value("--by", "case")
    ('--no-links', '--config tiff=true', '--by case')
    """
    if flag.endswith("="):
        return f"{flag}{value.lower() if value in ('True', 'False') else value or '...'}"
    if value == "False":
        return flag.replace("--", "--no-", 1)
    return f"{flag} {value}" if value and value != "True" else flag


def find_elsewhere(name: str) -> Iterator[tuple[str, str]]:
    """List the commands over slides that have a parameter, `explain` first, with what one types there."""
    from xmil.runs import requests

    kinds = [kind for kind in vars(requests).values() if isinstance(kind, type) and issubclass(kind, Request)]
    named = {COMMANDS.get(owner(kind), owner(kind)): kind for kind in kinds if owner(kind) not in ABSTRACT}
    for command_name in sorted(named, key=lambda one: (one != "explain", one)):
        flags = flags_of(named[command_name])
        if name in flags:
            yield command_name, flags[name]


def find_setting(name: str) -> str | None:
    """Find a setting of `xmil train` by the name of a parameter."""
    from xmil.training.config import Config, Data, Section, Train

    if name in Config.model_fields:
        return name
    sections: dict[str, type[Section]] = {"data": Data, "train": Train}
    return next((f"{key}.{name}" for key, kind in sections.items() if name in kind.model_fields), None)


def say_error(error: XmilError, flags: Mapping[str, str]) -> str:
    """Say an error in the words of the command line."""
    sentence, flag = str(error), flags.get(error.parameter or "")
    if error.requirement is not None and flag is not None:
        sentence = f"{flag.removesuffix('=')} {error.requirement}"
    elif error.requirement is not None and "params" in flags and error.owner in _loaded_methods():
        sentence = f"{flags['params']} {error.owner}.{error.parameter} {error.requirement}"
    return in_flags(sentence, flags)


def find_method(parameter: str) -> str | None:
    """Find a method that has a parameter."""
    methods = _loaded_methods()
    return next((name for name in methods if parameter in methods[name].parameters), None)


def _loaded_methods() -> Mapping[str, Any]:
    """The explanation methods, if they have been imported: an error of theirs is then possible."""
    methods = sys.modules.get("xmil.methods")
    return {} if methods is None else methods.METHODS


def is_typed(context: Any, name: str) -> bool:
    """Whether the user typed an option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == TYPED


def is_list_of_text(kind: Any) -> bool:
    """Whether an option is a list whose members may be separated by commas."""
    return get_origin(kind) is tuple and get_args(kind)[0] not in (Path, Any)


def read_config(texts: Sequence[str], request: type[Request]) -> dict[str, Any]:
    """Read options from TOML files and NAME=VALUE, under the names of parameters or flags; later ones win."""
    values: dict[str, Any] = {}
    names = {about.flag.lstrip("-"): name for name, about in options(request).items() if about.flag}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals and name.replace("_", "").replace("-", "").isalnum():  # a file of such a name: ./a=b
            values[name.strip().replace("-", "_")] = parse_toml_value(value.strip())
            continue
        if not equals and name.replace("-", "_") in request.model_fields and not Path(text).exists():
            raise InputError(f"{text}: has no value; write --config {text}=VALUE.")
        content = read_toml(text, way="give options under their names, such as steps = 50")
        values |= {key.replace("-", "_"): one for key, one in content.items()}
    return {names.get(name, name): value for name, value in values.items()}


def rare_options(request: type[Request]) -> str | None:
    """The part of a command's help on the options that have no flag; None without any."""
    lines = []
    for name, about in options(request).items():
        default = request.model_fields[name].default
        shown = ""
        if isinstance(default, str | int | float) and not isinstance(default, bool) and default != "":
            shown = f" (default: {default})"
        if about.rare:
            lines.append(f"{name}: {about.help}{shown}")
    if not lines:
        return None
    return "\n\n".join(["Set by --config NAME=VALUE, or in the file of --config:", *lines])


def _parameter(name: str, request: type[Request], about: Option) -> inspect.Parameter:
    """Declare an option of a request for typer."""
    field = request.model_fields[name]
    kind, default = _on_the_line(field_kind(field), field.default)
    text = about.help
    if field.is_required():
        text, default = f"{about.help} (required)", None
    if about.argument:
        metavar = f"{name.upper()}..." if get_origin(kind) is list else name.upper()
        return _keyword(
            name, kind | None, typer.Argument(help=text, metavar=metavar, show_default=False), None
        )
    flag = about.flag or f"--{name.replace('_', '-')}"
    if kind is bool and default is True:
        flag = f"{flag}/--no-{name.replace('_', '-')}"
    settings: dict[str, Any] = {"help": text, "rich_help_panel": about.panel}
    if is_list_of_text(field_kind(field)):
        settings["metavar"] = "A,B,..."
    elif get_origin(kind) is list:
        settings["metavar"] = "<path>" if get_args(kind)[0] is Path else f"<{name}>"
    if get_origin(field_kind(field)) is Mapping:
        settings["metavar"] = "METHOD.NAME=VALUE"
    shown = kind if default is not None else kind | None
    return _keyword(name, shown, typer.Option(flag, **settings), default)


def _keyword(name: str, kind: Any, spelling: Any, default: Any) -> inspect.Parameter:
    annotation = Annotated.__class_getitem__((kind, spelling))  # type: ignore[attr-defined]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _on_the_line(kind: Any, default: Any) -> tuple[Any, Any]:
    """The type of an option on the command line, and its default there; the request converts it."""
    if get_origin(kind) is tuple and get_args(kind)[-1] is Path:  # a fixed number of paths
        return kind, default
    if get_origin(kind) is tuple:
        several = list[Path] if get_args(kind)[0] is Path else list[str]
        return several, list(map(str, default)) or None if isinstance(default, tuple) else None
    if get_origin(kind) is Mapping or get_origin(kind) is dict:
        return list[str], None
    if kind is Any:  # a run's folder, or the name of a function that builds a model
        return Path, default
    if kind in (int, float, bool, Path):
        return kind, default
    return str, default
