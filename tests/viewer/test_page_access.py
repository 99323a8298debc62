"""The page for everybody: axe finds nothing, the keyboard is enough, small screens show the slide."""

from __future__ import annotations

import re
from colorsys import rgb_to_hsv
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.viewer.browser import expect_count, expect_text, open_slide, opened, settle, wait_until_quiet

PAGE = Path(__file__).parents[2] / "page"
AXE = PAGE / "node_modules" / "axe-core" / "axe.min.js"
VIOLATIONS = """() => axe.run(document, { resultTypes: ["violations"] })
  .then(({ violations }) => violations.map((v) => [v.id, ...v.nodes.map((n) => n.html.slice(0, 120))]))"""


def violations(page: Any) -> list[Any]:
    """What axe finds in light colours and in dark ones; `AXE` was read by the page."""
    found = []
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # colours change at once
        settle(page)
        found += page.evaluate(VIOLATIONS)
    return found


HELD = "() => document.activeElement !== document.body && document.activeElement.isConnected"


def select_shown(page: Any) -> None:
    """The patches that the threshold leaves, as a selection."""
    page.keyboard.press("4")
    page.get_by_role("button", name="Select shown patches").click()


def test_axe_finds_no_violation(browser: Any, url: str) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed (npm --prefix page ci)")
    with opened(browser, url) as page:
        page.locator("table.slides td").first.wait_for()
        page.evaluate(AXE.read_text(encoding="utf-8"))
        found = {"list": violations(page)}
        open_slide(page, url, 1)
        page.evaluate("() => { const v = window.xmil.view; v.pick(v.panes[0], 20); }")
        page.locator(".panel .patch-button").first.wait_for()
        for key in "21345":
            page.keyboard.press(key)
            settle(page)
            found[f"panel {key}"] = violations(page)
        select_shown(page)
        page.locator(".selection-bar button", has_text="Annotate").click()
        page.locator(".note-row").wait_for()
        page.keyboard.press("Escape")
        page.keyboard.press("s")
        page.wait_for_function("() => window.xmil.view.panes[1]?.viewer.isOpen()")
        wait_until_quiet(page)
        found["two panes"] = violations(page)
        page.locator(".note-row button", has_text="Delete").click()
        wait_until_quiet(page)
    assert {place: broken for place, broken in found.items() if broken} == {}


def test_the_keyboard_alone_asks_what_if_and_the_focus_is_never_lost(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        page.locator("table.slides td a").nth(1).focus()
        page.keyboard.press("Enter")
        page.wait_for_function("() => window.xmil.view?.firstPaint")
        assert page.evaluate(HELD)
        page.locator("select[name=method]").focus()
        page.keyboard.press("ArrowDown")  # the pane's head is drawn anew
        assert page.evaluate("() => document.activeElement.name") == "method"
        page.keyboard.press("m")
        for _ in range(4):
            page.keyboard.press(".")
        page.keyboard.press("4")
        for pressed in ("Select shown patches", "Remove"):
            for _ in range(6):
                page.keyboard.press("Tab")
                if page.evaluate("() => document.activeElement.textContent") == pressed:
                    break
            page.keyboard.press("Enter")
            assert page.evaluate(HELD), pressed
            if pressed == "Select shown patches":
                page.keyboard.press("4")
        page.locator(".whatif-result").wait_for()
        assert page.evaluate(HELD)
        gone = page.evaluate("() => [...window.xmil.view.removed.values()][0].reduce((s, x) => s + x, 0)")
        assert 0 < gone < 96
        expect_text(page.locator(".slide-head"), f"without {gone} ")
        for action in ("split", "split", "undo"):
            page.locator(f"[data-action={action}]").focus()
            page.keyboard.press("Enter")
            settle(page)
            assert page.evaluate(HELD), action
        page.keyboard.press("Backspace")
        page.locator("table.slides").wait_for()
        assert page.evaluate(HELD)


COVERED = """() => {
  const stage = document.querySelector(".stage").getBoundingClientRect();
  const shared = (a, b, c, d) => Math.max(0, Math.min(b, d) - Math.max(a, c));
  let over = 0;
  for (const part of document.querySelectorAll(".navigator, .colour-bar, .ruler")) {
    const box = part.getBoundingClientRect();
    const width = shared(box.left, box.right, stage.left, stage.right);
    over += width * shared(box.top, box.bottom, stage.top, stage.bottom);
  }
  const wide = document.scrollingElement.scrollWidth;
  return { covered: over / (stage.width * stage.height), height: stage.height, wide };
}"""


def test_fault_14_scales_and_minimap_leave_the_slide_free(browser: Any, url: str) -> None:
    """A phone, a small laptop, and 1280 x 800 at 200 % zoom."""
    with opened(browser, url) as page:
        for width, height in ((390, 844), (1024, 768), (640, 400)):
            page.set_viewport_size({"width": width, "height": height})
            open_slide(page, url, 1)
            wait_until_quiet(page)
            seen = page.evaluate(COVERED)
            assert seen["covered"] < 0.01, (width, seen)
            assert seen["height"] >= 180, (width, seen)
            assert seen["wide"] <= width
            last = page.locator("[data-action=picture]").bounding_box()
            assert last["x"] + last["width"] <= width
            legend = page.locator(".colour-bar").bounding_box()
            assert legend["x"] >= 0
            assert legend["x"] + legend["width"] <= width


def test_the_list_keeps_its_words_whole_on_a_small_laptop(browser: Any, url: str) -> None:
    """At 1024 x 768 every column is in sight, and no label is broken within a word."""
    lines = """(td) => {
      const range = document.createRange();
      range.selectNodeContents(td);
      return range.getClientRects().length;
    }"""
    with opened(browser, url, viewport={"width": 1024, "height": 768}) as page:
        expect_count(page.locator("img.small-map"), 3)
        box = page.locator("table.slides").bounding_box()
        assert box["x"] + box["width"] <= 1024
        for name in ("Label", "Prediction"):
            cells = page.locator(f"td[data-name={name}]").all()
            assert [cell.evaluate(lines) for cell in cells] == [1, 1, 1]


DEUTERANOPIA = [
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.01182, 0.04294, 0.968881],
]
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]


def lab(colour: list[int], seen_as: Any) -> Any:
    """CIE L*a*b* of an sRGB colour seen through a matrix over linear light (Machado and others, 2009)."""
    share = np.asarray(colour) / 255
    light = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.asarray(seen_as) @ light, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_fault_13_class_colours_differ_for_deuteranopia() -> None:
    source = (PAGE / "src" / "colours.ts").read_text(encoding="utf-8")
    kinds = {
        name: [int(c) for c in rgb.split(",")]
        for name, rgb in re.findall(r'name: "([\w ]+)", colour: \[([\d, ]+)\]', source)
    }
    assert len(kinds) >= 7
    for name, colour in kinds.items():  # the hues of evidence, red and blue, are not a class's
        hue, saturation, _ = rgb_to_hsv(*(c / 255 for c in colour))
        apart = min(min(abs(360 * hue - own), 360 - abs(360 * hue - own)) for own in (352, 209))
        assert saturation < 0.15 or apart > 30, name
    for seen_as in (np.eye(3), DEUTERANOPIA):
        for (a, one), (b, two) in combinations(kinds.items(), 2):
            assert np.linalg.norm(lab(one, seen_as) - lab(two, seen_as)) > 20, (a, b)
