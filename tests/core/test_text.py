"""XML of others: entities are refused in whatever encoding they hide."""

from __future__ import annotations

import pytest

from xmil.core.text import parse_xml

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
