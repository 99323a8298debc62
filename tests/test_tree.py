"""The tree as a whole: one word for one thing, short files, pages that do not repeat themselves."""

from __future__ import annotations

import ast
import re
import runpy
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "xmil"
FILES = sorted(SOURCE.rglob("*.py"))
KINDS = ("cli", "runs", "methods", "models/checkpoints", "data/readers", "lrp/rules")  # say what a file is
REPEATED = ("__init__", "__main__", "registry")
LONGEST = 400
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def twice(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_public_class_name_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCE)))
    assert twice(places) == {}


def test_no_module_name_twice() -> None:
    """Outside the folders that say what kind of thing each of their files is."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        own = path.relative_to(SOURCE)
        if path.stem not in REPEATED and own.parent.as_posix() not in KINDS:
            places[path.stem].append(own.as_posix())
    assert twice(places) == {}


def test_no_long_file() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {str(path.relative_to(SOURCE)): n for path, n in lengths.items() if n > LONGEST} == {}


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


def test_the_table_of_imports_is_the_contracts() -> None:
    """No package imports one of a higher layer."""
    made = runpy.run_path(str(ROOT / "docs" / "layers_picture.py"))
    height = {name: i for i, row in enumerate(made["layers"]()) for name in row}
    for name, used in made["imports"]().items():
        assert [one for one in used if height[one] < height[name]] == [], name
