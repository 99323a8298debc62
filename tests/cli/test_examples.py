"""`xmil examples` and the help: every command shown is one that the program takes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.docs.test_code_blocks import check_command, group
from xmil.cli import main
from xmil.cli.examples import EXAMPLES


def test_ten_tasks_ten_commands() -> None:
    assert len(EXAMPLES) == 10


@pytest.mark.parametrize("line", EXAMPLES.values())
def test_commands_are_taken(line: str) -> None:
    for command in line.split(" && "):
        words = shlex.split(command)
        assert words[0] == "xmil"
        check_command(words[1:])


def test_printed_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["examples"])
    assert "    xmil demo\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["examples", "--json"])
    assert json.loads(capsys.readouterr().out) == EXAMPLES


def every_command(command: Any, name: str = "xmil") -> Iterator[tuple[str, str]]:
    """The name and the help of a command and of those inside it."""
    if name != "xmil":
        yield name, command.help
    for inner in getattr(command, "commands", {}).values():
        yield from every_command(inner, f"{name} {inner.name}")


@pytest.mark.parametrize(("name", "text"), list(every_command(group())))
def test_help_opens_with_a_sentence_and_two_examples(name: str, text: str) -> None:
    sentence, heading, shown, *_ = text.split("\n\n")
    assert re.fullmatch(r"[A-Z][^.]*(\.[^ .]+[^.]*)*\.", sentence)
    assert heading == "Examples:"
    lines = shown.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"    {name}")
        check_command(shlex.split(line)[1:])
