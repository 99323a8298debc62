"""A static copy in the browser: served it is whole, as a file it says what to do; reports fit a phone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.viewer.browser import expect_count, expect_text, opened
from tests.viewer.make_run import Made
from xmil.heatmaps import Html, page, table
from xmil.viewer.collection import Collection
from xmil.viewer.static_copy import export, page_files


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def copy(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not page_files():
        pytest.skip("the viewer's page is not built")
    out = tmp_path_factory.mktemp("static") / "copy"
    assert export(Collection(made.runs, slides=made.slides), out, longest=300) == {}
    return out


@pytest.fixture
def place(copy: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(copy))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_a_served_copy_has_list_pictures_the_wall_and_a_policy(browser: Any, place: str) -> None:
    drawn = "(name) => [...document.querySelectorAll(name)].every((image) => image.naturalWidth > 0)"
    with opened(browser, place) as page:
        expect_count(page.locator("img.small-map"), 3)
        page.wait_for_function(drawn, arg="img.small-map")
        policy = page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
        assert "default-src 'self'" in policy
        page.locator(".to-wall").click()
        page.locator(".wall-patch").first.wait_for()
        page.locator(".wall-patch img").first.scroll_into_view_if_needed()
        page.wait_for_function("() => document.querySelector('.wall-patch img')?.naturalWidth > 0")
        page.locator(".wall-patch").first.click()
        page.wait_for_function("() => window.xmil.view?.firstPaint")
        assert page.evaluate("() => window.xmil.view.display.clip") == "cohort"


def test_a_copy_has_nothing_of_studies(copy: Path) -> None:
    assert not [path for path in copy.rglob("*") if path.name.startswith("study")]
    assert "study" not in (copy / "index.html").read_text(encoding="utf-8")


def test_a_copy_opened_as_a_file_says_what_to_do(browser: Any, copy: Path) -> None:
    with opened(browser, (copy / "index.html").as_uri(), expect_errors=True) as page:
        expect_text(page.locator("#app"), "python -m http.server")
        page.wait_for_function(
            "() => getComputedStyle(document.querySelector('#app p')).visibility === 'visible'"
        )


def test_reports_do_not_scroll_sideways_on_a_phone(browser: Any, tmp_path: Path) -> None:
    words = "a long name of a measure with its interval and unit"
    rows = [[words, *(f"{i / 7:.3f} (0.123 to 0.456)" for i in range(6))] for _ in range(3)]
    cells = "".join(f"<td>unbroken_name_of_a_model_{i}</td>" for i in range(5))
    bare = Html(f"<table><tr>{cells}</tr></table>")
    path = tmp_path / "report.html"
    path.write_text(page("Report", table(rows, head=["", *"abcdef"], kind="words"), bare), encoding="utf-8")
    with opened(browser, path.as_uri(), viewport={"width": 390, "height": 844}) as shown:
        assert shown.evaluate("() => document.scrollingElement.scrollWidth") <= 390
        first = shown.locator("table").first
        assert first.evaluate("(node) => node.scrollWidth - node.clientWidth") <= 1  # it wraps
