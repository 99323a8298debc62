"""The kit of HTML pages: escaped once, whole, readable in light and dark; and tables as text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from xmil.core.text import markdown_table, text_table
from xmil.heatmaps import BLUE, LIGHT_BLUE, LIGHT_RED, RED, Html, bullets, figure, join, page, table, tag

EVIL = "<script>alert('x')</script> & \"quoted\""
ALONE = ("meta", "img")  # elements without an end


class Tree(HTMLParser):
    """Counts the elements of a page, checks that each is closed, and keeps its text and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.words: list[str] = []
        self.attributes: list[str | None] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.append(name)
        self.attributes += [value for _, value in attributes]
        if name not in ALONE:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_what_is_not_html_is_escaped_once(tmp_path: Path) -> None:
    """Hostile text in every place comes back as text, and adds no element."""
    (tmp_path / "p.png").write_bytes(b"\x89PNG")
    parts = [
        tag("p", EVIL, tag("b", EVIL), kind="small", title=EVIL),
        bullets([EVIL]),
        table([[EVIL, Html("<b>1</b>")]], head=[EVIL, "n"], marked=[True]),
        figure(tmp_path / "p.png", EVIL),
        EVIL,
    ]
    tree = Tree(page(EVIL, *parts))
    assert "script" not in tree.names
    assert "".join(tree.words).count(EVIL) == 8
    assert tree.attributes.count(EVIL) == 2
    assert tree.names.count("b") == 2


def test_a_page_needs_nothing_else_and_has_the_heatmaps_colours() -> None:
    text = page("title", tag("p", "words"), style=".own { color: red; }")
    assert text.startswith("<!doctype html>")
    assert "http" not in text
    assert ".own" in text
    light, dark = text.split("prefers-color-scheme: dark", 1)
    assert f"--for: {RED}; --against: {BLUE};" in light
    assert f"--for: {LIGHT_RED}; --against: {LIGHT_BLUE};" in dark


def test_empty_parts_leave_no_trace() -> None:
    assert bullets([]) == ""
    assert join(["a", "", "b"]) == "ab"
    assert tag("p", "a", kind="") == "<p>a</p>"


def test_tables_as_text_and_markdown() -> None:
    rows = [["method", "AUPC", ""], ["lrp", "0.2", "best"], ["random", "0.45", ""]]
    assert text_table(rows, indent="  ").splitlines() == [
        "  method  AUPC",
        "  lrp     0.2   best",
        "  random  0.45",
    ]
    assert markdown_table(rows[0][:2], [row[:2] for row in rows[1:]]).splitlines() == [
        "| method | AUPC |",
        "|---|---|",
        "| lrp | 0.2 |",
        "| random | 0.45 |",
    ]
