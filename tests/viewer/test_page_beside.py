"""Two slides side by side: linked by two places on each, they move together; the address keeps it all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tests.viewer.browser import expect_text, open_slide, opened, served, wait_until_quiet, wait_until_still
from tests.viewer.given_scores import grid, signed, write_run
from tests.viewer.make_run import patch_colours, write_slide
from tests.viewer.test_page_access import AXE, VIOLATIONS
from tests.viewer.test_page_compare import saved
from xmil.viewer.collection import Collection

COLUMNS, ROWS, EDGE = 12, 8, 64
ANGLE, SCALE, SHIFT = np.deg2rad(30), 0.5, np.array([300.0, 40.0])
MARKED = np.array([[100.0, 120.0], [600.0, 400.0]])


@pytest.fixture(scope="module")
def url(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two slides with evidence, and one of another stain without."""
    folder = tmp_path_factory.mktemp("beside")
    (folder / "slides").mkdir()
    for i, name in enumerate(("he", "he2", "ihc")):
        colours = patch_colours(96, seed=i).reshape(ROWS, COLUMNS, 3)
        write_slide(folder / "slides" / f"{name}.tif", colours, edge=EDGE)
        if name != "ihc":
            scores = {("lrp", "tumour"): signed(96, i), ("gxi", "tumour"): signed(96, i + 5)}
            write_run(folder / "run", name, scores, coords=grid(COLUMNS, ROWS, EDGE), edge=EDGE)
    with served(Collection([folder / "run"], slides=folder / "slides")) as address:
        yield address


def laid_over(places: Any) -> Any:
    """Where places of the first slide lie on the second: turned, half as large, shifted."""
    turn = np.array([[np.cos(ANGLE), -np.sin(ANGLE)], [np.sin(ANGLE), np.cos(ANGLE)]])
    return SCALE * np.asarray(places) @ turn.T + SHIFT


SCREEN = """([side, x, y]) => {
  const { pane, bounds } = window.xmil.compare.sides[side], { viewport } = pane.viewer;
  const point = viewport.getCenter(true);
  point.x = (x - bounds.x) / bounds.width; point.y = (y - bounds.y) / bounds.width;
  const pixel = viewport.viewportToViewerElementCoordinates(point), box = pane.stage.getBoundingClientRect();
  return [box.left + pixel.x, box.top + pixel.y, pixel.x - box.width / 2, pixel.y - box.height / 2];
}"""


def screen(page: Any, side: int, place: Any) -> list[float]:
    """The pixel of a place on a slide at rest, of the window and from the middle of the stage."""
    wait_until_still(page)
    return page.evaluate(SCREEN, [side, float(place[0]), float(place[1])])


def wait(page: Any) -> None:
    page.wait_for_function("() => window.xmil.compare?.ready")
    wait_until_quiet(page)


def mark(page: Any) -> None:
    """The two places on both slides, by clicks."""
    page.locator("[data-action=place]").click()
    for i in range(2):
        for side, places in enumerate((MARKED, laid_over(MARKED))):
            x, y = screen(page, side, places[i])[:2]
            page.mouse.click(x, y)


def assert_together(page: Any) -> None:
    """Any place lies equally far from the middle of both stages, in the same direction."""
    for place in ([50.0, 60.0], [700.0, 90.0], [384.0, 256.0]):
        a, b = (screen(page, i, p)[2:] for i, p in enumerate((place, laid_over([place])[0])))
        np.testing.assert_allclose(a, b, atol=4)


def test_two_places_link_two_slides_and_the_address_keeps_them(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        open_slide(page, url, 0)
        page.keyboard.press("w")
        assert page.locator("dialog [data-beside]").all_inner_texts()[-1].startswith("ihc")
        page.locator("dialog [data-beside=ihc]").click()
        wait(page)
        if AXE.is_file():
            page.evaluate(AXE.read_text(encoding="utf-8"))
            assert page.evaluate(VIOLATIONS) == []
        expect_text(page.locator(".link-bar"), "Not linked")
        mark(page)
        status = page.locator(".link-bar [role=status]")
        told = "Linked: B is rotated by 30° and 0.500 times as large in pixels (their microns per pixel"
        assert status.inner_text() == f"{told} give 1.000: check the places)."
        assert_together(page)
        x, y = screen(page, 0, [384, 256])[:2]
        page.mouse.move(x, y)
        for _ in range(3):
            page.mouse.wheel(0, -240)
        wait_until_quiet(page)
        assert_together(page)
        twin, meant = (
            page.locator(".twin:visible").bounding_box(),
            screen(page, 1, laid_over([[384, 256]])[0]),
        )
        np.testing.assert_allclose(
            [twin["x"] + twin["width"] / 2, twin["y"] + twin["height"] / 2], meant[:2], atol=4
        )
        x, y = screen(page, 1, laid_over([[384, 256]])[0])[:2]
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + 60, y + 25, steps=4)
        page.mouse.up()
        wait_until_quiet(page)
        assert_together(page)
        before = screen(page, 0, [384, 256])
        wait_until_quiet(page)
        link = page.url
        page.goto("about:blank")
        page.goto(link)
        wait(page)
        assert_together(page)
        np.testing.assert_allclose(screen(page, 0, [384, 256]), before, atol=6)
        page.keyboard.press("o")
        wait_until_quiet(page)
        assert_together(page)


