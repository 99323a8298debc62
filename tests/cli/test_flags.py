"""Messages on the command line propose flags that the command has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from tests.cli.test_cli import run
from xmil.cli._app import RUNNING, build
from xmil.cli._screen import OTHERS, _flags, as_flags, command_flags
from xmil.cli._screen import as_text as report_text


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


@pytest.fixture(scope="module")
def contexts() -> dict[str, typer.Context]:
    """A context for every command, as if it ran."""
    group = typer.main.get_command(build())
    root = typer.Context(group, info_name="xmil")
    commands = {}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        context = typer.Context(command, info_name=name, parent=root)
        inner = getattr(command, "commands", {})
        for sub, one in inner.items():
            commands[f"{name} {sub}"] = typer.Context(one, info_name=sub, parent=context)
        if not inner:
            commands[name] = context
    return commands


def test_no_command_is_told_a_flag_that_it_lacks(contexts: dict[str, typer.Context]) -> None:
    for name, context in contexts.items():
        token = RUNNING.set(context)
        try:
            own = command_flags(context.command)
            for parameter in _flags():
                sentence = as_flags(f"Pass {parameter}=.")
                proposed = set(re.findall(r"--[\w-]+", sentence))
                is_elsewhere = " of xmil " in sentence or parameter in OTHERS
                assert proposed <= own or is_elsewhere, (name, sentence)
        finally:
            RUNNING.reset(token)


def test_a_command_that_the_sentence_names_is_not_named_again(contexts: dict[str, typer.Context]) -> None:
    token = RUNNING.set(contexts["study init"])
    try:
        assert as_flags("explain it with target='all'") == "explain it with --target all"
    finally:
        RUNNING.reset(token)


def test_the_running_command_is_forgotten(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("split", table, capsys=capsys)
    assert RUNNING.get() is None
    report = {"error": "choose one with format=."}
    assert report_text(report) == "xmil: error: choose one with --format."
