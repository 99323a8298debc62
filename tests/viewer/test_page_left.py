"""What a what-if leaves is explained again: the answer belongs to its question; links and figures say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xmil
from tests.viewer.browser import (
    expect_count,
    expect_text,
    expect_value,
    open_slide,
    opened,
    pixels,
    place_of,
    red_blue,
    served,
    show_plainly,
    wait_until_quiet,
    whisker,
)
from tests.viewer.make_run import Made
from tests.viewer.test_page_frames import LABELS
from xmil.models import load_model
from xmil.viewer.collection import Collection

GONE = [0, 1, 2, 12, 13, 14]
LEFT = [i for i in range(96) if i not in GONE]
NOTE = "Explained without 6 patches"


@pytest.fixture(scope="module")
def url(browser: Any, made: Made) -> Iterator[str]:
    shown = Collection(made.runs[:1], slides=made.slides, features=[made.features])
    with served(shown, made.models[:1]) as address:
        yield address


def remove(page: Any) -> None:
    page.keyboard.press("4")
    page.evaluate("rows => window.xmil.view.whatif.apply(rows, 'remove')", GONE)
    page.locator("[data-action=explain-left]").wait_for()


def expected(made: Made, target: str = "tumour") -> Any:
    bag = xmil.read_bag(made.features / "slide-1.h5")
    left = xmil.Bag(bag.features[LEFT], coords=bag.coords[LEFT])
    return xmil.explain(load_model(made.models[0]), left, method="lrp", target=target).scores


def test_what_is_left_is_explained_drawn_linked_and_undone(
    browser: Any, url: str, made: Made, tmp_path: Path
) -> None:
    scores = expected(made)
    with opened(browser, url, accept_downloads=True) as page:
        open_slide(page, url, 1)
        show_plainly(page)
        page.evaluate(LABELS)
        remove(page)
        page.locator("[data-action=explain-left]").click()
        page.locator(".pane-note", has_text=NOTE).wait_for()
        values = page.evaluate("() => [...window.xmil.view.panes[0].evidence.values]")
        assert [i for i, value in enumerate(values) if value is None or np.isnan(value)] == GONE
        np.testing.assert_allclose([values[i] for i in LEFT], scores, rtol=1e-4, atol=1e-6)
        seen, limit = pixels(page), whisker(scores)
        for i in (28, 40, 52, 65):
            x, y = place_of(page, (i % 12 + 0.5) * 256, (i // 12 + 0.5) * 256)
            share = np.clip(scores[LEFT.index(i)] / limit, -1, 1)
            np.testing.assert_allclose(seen[round(y), round(x)], red_blue(share), atol=6)
        page.keyboard.press("3")
        expect_text(page.locator(".panel"), "explained without 6 patches")
        with page.expect_download() as got:
            page.locator("[data-action=picture]").click()
        assert "explained-again" in got.value.suggested_filename
        assert NOTE in page.evaluate("() => window.written")
        wait_until_quiet(page)
        link = page.url
        page.keyboard.press("4")
        page.locator("[data-action=toggle-left]").click()
        assert page.locator(".pane-note").inner_text() == ""
        page.locator("[data-action=toggle-left]").click()
        assert page.locator(".pane-note").inner_text() == NOTE
        page.keyboard.press("u")
        assert page.locator(".pane-note").inner_text() == ""
        page.goto("about:blank")
        page.goto(link)
        page.locator(".pane-note", has_text=NOTE).wait_for()
        again = page.evaluate("() => [...window.xmil.view.panes[0].evidence.values]")
        np.testing.assert_allclose([again[i] for i in LEFT], scores, rtol=1e-4, atol=1e-6)
        expect_text(page.locator(".slide-head"), "without 6 patches")


HELD = """() => {
  const fetched = window.fetch;
  window.asked = [];
  window.fetch = (address, init) => {
    if (!String(address).endsWith("/explain")) return fetched(address, init);
    return new Promise((done, failed) => {
      init.signal.addEventListener("abort", () => failed(new DOMException("gone", "AbortError")));
      window.asked.push(() => fetched(address, init).then(done, failed));
    });
  };
}"""


def test_a_late_answer_belongs_to_its_question_and_can_be_cancelled(
    browser: Any, url: str, made: Made
) -> None:
    with opened(browser, url) as page:
        open_slide(page, url, 1)
        page.evaluate(HELD)
        remove(page)
        page.locator("[data-action=explain-left]").click()
        page.locator("[data-action=cancel-left]").wait_for()
        page.keyboard.press("u")  # the question of the six is still under way
        page.evaluate("() => window.asked[0]()")
        page.wait_for_function("() => window.xmil.view.store.state.left.size === 1")
        assert page.locator(".pane-note").inner_text() == ""
        page.evaluate("rows => window.xmil.view.whatif.apply(rows, 'remove')", GONE)
        page.locator(".pane-note", has_text=NOTE).wait_for()  # the same question: its answer is there
        page.locator("select[name=target]").select_option("benign")
        assert page.locator(".pane-note").inner_text() == ""
        page.locator("[data-action=explain-left]").click()
        page.locator("[data-action=cancel-left]").click()
        page.locator(".message", has_text="cancelled").wait_for()
        page.locator("[data-action=explain-left]").wait_for()
        page.locator("select[name=target]").select_option("tumour")
        assert page.locator(".pane-note").inner_text() == NOTE


def test_an_error_is_told_and_asked_again(browser: Any, url: str) -> None:
    with opened(browser, url, expect_errors=True) as page:
        open_slide(page, url, 1)
        remove(page)
        said = {"status": 422, "content_type": "application/json", "body": json.dumps({"error": "No room."})}
        page.route("**/explain", lambda route: route.fulfill(**said))
        page.locator("[data-action=explain-left]").click()
        page.locator(".panel [role=alert]", has_text="No room.").wait_for()
        page.unroute("**/explain")
        page.locator("[data-action=explain-left]").click()
        page.locator(".pane-note", has_text=NOTE).wait_for()
        expect_count(page.locator(".panel [role=alert]"), 0)


def test_a_link_brings_the_selection_and_the_lists_filter_back(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        page.locator("input[type=search]").fill("slide")
        page.locator(".column-n button").click()
        assert page.url.endswith("#/?search=slide&sort=n")
        page.reload()
        page.locator("table.slides td").first.wait_for()
        expect_value(page.locator("input[type=search]"), "slide")
        open_slide(page, url, 0)
        page.evaluate("rows => window.xmil.view.select(rows)", [3, 4, 5, 40])
        wait_until_quiet(page)
        page.reload()
        page.wait_for_function("() => window.xmil.view?.firstPaint")
        chosen = page.evaluate("() => window.xmil.view.store.state.selection.patches")
        assert chosen == [3, 4, 5, 40]
        page.wait_for_function("() => window.xmil.view.panes[0].viewer.world.getItemAt(0)?.getFullyLoaded()")
        page.locator(".back").click()
        page.locator("table.slides td").first.wait_for()
        assert page.url.endswith("#/?search=slide&sort=n")
