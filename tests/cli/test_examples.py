"""`xmil examples`: every command shown is one that the program takes."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.docs.test_code_blocks import check_command
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
