"""In a real browser: the token's way in, and what a page of another site can get out of the server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import xmil
from tests.viewer.browser import expect_count, opened, served, wait_until
from tests.viewer.make_run import Made
from xmil.viewer.app import create_app
from xmil.viewer.collection import Collection
from xmil.viewer.server import BackgroundServer, Rules, address, open_socket

TOKEN = "a-long-enough-token"  # noqa: S105
ATTACK = """<!doctype html><body><script>
const at = "%(url)s";
const tried = (name, promise) => promise.then(() => [name, "got it"], () => [name, "refused"]);
const loaded = (tag, path) => new Promise((yes, no) => {
  const node = document.createElement(tag);
  node.onload = yes; node.onerror = no; node.src = at + path; document.body.append(node);
});
const post = (type) => fetch(at + "api/slides/0/whatif", {
  method: "POST", mode: type === "application/json" ? "cors" : "no-cors", headers: { "content-type": type },
  body: JSON.stringify({ run: 0, remove: [0] }), credentials: "include",
}).then((answer) => { if (!answer.ok) throw 0; });
window.outcome = Promise.all([
  tried("read", fetch(at + "api/run.json").then((answer) => answer.json())),
  tried("image", loaded("img", "tiles/0/9/0_0.jpeg")),
  tried("thumbnail", loaded("img", "api/slides/0/thumbnail.jpeg")),
  tried("script", loaded("script", "api/run.json")),
  tried("post", post("application/json")),
  tried("plain post", post("text/plain")),
]);
</script>"""
FRAME = '<!doctype html><iframe src="%(url)s" width="900" height="600"></iframe>'


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def another_site(folder: Path, html: str) -> Iterator[str]:
    """A page of another origin on this machine."""
    (folder / "evil.html").write_text(html)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}/evil.html"
        server.shutdown()


@pytest.fixture
def shown(made: Made) -> Collection:
    return Collection(made.runs, slides=made.slides, features=[made.features])


def test_the_token_leads_in_and_leaves_the_address(browser: Any, shown: Collection) -> None:
    rules, listening = Rules("127.0.0.1", TOKEN), open_socket("127.0.0.1", 0)
    server = BackgroundServer(create_app(shown, rules=rules), listening)
    place = address(listening, rules)
    try:
        assert place.endswith(f"?token={TOKEN}")
        with opened(browser, place) as page:
            page.get_by_text("slide-1").first.wait_for()
            assert TOKEN not in page.url
            assert page.evaluate("document.cookie") == ""  # scripts cannot read it
            (cookie,) = page.context.cookies()
            assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
            page.reload()
            page.get_by_text("slide-1").first.wait_for()
        with opened(browser, place.partition("?")[0], expect_errors=True) as page:
            assert "A token is required" in page.content()
            assert "slide-1" not in page.content()
    finally:
        server.stop()


def test_another_site_gets_nothing(browser: Any, shown: Collection, made: Made, tmp_path: Path) -> None:
    with (
        served(shown, made.models) as url,
        another_site(tmp_path, ATTACK % {"url": url}) as evil,
        opened(browser, evil, expect_errors=True) as page,
    ):
        outcome = dict(page.evaluate("window.outcome"))
        assert len(outcome) == 6
        assert set(outcome.values()) == {"refused"}, outcome


def test_the_attack_works_where_nobody_guards(browser: Any, made: Made, tmp_path: Path) -> None:
    """The same page gets pictures from a plain file server: the refusals above are the guard's."""
    (tmp_path / "tiles" / "0" / "9").mkdir(parents=True)
    from xmil.viewer.deepzoom import Pictures

    shown = Pictures(made.slides)
    (tmp_path / "tiles" / "0" / "9" / "0_0.jpeg").write_bytes(shown.thumbnail("slide-0"))
    shown.close()
    with another_site(tmp_path, "") as site:
        url = site.replace("localhost", "127.0.0.1").removesuffix("evil.html")
        (tmp_path / "evil.html").write_text(ATTACK % {"url": url})
        with opened(browser, site, expect_errors=True) as page:
            assert dict(page.evaluate("window.outcome"))["image"] == "got it"


def test_only_notebooks_may_frame_it(browser: Any, made: Made, shown: Collection, tmp_path: Path) -> None:
    with (
        xmil.view(made.runs, slides=made.slides, port=0) as inline,
        another_site(
            tmp_path, f'<!doctype html><link rel="icon" href="data:,">{inline._repr_html_()}'
        ) as notebook,
        opened(browser, notebook) as page,
    ):
        page.frame_locator("iframe").get_by_text("slide-1").first.wait_for()
    with (
        served(shown) as url,
        another_site(tmp_path, FRAME % {"url": url}) as evil,
        opened(browser, evil, expect_errors=True) as page,
    ):
        wait_until(page, lambda: page.frames[1].url.startswith("chrome-error:"))
        expect_count(page.frame_locator("iframe").get_by_text("slide-1"), 0)