def test_undo_parts_them_and_the_keyboard_alone_links_them(browser: Any, url: str) -> None:
    with opened(browser, f"{url}#/compare/he/he2") as page:
        wait(page)
        page.locator(".stage").first.focus()
        page.keyboard.press("p")
        turns = "() => window.xmil.compare.sides.map((side) => side.display.rotation)"
        for i, key in enumerate(("ArrowRight", "ArrowDown")):
            for side in range(2):
                page.locator(".stage").nth(side).focus()
                page.keyboard.press(key)
                if side and i:
                    page.keyboard.press("ArrowRight")
                wait_until_quiet(page)
                page.keyboard.press("Enter")
        expect_text(page.locator(".link-bar"), "Linked")
        assert page.evaluate(turns)[1] not in (0, 360)
        page.keyboard.press("u")
        expect_text(page.locator(".link-bar"), "2 of 2 places on A and 1 of 2 on B")
        assert page.evaluate(turns) == [0, 0]
        middle = "() => window.xmil.compare.sides[1].middle"
        still = page.evaluate(middle)
        page.locator(".stage").first.focus()
        page.keyboard.press("ArrowLeft")
        wait_until_quiet(page)
        assert page.evaluate(middle) == pytest.approx(still)  # each on its own again
        page.keyboard.press("x")
        expect_text(page.locator(".link-bar"), "Mark two places")
        page.keyboard.press("u")
        expect_text(page.locator(".link-bar"), "2 of 2 places on A and 1 of 2 on B")
        page.locator("select[name=method]").nth(1).select_option("gxi")
        wait_until_quiet(page)
        page.reload()
        wait(page)
        expect_text(page.locator(".link-bar"), "2 of 2 places on A and 1 of 2 on B")
        shown = "() => window.xmil.compare.sides.map((side) => side.pane.evidence.choice.method)"
        assert page.evaluate(shown) == ["lrp", "gxi"]


def test_places_that_are_one_and_slides_that_are_not_there_are_told(
    browser: Any, url: str, tmp_path: Path
) -> None:
    with opened(browser, f"{url}#/compare/he/nowhere") as page:
        expect_text(page.locator("[role=alert]"), "There is no slide nowhere")
    with opened(browser, f"{url}#/compare/he/he2?points=1,2;x&second=a,b") as page:
        wait(page)
        expect_text(page.locator(".link-bar"), "1 of 2 places on A and 0 of 2 on B")
        page.keyboard.press("p")
        x, y = screen(page, 0, [300, 300])[:2]
        page.mouse.click(x, y)
        page.mouse.click(x + 40, y)
        expect_text(page.locator(".messages"), "Two places are marked on A")


LINK = "points=" + ";".join(
    ",".join(f"{v:.1f}" for v in places.ravel()) for places in (MARKED, laid_over(MARKED))
)


def test_a_figure_shows_both_slides_and_says_how_they_lie(browser: Any, url: str, tmp_path: Path) -> None:
    said = [
        "A: he",
        "LRP: evidence for tumour",
        "scores weaker than",
        "B: ihc",
        "Linked: B is rotated by 30°",
    ]
    with opened(browser, f"{url}#/compare/he/ihc?{LINK}&threshold=0.25", accept_downloads=True) as page:
        wait(page)
        boxes = [page.locator(".stage").nth(i).bounding_box() for i in range(2)]
        places = [screen(page, 1, ((c + 0.5) * EDGE, (r + 0.5) * EDGE)) for r, c in ((3, 5), (4, 6), (4, 5))]
        png, svg = saved(page, "96", "png", tmp_path), saved(page, "96", "svg", tmp_path)
    assert png.name == "he.lrp-tumour.ihc.above-25.linked.96dpi.png"
    with Image.open(png) as picture:
        pixels, facts = np.asarray(picture.convert("RGB"), dtype=float), json.loads(picture.info["xmil"])
        assert picture.width == pytest.approx(boxes[0]["width"] + boxes[1]["width"] + 8, abs=2)
        assert all(text in picture.info["Description"] for text in said)
    assert [each["slide"] for each in facts["slides"]] == ["he", "ihc"]
    np.testing.assert_allclose(facts["slides"][1]["points"], laid_over(MARKED), atol=0.06)
    colours = patch_colours(96, seed=2).reshape(ROWS, COLUMNS, 3)
    for (row, column), (x, y, *_) in zip(((3, 5), (4, 6), (4, 5)), places, strict=True):
        left = x - boxes[1]["x"] + boxes[0]["width"] + 8
        seen = pixels[round(y - boxes[1]["y"]), round(left)]
        np.testing.assert_allclose(seen, colours[row, column], atol=12)
    root = ElementTree.parse(svg).getroot()  # noqa: S314
    space = "{http://www.w3.org/2000/svg}"
    assert len(list(root.iter(f"{space}image"))) == 2
    words = " ".join(text.text or "" for text in root.iter(f"{space}text"))
    assert all(text in words for text in said)
    assert json.loads(root.findtext(f"{space}metadata") or "")["slides"] == facts["slides"]
