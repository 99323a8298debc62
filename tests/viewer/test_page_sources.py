"""The page's sources: pinned packages, no markup made from data, and a licence beside the bundle."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from xmil.viewer.static_copy import page_files

PAGE = Path(__file__).parents[2] / "page"
SOURCES = sorted((PAGE / "src").rglob("*.ts"))


def test_packages_are_pinned_and_name_no_registry() -> None:
    about = json.loads((PAGE / "package.json").read_text(encoding="utf-8"))
    wanted = {**about["dependencies"], **about["devDependencies"], **about["overrides"]}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values()), wanted
    lock = json.loads((PAGE / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    packages = {name: entry for name, entry in lock.items() if name}
    assert all("integrity" in entry and "resolved" not in entry for entry in packages.values())
    for name, version in wanted.items():
        assert packages[f"node_modules/{name}"]["version"] == version
    optional = {name for entry in packages.values() for name in entry.get("optionalDependencies", {})}
    assert {f"node_modules/{name}" for name in optional} <= set(packages)  # other systems can build as well


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PAGE / "src").as_posix())
def test_data_never_becomes_markup(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert len(text.splitlines()) < 400


def test_no_part_of_the_page_gets_the_whole_view() -> None:
    """Panels say in an interface of their own what they need; only the page itself makes views."""
    view = re.compile(r'from "\./(slide/)?slide"')
    importing = [path.name for path in SOURCES if view.search(path.read_text(encoding="utf-8"))]
    assert importing == ["main.ts"]


def test_the_built_page_carries_its_licences() -> None:
    files = page_files()
    if not files:
        pytest.skip("the viewer's page is not built")
    text = files["LICENSES.txt"].read_text(encoding="utf-8")
    assert "OpenSeadragon" in text
    assert "Redistribution and use in source and binary forms" in text
    index = files["index.html"].read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*src=)|https?://", index)
