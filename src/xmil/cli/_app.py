"""The application: one command per file, one-line errors, exit codes."""

from __future__ import annotations

import logging
import os
import pkgutil
import re
import sys
import traceback
from contextvars import ContextVar
from importlib import import_module
from importlib.metadata import entry_points
from io import TextIOWrapper
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
    "Studies": ("study", "toy", "bench"),
}
OTHERS = "More"
GROUP = "xmil.commands"
RUNNING: ContextVar[Any] = ContextVar("running", default=None)  # click's context of the running command
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
    """A command with plain flags, whose messages propose its own flags."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; `run` forgets it once its error is printed."""
        RUNNING.set(ctx)
        return super().invoke(ctx)


class Group(_PlainFlags, TyperGroup):
    """A group of commands with plain flags."""


def build() -> typer.Typer:
    """Make the application, with one command for each public module of this package."""
    app = typer.Typer(
        name="xmil",
        help="Explanations for multiple instance learning on whole-slide images.",
        pretty_exceptions_enable=False,
        cls=Group,
    )
    app.callback()(_options)
    for name, panel in command_panels().items():
        function = getattr(import_module(f"{commands.__name__}.{name}"), name)
        if isinstance(function, typer.Typer):  # a group of commands
            for each in function.registered_commands:
                each.cls = Command
            app.add_typer(function, name=name, cls=Group, rich_help_panel=panel)
        else:
            app.command(name.replace("_", "-"), cls=Command, rich_help_panel=panel)(function)
    for point in entry_points(group=GROUP):  # commands of other packages
        try:
            if point.name.replace("-", "_") not in command_panels():
                app.command(point.name, rich_help_panel=OTHERS)(point.load())
        except Exception as error:  # plugins may raise anything
            logger.warning("The plugin %s of %s could not be loaded: %s", point.value, GROUP, error)
    return app


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
        code = build()(words, prog_name="xmil", standalone_mode=False)
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
    finally:
        RUNNING.set(None)


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


REMOVED = {  # options of the previous version, of all commands or of one, with the replacement
    "--time": "use --label TIME,EVENT",
    "--event": "use --label TIME,EVENT",
    "--keep": "use --param lrp.keep=0.5",
    "--save-vectors": "use --param lrp.feature_level=true",
    "--slide": "use --slides, with a file or a folder",
    "--full-digests": "set the environment variable XMIL_FULL_DIGESTS=1",
    "--address": "use --engine ray:ADDRESS",
    "--cpus": "a worker takes one CPU",
    "--gpus": "use --device cuda/4 for four workers on a GPU, --device cuda/1 for one each",
    "--decode": "JPEG tiles are decoded by the CPU, which was no slower",
    "--best": "the best method is always named",
    "--top": "sufficiency and necessity use a tenth of the patches",
    "--method": "use --methods",
    "inside --method": "use --map",
    "--threads": "set the environment variable OMP_NUM_THREADS",
    "embed --threads": "there are as many as cores, at most 16",
    "--mean": "use --normalise, with mean and standard deviation",
    "--std": "use --normalise, with mean and standard deviation",
    "--pen": "use --drop none",
    "--no-pen": "use --drop pen",
    "--fold": "use --drop without fold",
    "--blur": "use --drop without blur",
    "--coverslip": "use --drop without coverslip",
    "--no-fold": "use --drop fold",
    "--no-blur": "use --drop blur",
    "--no-coverslip": "use --drop coverslip",
    "--formats": "use --to, such as --to png,geojson",
    "--exports": "use --to, such as --to png,geojson",
    "--percentile": "use --clip with the number, such as --clip 99",
    "--pooled": "use --released, which draws images and bags as the released code does",
    "--shared-bags": "use --released, which draws images and bags as the released code does",
    "--report": "leave out --suite, and the page is written from the results in --out",
    "--positive": "use --classes POSITIVE,AGAINST",
    "--against": "use --classes POSITIVE,AGAINST",
    "bench --features": "use --encoder FILE.npz",
    "--token": "set the environment variable XMIL_TOKEN, or use --token-file",
    "train --workers": "use --set train.workers=N",
    "train --repeats": "use --set train.repeats=N",
    "train --epochs": "use --set train.epochs=N",
    "train --split": "use --set data.split=COLUMN",
    "train --folds": "use --set data.folds=N",
    "train --from": "use --set data.source=embeddings",
}


def _usage(error: Any) -> str:
    context, name = getattr(error, "ctx", None), getattr(error, "option_name", "")
    command = getattr(context, "info_name", None)
    instead = REMOVED.get(f"{command} {name}", REMOVED.get(name))
    has = {
        each
        for parameter in getattr(getattr(context, "command", None), "params", ())
        for each in parameter.opts
    }
    if instead is not None and has.issuperset(re.findall(r"--[a-z-]+", instead)):  # else a typing error
        return f"The option {name} was removed: {instead}."
    hint = " Try 'xmil --help'." if context is None else f" Try '{context.command_path} --help'."
    message = str(error.format_message()).rstrip()
    return message + ("" if message.endswith((".", "?", "!")) else ".") + hint


def _fail(message: str, *, code: int = NOTHING, debug: bool = False) -> int:
    if debug:
        traceback.print_exc()
    from xmil.cli._screen import as_flags

    print(f"xmil: error: {as_flags(' '.join(message.split()))}", file=sys.stderr)
    return code
