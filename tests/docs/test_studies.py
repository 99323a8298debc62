"""The studies: each opens with a picture of its own numbers, asks, answers, and has a command and a date."""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path

import matplotlib as mpl
import pytest
from PIL import Image

from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import draw_studies

PAGES = sorted((ROOT / "docs" / "studies").glob("*.md"))
OPENING = re.compile(
    r"# .+\n\n!\[(.{30,})\]\(\.\./(images/\S+\.png)\)\n\n\*(?:.+\n)*?.*`python (docs/\S+\.py)"
)
DAY = re.compile(r"\b\d{1,2} [A-Z][a-z]+ 20\d\d\b")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_study_opens_with_a_picture_and_says_how_it_was_made(path: Path) -> None:
    text = path.read_text("utf-8")
    opening = OPENING.match(text)
    assert opening, "the title, a picture with its finding in words, and a caption with its command"
    assert (ROOT / "docs" / opening[2]).is_file()
    assert (ROOT / opening[3]).is_file()
    order = [name for name in re.findall(r"^## (.+)", text, re.M) if name in ("Question", "Setup", "Answer")]
    assert order == ["Question", "Setup", "Answer"]
    assert re.search(r"^ *(?:python -m benchmarks|xmil |pytest )|`python -m benchmarks", text, re.M)
    assert DAY.search(text)


def test_every_study_has_a_drawing() -> None:
    """`better-rule` is drawn from a trained model, by `docs/draw_better_rule.py`."""
    assert {*draw_studies.PICTURES, "better-rule"} == {path.stem for path in PAGES}


@pytest.mark.parametrize("name", draw_studies.PICTURES)
def test_a_picture_shows_what_its_page_says(name: str) -> None:
    """`python docs/draw_studies.py NAME` draws it anew."""
    page = draw_studies.Page(name)
    with mpl.rc_context(draw_studies.LOOK):
        figure = draw_studies.PICTURES[name](page)
    assert f"](../images/study-{name}.png)" in page.text
    with Image.open(draw_studies.picture_of(name)) as picture:
        assert picture.text == {"Title": figure.get_suptitle(), "Source": page.digest()}
        assert 1200 <= picture.width <= 1600
    assert draw_studies.picture_of(name).stat().st_size < 80_000


def test_another_number_on_the_page_asks_for_another_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (draw_studies.STUDIES / "tissue.md").read_text("utf-8")
    before = draw_studies.Page("tissue")
    draw_studies.PICTURES["tissue"](before)
    (tmp_path / "tissue.md").write_text(
        text.replace("| attnmil | lrp | 0.849", "| attnmil | lrp | 0.749"), "utf-8"
    )
    monkeypatch.setattr(draw_studies, "STUDIES", tmp_path)
    after = draw_studies.Page("tissue")
    draw_studies.PICTURES["tissue"](after)
    assert before.digest() != after.digest()


def test_a_number_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scale.md").write_text("# What a cohort costs\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    monkeypatch.setattr(draw_studies, "STUDIES", tmp_path)
    page = draw_studies.Page("scale")
    assert page.table("b") == [{"a": "1", "b": "2"}]
    with pytest.raises(ValueError, match=r"scale\.md has no table with the columns c"):
        page.table("c")
    with pytest.raises(ValueError, match=r"scale\.md does not say"):
        page.find(r"take ([\d.]+) hours")


def test_the_examples_of_the_script_are_right() -> None:
    assert doctest.testmod(draw_studies).failed == 0
