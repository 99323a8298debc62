"""Messages on the command line propose flags that the command has."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.cli.test_cli import run
from xmil.cli._app import command_panels
from xmil.cli._command import REQUESTS, flags_of, in_flags
from xmil.core.request import Request


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "cohort.csv"
    path.write_text("accession,label\ns1,0\ns2,1\n")
    return path


def test_train_proposes_its_setting_of_the_slide_column(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[data]\ncohort = "{table}"\nfeatures = "{tmp_path}"\nsplit = "label"\n')
    words = ("train", config, "--dry-run")
    code, _, error = run(*words, capsys=capsys)
    assert code == 2
    assert "--set data.slide_column=" in error
    assert "--slide-column" not in error
    _, _, error = run(*words, "--set", "data.slide_column=accession", capsys=capsys)
    assert "slide_column" not in error


@pytest.mark.parametrize("words", [("inspect",), ("split",)])
def test_commands_take_the_slide_column_that_they_propose(
    words: tuple[str, ...], table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(*words, table, capsys=capsys)
    assert (code, "--slide-column" in error, "of xmil" in error) == (2, True, False)
    _, _, error = run(*words, table, "--slide-column", "accession", capsys=capsys)
    assert "slide" not in error


def requests_of_commands() -> dict[str, type[Request]]:
    """The request of every command, by its name."""
    for name in command_panels():
        import_module(f"xmil.cli.{name}")
    return REQUESTS


def test_no_command_is_told_a_flag_that_it_lacks() -> None:
    every = requests_of_commands()
    assert len(every) > 15
    parameters = {name for request in every.values() for name in request.model_fields}
    for command, request in every.items():
        own = flags_of(request)
        for parameter in parameters:
            sentence = in_flags(f"Pass `{parameter}=`.", own)
            if " of xmil " not in sentence and "--set " not in sentence:
                proposed = set(re.findall(r"--[\w-]+", sentence))
                assert proposed <= {flag.split()[0] for flag in own.values()}, (command, sentence)


def test_a_command_that_the_sentence_names_is_not_named_again() -> None:
    own = flags_of(requests_of_commands()["init"])
    assert in_flags("explain it with `target='all'`", own) == "explain it with --target all"
