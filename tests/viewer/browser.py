"""A real browser before a real server: pages that must stay free of errors, and the colours they show."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from xmil.heatmaps import SIGNED, Scale
from xmil.viewer.static_copy import page_files

Colours = npt.NDArray[np.float64]
WATCHED = """(() => {
  const pending = (window.pendingWork = new Set());  // timers of up to a second, and requests
  const { setTimeout: begin, clearTimeout: end, fetch: ask } = window;
  window.setTimeout = (work, delay = 0, ...more) => {
    const timer = begin((...given) => { pending.delete(timer); work(...given); }, delay, ...more);
    if (delay <= 1000) pending.add(timer);
    return timer;
  };
  window.clearTimeout = (timer) => { pending.delete(timer); end(timer); };
  const track = (promise) => {
    const work = {};
    pending.add(work);
    return promise.finally(() => begin(() => pending.delete(work)));
  };
  window.fetch = (...asked) => track(ask(...asked).then((answer) => {
    for (const kind of ["json", "text", "blob", "arrayBuffer"]) {
      const read = answer[kind].bind(answer);
      answer[kind] = () => track(read());
    }
    return answer;
  }));
})();"""
STILL = """() => {
  const { view, compare } = window.xmil ?? {};
  const panes = [...(view?.panes ?? []), ...(compare?.sides ?? []).flatMap((side) => side.pane ?? [])];
  const names = ["zoomSpring", "centerSpringX", "centerSpringY", "degreesSpring"];
  return panes.every(({ viewer: { viewport }, stage }) => {
    if (!viewport) return true;
    const { x, y } = viewport.getContainerSize();  // follows the stage a frame later
    const fits = x === stage.clientWidth && y === stage.clientHeight;
    return fits && names.every((name) => viewport[name].isAtTargetValue());
  });
}"""
QUIET = f"() => window.pendingWork.size === 0 && ({STILL})()"


@contextmanager
def chromium() -> Iterator[Any]:
    """The machine's Chromium, driven by Playwright."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium is installed")
    if not page_files():
        pytest.skip("the viewer's page is not built")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def served(collection: Any, models: list[Path] | None = None, *, port: int = 0) -> Iterator[str]:
    """The address of a server on loopback, on any free port or a given one."""
    from xmil.viewer.app import create_app
    from xmil.viewer.server import BackgroundServer, Rules, address, open_socket

    rules = Rules("127.0.0.1", None)
    listening = open_socket("127.0.0.1", port)
    server = BackgroundServer(create_app(collection, models=models or [], rules=rules), listening)
    yield address(listening, rules)
    server.stop()


def is_fault(message: Any) -> bool:
    """Whether the console complains; not of a tile that came as its slide was closed, which does no harm."""
    return message.type in ("error", "warning") and not message.text.startswith("Ignoring tile")


@contextmanager
def opened(
    browser: Any, url: str, *, expect_errors: bool = False, reader: str | None = "reader", **options: Any
) -> Iterator[Any]:
    """A page of a reader who has given a name; what its console complains about fails the test."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    context.add_init_script(WATCHED)
    if reader is not None:
        kept = json.dumps(json.dumps(reader))
        context.add_init_script(f"try {{ localStorage['xmil:reader'] ??= {kept}; }} catch {{}}")
    page = context.new_page()
    page.set_default_timeout(60_000)
    faults: list[str] = []
    page.on("console", lambda m: faults.append(m.text) if is_fault(m) else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: (faults.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.goto(url)
    yield page
    context.close()
    assert expect_errors or not faults, faults


def port_of(url: str) -> int:
    """The port of a server's address."""
    return urlsplit(url).port or 80


