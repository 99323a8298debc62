"""The tree as a whole: rooms and their order, pages that do not repeat themselves."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from xmil.core.request import Request
from xmil.runs import requests

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "xmil"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_repeats_a_heading(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#{1,6} +(.+?)\s*$", prose, flags=re.MULTILINE)
    assert sorted(headings) == sorted(set(headings))


def test_the_picture_of_the_layers_is_current() -> None:
    """`python docs/layers_picture.py` writes it anew."""
    made = runpy.run_path(str(ROOT / "docs" / "layers_picture.py"))
    assert (ROOT / "docs" / "layers.svg").read_text(encoding="utf-8") == made["picture"]()
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert {name for row in made["layers"]() for name in row} == packages


def test_contributing_names_every_package() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^  (\w+)/ ", tree, flags=re.MULTILINE))
    assert named == {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def test_the_plan_names_what_is_there() -> None:
    """Files in docs/layers.md exist, and the functions in its walks are in the files of their step."""
    text = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
    places = re.findall(r"`([\w/]+/[\w.]*)`", text)
    assert [place for place in places if not any((root / place).exists() for root in (SOURCE, ROOT))] == []
    steps = re.findall(r"^\d+\. (.+(?:\n   .+)*)", text, flags=re.MULTILINE)
    assert len(steps) > 10
    for step in steps:
        code = "".join(
            (SOURCE / file).read_text(encoding="utf-8") for file in re.findall(r"`([\w/]+\.py)`", step)
            if (SOURCE / file).is_file()
        )  # fmt: skip
        for name in re.findall(r"`(\w+)`", step):
            assert re.search(rf"\b{name}\b", code), f"{name}: {step}"


def test_sentences_name_parameters_in_backticks() -> None:
    """So that each door can say them in its own words."""
    kinds = [kind for kind in vars(requests).values() if isinstance(kind, type) and issubclass(kind, Request)]
    options = {name for kind in kinds for name in kind.model_fields}
    before = "pass|give|use|name|leave out|lower|another|see|with|or"
    advice = re.compile(rf"(?:{before}) ([a-z_]{{3,}})=(?![=.])")
    for path in sorted(SOURCE.rglob("*.py")):
        if "cli" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and ">>>" not in node.value:
                names = options & set(advice.findall(node.value))
                assert names == set(), f"{path.name}:{node.lineno}: {node.value}"


def test_the_table_of_imports_is_the_contracts() -> None:
    """No package imports one of a higher layer."""
    made = runpy.run_path(str(ROOT / "docs" / "layers_picture.py"))
    height = {name: i for i, row in enumerate(made["layers"]()) for name in row}
    for name, used in made["imports"]().items():
        assert [one for one in used if height[one] < height[name]] == [], name


def test_no_string_names_a_higher_room() -> None:
    """Docstrings apart: a module that is imported by its name is an import as well."""
    rows = runpy.run_path(str(ROOT / "docs" / "layers_picture.py"))["layers"]()
    height = {name: i for i, row in enumerate(rows) for name in row}
    upward = []
    for path in sorted(SOURCE.glob("*/**/*.py")):
        room = path.relative_to(SOURCE).parts[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or id(node) in docstrings:
                continue
            named = re.findall(r"\bxmil\.(\w+)", str(node.value))
            upward += [f"{path}:{node.lineno}" for name in named if height.get(name, 99) < height[room]]
    assert upward == []
