"""The application: one command per file, one-line errors, exit codes."""

from __future__ import annotations

import ast
import logging
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

import xmil.cli as commands
from xmil._version import __version__
from xmil.core.errors import XmilError, refused

FAILED, NOTHING, INTERRUPTED = 1, 2, 130
PANELS = {  # in the order of the help; other commands come last
    "Start here": ("demo", "inspect", "doctor", "examples"),
    "From slides to features": ("tile", "embed"),
    "From features to a model": ("split", "train", "predict"),
    "Evidence": ("explain", "evaluate", "heatmap", "view", "inside", "insight", "export", "verify"),
    "Studies": ("study", "bench"),
}
OTHERS = "More"
GROUP = "xmil.commands"
logger = logging.getLogger(__name__)
UsageError = cast(
    type[Exception], typer.BadParameter.__bases__[0]
)  # click's; newer versions of typer include it


class _PlainFlags:
    """Show flags without a type in the help, since they take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in parameters:
            if getattr(one, "is_flag", False) and one.metavar is None:
                one.metavar = ""
        return parameters


class Command(_PlainFlags, TyperCommand):
    """A command with plain flags."""


class Group(_PlainFlags, TyperGroup):
    """A group of commands with plain flags."""


def build(name: str | None = None, *, every: bool = False) -> typer.Typer:
    """Make the application; only the named command is imported, or every one.

    The others are listed by the first lines of their docstrings, so that `xmil --help` is instant.
    """
    app = typer.Typer(
        name="xmil",
        help="Explanations for multiple instance learning on whole-slide images.",
        pretty_exceptions_enable=False,
        cls=Group,
    )
    app.callback()(_options)
    for each, panel in command_panels().items():
        if each != name and not every:
            app.command(each.replace("_", "-"), cls=Command, rich_help_panel=panel)(_listed_only(each))
            continue
        function = getattr(import_module(f"{commands.__name__}.{each}"), each)
        if isinstance(function, typer.Typer):  # a group of commands
            for one in function.registered_commands:
                one.cls = Command
            app.add_typer(function, name=each, cls=Group, rich_help_panel=panel)
        else:
            epilog = getattr(function, "epilog", None)
            app.command(each.replace("_", "-"), cls=Command, rich_help_panel=panel, epilog=epilog)(function)
    for point in entry_points(group=GROUP):  # commands of other packages
        try:
            if point.name.replace("-", "_") not in command_panels():
                app.command(point.name, rich_help_panel=OTHERS)(point.load())
        except Exception as error:  # plugins may raise anything
            logger.warning("The plugin %s of %s could not be loaded: %s", point.value, GROUP, error)
    return app


def _listed_only(name: str) -> Callable[[], None]:
    """A stand-in for a command in the list of all, with its first line of help."""

    def listed() -> None:
        raise AssertionError(name)  # its module is imported before it is called

    path = Path(commands.__file__).parent / f"{name}.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        makes_a_group = any(ast.unparse(one) == f"{name}.callback()" for one in node.decorator_list)
        if node.name == name or makes_a_group:
            listed.__doc__ = (ast.get_docstring(node) or "").partition("\n\n")[0]
    return listed


def command_panels() -> dict[str, str]:
    """Map each command to its panel, in the order of the help."""
    modules = sorted(m.name for m in pkgutil.iter_modules(commands.__path__) if not m.name.startswith("_"))
    placed = {name: panel for panel, names in PANELS.items() for name in names if name in modules}
    return placed | {name: OTHERS for name in modules if name not in placed}


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; print errors in one line, with --debug a traceback."""
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):  # names of files may not be valid text
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="xmil: %(message)s")
    try:
        words = [argument for argument in arguments if argument != "--debug"] or ["--help"]
        name = next((word.replace("-", "_") for word in words if not word.startswith("-")), None)
        app = build(name, every="_XMIL_COMPLETE" in os.environ)
        code = app(words, prog_name="xmil", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # typer caught the interrupt
            return _fail("interrupted.", code=INTERRUPTED)
        return code if isinstance(code, int) else 0
    except BrokenPipeError:  # the reader of the output has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted.", code=INTERRUPTED)
    except UsageError as error:
        return _fail(_usage(error))
    except XmilError as error:
        return _fail(str(error), debug=debug)
    except Exception as error:
        if isinstance(error, OSError) and (sentence := refused(error)) is not None:
            return _fail(sentence, debug=debug)
        return _fail(f"unexpected {type(error).__name__}: {error} (--debug shows where)", debug=debug)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"xmil {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and log messages.")] = False,
) -> None:
    """Declare the options before the command, which `run` has already read."""


MOVED = {"toy": "xmil bench --suite paper"}  # commands of the version before


def _usage(error: Any) -> str:
    """Say what is wrong with what was typed, and what to type instead."""
    context = getattr(error, "ctx", None)
    hint = " Try 'xmil --help'." if context is None else f" Try '{context.command_path} --help'."
    message = str(error.format_message()).rstrip()
    moved = [name for name in MOVED if message.startswith(f"No such command '{name}'")]
    if moved:
        return f"The command {moved[0]!r} is now {MOVED[moved[0]]}.{hint}"
    from xmil.cli._command import instead_of  # imports pydantic, which `xmil --help` does not need

    instead = instead_of(getattr(error, "option_name", None) or "", getattr(context, "info_name", None))
    if instead is not None:
        return instead
    return message + ("" if message.endswith((".", "?", "!")) else ".") + hint


def _fail(message: str, *, code: int = NOTHING, debug: bool = False) -> int:
    if debug:
        traceback.print_exc()
    print(f"xmil: error: {' '.join(message.split())}", file=sys.stderr)
    return code
