"""README and docs: Python blocks run, commands and options exist, and TOML parses."""

from __future__ import annotations

import re
import tomllib
import warnings
from argparse import ArgumentParser
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from runpy import run_module
from typing import Any, NoReturn

import pytest
import typer

import xmil
from tests.docs.made_up import names, write_files
from tests.docs.pages import PAGES, Block, blocks, command_lines, inline_commands, page_name
from xmil.cli._app import build
from xmil.data.readers import READERS
from xmil.encoders import ENCODERS
from xmil.lrp import RULES
from xmil.methods import METHODS
from xmil.models import MODELS


@lru_cache(maxsize=1)
def group() -> Any:
    return typer.main.get_command(build(every=True))


@pytest.fixture(autouse=True)
def _own_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page or an imported benchmark registers goes with its test."""
    xmil.list_formats()  # the built-in readers are there
    for registry in (READERS, ENCODERS, RULES, MODELS, METHODS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_python_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of a page run one after another, in a folder with small made-up files."""
    found = [block for block in blocks(page) if block.language in ("python", "py") and block.not_run is None]
    if not found:
        return
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, page.read_text("utf-8"))
    space = names(tmp_path)
    for block in found:
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        exec(code, space)  # noqa: S102  # our own pages


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_command_lines_parse(page: Path) -> None:
    """Every `xmil` line of a shell block is one that the program takes, options, types and arguments."""
    for words in command_lines(page):
        if words[0] == "xmil":
            check_command(words[1:])
        else:
            check_module(*words[2:])


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_inline_commands_exist(page: Path) -> None:
    """Commands within sentences may be cut short, but they and their options exist."""
    for text in inline_commands(page):
        words = text.split()
        if words[0] == "python":
            check_module(*words[2:])
        elif re.fullmatch(r"[a-z][a-z-]*", words[1]):
            command = group().commands.get(words[1])
            assert command is not None, f"there is no command {text!r}"
            options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
            unknown = set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", text)) - options
            assert not unknown, f"{text}: {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_toml_blocks_parse(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            tomllib.loads(block.code)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_blocks_that_do_not_run_say_why(page: Path) -> None:
    short = [block.line for block in blocks(page) if block.not_run is not None and len(block.not_run) < 10]
    assert short == []


def check_command(words: list[str]) -> None:
    """Parse without running; a placeholder in capitals stands for a file or folder."""
    if words[0].startswith("--"):
        assert words[0] in {name for parameter in group().params for name in parameter.opts} | {"--help"}
        return
    command, (name, *rest) = group().commands.get(words[0]), words
    assert command is not None, f"there is no command 'xmil {words[0]}'"
    if rest and rest[0] in (inner := getattr(command, "commands", {})):
        command, (name, *rest) = inner[rest[0]], rest
    if "--help" not in rest:
        command.make_context(name, [word for word in rest if word != "--debug"])


def check_module(name: str, *words: str) -> None:
    """A module that is there, and, if it is ours, imports and takes these options; nothing is run."""
    assert find_spec(name) is not None, f"there is no module {name}"
    if name.partition(".")[0] not in ("benchmarks", "tests"):
        return
    import_module(name)
    if not any(word.startswith("--") for word in words):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [name, *words])
        patch.setattr(ArgumentParser, "parse_args", parse_only)
        patch.setattr(ArgumentParser, "error", complain)
        warned = warnings.catch_warnings(action="ignore")  # runpy's, of a module that is imported already
        with warned, pytest.raises(SystemExit) as done:
            run_module(name, run_name="__main__")
    assert done.value.code is None, done.value


def parse_only(parser: ArgumentParser, *args: Any) -> NoReturn:
    unknown = parser.parse_known_args(*args)[1]
    raise SystemExit(f"{parser.prog}: unknown: {unknown}" if unknown else None)


def complain(parser: ArgumentParser, message: str) -> NoReturn:
    """A sentence may cut a command short."""
    raise SystemExit(None if "are required" in message else f"{parser.prog}: {message}")


def test_the_checks_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Run `xmil split --fold`.\n\n<!-- not run: needs a moon -->\n```python\nraise SystemExit\n```\n\n"
        "```sh\nxmil evaluate --model M --features \\\n  D --out O --steps 1 | head\nxmil nothing\n```\n\n"
        "    xmil bench --quick\n"
    )
    [python, shell] = blocks(page)
    assert python == Block(page, "python", "raise SystemExit\n", 5, "needs a moon")
    assert (shell.language, shell.not_run) == ("sh", None)
    lines = list(command_lines(page))
    assert lines[0] == ["xmil", "evaluate", "--model", "M", "--features", "D", "--out", "O", "--steps", "1"]
    assert lines[1:] == [["xmil", "nothing"], ["xmil", "bench", "--quick"]]
    check_command(lines[0][1:])
    with pytest.raises(AssertionError, match="there is no command"):
        check_command(lines[1][1:])
    with pytest.raises(Exception, match="No such option"):
        check_command(["evaluate", "--model", "M", "--features", "D", "--out", "O", "--worst"])
    with pytest.raises(AssertionError, match="--worst"):
        check_module("benchmarks.flip", "--plain", "--worst")
    with pytest.raises(AssertionError, match="--fold"):
        test_inline_commands_exist(page)
