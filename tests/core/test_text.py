"""Texts of others: entities in XML and deeply nested TOML are refused before they take memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from xmil.core.errors import FileError
from xmil.core.text import DEEPEST_TOML, LONGEST_TOML, parse_toml, parse_xml, read_toml

BOMB = '<?xml version="1.0" encoding="{0}"?><!DOCTYPE x [<!ENTITY a "{1}"><!ENTITY b "{2}">]><x>&b;</x>'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_entities_are_refused_in_every_encoding(encoding: str) -> None:
    text = BOMB.format(encoding.removesuffix("-sig"), "a" * 99, "&a;" * 99)
    with pytest.raises(ValueError, match=r"document type|decode|not in UTF-8"):
        parse_xml(text.encode(encoding))
    with pytest.raises(ValueError, match="document type"):
        parse_xml(text)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_plain_texts_are_read(encoding: str) -> None:
    text = '<?xml version="1.0" encoding="UTF-8"?>\n<a name="é"><b/></a>'
    root = parse_xml(text.encode(encoding))
    assert (root.get("name"), [node.tag for node in root]) == ("é", ["b"])
    with pytest.raises(ValueError, match="no element found"):
        parse_xml(b"<a><b/>")


DOTS = ".".join("a" * 1000)


@pytest.mark.parametrize(
    "text",
    [
        f"{DOTS} = 1",
        f"[{DOTS}]",
        f"[[{DOTS}]]",
        f"x = {{ {DOTS} = 1 }}",
        f"x = [{{ y = '' }}, {{ {DOTS} = 1 }}]",
        " . ".join(["'a'", '"b\\""'] * 10) + " = 1",
        "t = '''\n' '''\n" + DOTS + " = 1",
        't = """\\""" " """"" # "\n' + DOTS + " = 1",
        "x = " + "[" * 20 + "]" * 20,
        "x = " + "{a = [" * 20,
        "x = '" + "a" * LONGEST_TOML + "'",
    ],
)
def test_long_and_deep_toml_is_refused_before_it_is_parsed(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested more than|longer than"):
        parse_toml(text)


@pytest.mark.parametrize("quotes", ["'", '"', "'''", '"""'])
def test_dots_and_brackets_in_texts_and_comments_do_not_count(quotes: str) -> None:
    text = "[" * 20 + "." * 20
    content = f"[a.b]  # {text}\nx = 1.5\ny = {quotes}{text}{quotes}\nz = [{quotes}{text}{quotes}, 2.5]\n"
    assert parse_toml(content) == {"a": {"b": {"x": 1.5, "y": text, "z": [text, 2.5]}}}


def test_the_deepest_toml_allowed_is_read() -> None:
    inner = parse_toml(".".join("k" * DEEPEST_TOML) + " = " + "[" * DEEPEST_TOML + "]" * DEEPEST_TOML)
    for _ in range(DEEPEST_TOML):
        inner = inner["k"]
    assert str(inner) == "[" * DEEPEST_TOML + "]" * DEEPEST_TOML


def test_a_settings_file_is_never_cut(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("x = 1\n" + "# \u00fc\n" * (LONGEST_TOML // 5) + "y = 2\n", encoding="utf-8")
    assert len(path.read_text("utf-8")) < LONGEST_TOML < path.stat().st_size
    with pytest.raises(FileError, match=r"c\.toml.*longer than"):
        read_toml(path, way="shorten it")
