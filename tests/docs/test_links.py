"""The documents: every relative link leads to a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, page_name

_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|\b(?:src|href)=\"([^\"]+)\"|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
MADE = {"cli.md", "api.md", "index.md"}  # by docs/site_hooks.py


def relative_links(text: str) -> list[str]:
    """The targets of links and images inside the repository, without their anchors."""
    framed = text.replace('<iframe src="../', '<iframe src="')  # the site has a folder for each page
    found = ["".join(groups) for groups in _LINK.findall(_CODE.sub("", framed))]
    return [link.split("#")[0] for link in found if not re.match(r"#|[a-z][a-z0-9+.-]*:", link)]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_relative_links_lead_to_files(page: Path) -> None:
    links = [link for link in relative_links(page.read_text("utf-8")) if Path(link).name not in MADE]
    dead = [link for link in links if not (page.parent / link).is_file()]
    assert dead == []


def test_links_are_found() -> None:
    text = '[a](b.md#part) ![i](c.png) [w](http://x) [h](#h) `[n](no.md)`\n[r]: d.md\n<img src="e.png">'
    assert relative_links(text) == ["b.md", "c.png", "d.md", "e.png"]