def open_slide(page: Any, url: str, key: int = 0) -> None:
    """Go to a slide and wait until its evidence is painted and the picture has come."""
    if not page.url.startswith(url):
        page.goto(url)
    page.wait_for_function("() => window.xmil?.run")
    page.evaluate(
        """key => {
          const slide = window.xmil.run.slides.find((each) => each.key === key);
          location.hash = "#/slide/" + encodeURIComponent(slide.id);
        }""",
        key,
    )
    page.wait_for_function("key => window.xmil.view?.row.key === key && window.xmil.view.firstPaint", arg=key)
    page.wait_for_function(
        """() => {
          const view = window.xmil.view;
          return !view.info.image || view.panes[0].viewer.world.getItemAt(0)?.getFullyLoaded();
        }"""
    )


def show_plainly(page: Any) -> None:
    """Evidence and tissue in full colours, so that pixels are the palette's and the slide's."""
    page.locator("input[name=opacity]").fill("1")
    page.get_by_label("Fade weak evidence").uncheck()
    grey = page.get_by_label("Grey tissue")
    if grey.is_enabled():
        grey.uncheck()


def settle(page: Any) -> None:
    """Wait until the page has drawn twice."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def wait_until_still(page: Any) -> None:
    """Wait until the slides have stopped moving: only then do places have pixels that last."""
    page.wait_for_function(STILL)
    settle(page)
    page.wait_for_function(STILL)


def wait_until_quiet(page: Any) -> None:
    """Wait until the page has done all it began: timers are over, requests answered, the slide rests."""
    page.wait_for_function(QUIET)
    settle(page)
    page.wait_for_function(QUIET)


def expect_text(locator: Any, text: str) -> None:
    """Wait until an element shows a text among others."""
    from playwright.sync_api import expect

    expect(locator).to_contain_text(text, use_inner_text=True, timeout=60_000)


def expect_count(locator: Any, count: int) -> None:
    """Wait until there are so many elements."""
    from playwright.sync_api import expect

    expect(locator).to_have_count(count, timeout=60_000)


def expect_value(locator: Any, value: str) -> None:
    """Wait until a control has a value."""
    from playwright.sync_api import expect

    expect(locator).to_have_value(value, timeout=60_000)


def expect_attribute(locator: Any, name: str, value: str) -> None:
    """Wait until an element has an attribute of a value."""
    from playwright.sync_api import expect

    expect(locator).to_have_attribute(name, value, timeout=60_000)


def wait_until(page: Any, condition: Callable[[], bool], *, seconds: float = 120.0) -> None:
    """Let the page go on until something outside it is so; the limit only ends what would never end."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        page.wait_for_timeout(20)


def place_of(page: Any, x: float, y: float, pane: int = 0) -> tuple[float, float]:
    """The screen pixel of a level-0 place once the slide is still, by OpenSeadragon's own reckoning."""
    wait_until_still(page)
    found = page.evaluate(
        """([x, y, pane]) => {
          const view = window.xmil.view, { viewer, stage } = view.panes[pane], { bounds } = view;
          const point = viewer.viewport.getCenter(true);
          point.x = (x - bounds.x) / bounds.width; point.y = (y - bounds.y) / bounds.width;
          const pixel = viewer.viewport.viewportToViewerElementCoordinates(point);
          const box = stage.getBoundingClientRect();
          return [box.left + pixel.x, box.top + pixel.y];
        }""",
        [float(x), float(y), pane],
    )
    return found[0], found[1]


def pixels(page: Any) -> Colours:
    """What the screen shows once the slide is still (h, w, 3)."""
    wait_until_still(page)
    return np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB"), dtype=np.float64)


def red_blue(share: float) -> Colours:
    """The colour of a share of the scale from -1 to 1, as the heatmaps of files have it."""
    return Scale(-1, 1, True, SIGNED).paint([float(share)])[0, :3].astype(np.float64)


def whisker(scores: npt.NDArray[Any]) -> float:
    """Where colours saturate: the farthest score within 1.5 IQR of the quartiles."""
    q1, q3 = np.quantile(scores, (0.25, 0.75))
    reach = 1.5 * (q3 - q1)
    inside = scores[(scores >= q1 - reach) & (scores <= q3 + reach)]
    return float(np.abs(inside).max())
