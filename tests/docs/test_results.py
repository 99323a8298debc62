"""The page of results: every file of it is complete, and the README quotes only what is in one."""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path

import pytest
from benchmarks.record import write_results

from tests.docs.pages import ROOT, command_lines
from tests.docs.test_code_blocks import check_command, check_module

sys.path.insert(0, str(ROOT / "docs"))
import results_page

FILES = results_page.results_files()
SUBJECTS = ("table1", "tissue", "foreign-models", "speed", "scale", "reliability")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def numbers(text: str) -> list[str]:
    """The numbers of a text, without separators.

    >>> numbers("1,000 patches: 0.24 s, equal to 5e-7, Table1")
    ['1000', '0.24', '5e-7']
    """
    return [number.replace(",", "") for number in _NUMBER.findall(text)]


def is_recorded(figure: str, recorded: list[str]) -> bool:
    """Whether a figure is one of those recorded, or one of them rounded."""
    digits = len(figure.partition(".")[2])
    exact = "e" in figure
    return any(
        figure == other if exact else "e" not in other and f"{float(other):.{digits}f}" == figure
        for other in recorded
    )


def test_every_subject_has_a_file() -> None:
    assert set(SUBJECTS) <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_results_is_complete(path: Path, tmp_path: Path) -> None:
    results = json.loads(path.read_text("utf-8"))
    assert tuple(results) == results_page.KEYS
    assert all(results[key] for key in results_page.KEYS if key != "note")
    assert datetime.date.fromisoformat(results["date"]) <= datetime.date.today()
    assert {len(row) for row in results["rows"]} == {len(results["columns"])}
    page = tmp_path / "page.md"
    page.write_text(results_page.section(results), encoding="utf-8")
    assert any(numbers(cell) for row in results["rows"] for cell in row)
    for words in command_lines(page):
        check_command(words[1:]) if words[0] == "xmil" else check_module(*words[2:])
    for line in results["command"].splitlines():
        script = re.match(r"(?:python )?(benchmarks/\S+)", line)
        assert script is None or (ROOT / script[1]).is_file()
        assert script or re.match(r" |xmil |python -m |XMIL_\w+=|pip |make ", line), line


def test_the_page_is_current() -> None:
    """`python docs/results_page.py` writes it anew."""
    assert results_page.PAGE.read_text("utf-8") == results_page.results_page()


def test_the_readme_quotes_results() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    measured = re.search(r"^## Measured\n(.*?)^## ", text, re.M | re.S)
    assert measured is not None
    rows = [line.split("|")[1:-1] for line in measured[1].splitlines() if line.startswith("|")][2:]
    assert rows
    recorded = numbers(" ".join(path.read_text("utf-8") for path in FILES))
    quoted = [number for row in rows for number in numbers(row[1])]
    assert quoted
    assert [number for number in quoted if not is_recorded(number, recorded)] == []


def test_written_results_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_results(path, title="A", question="How fast?", columns=["what", "s"], rows=[["b", "1.5"]])
    assert tuple(json.loads(path.read_text("utf-8"))) == results_page.KEYS
    with pytest.raises(ValueError, match="2 cells"):
        write_results(path, title="A", question="?", columns=["what", "s"], rows=[["b"]])
