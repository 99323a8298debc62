"""A cohort's list, worked through in two tabs, the server killed in between; panning over many annotations.

python -m benchmarks.viewer_cohort [--listed 300 --slides 300 --annotations 20000]; 0 leaves a part out

Both tabs step through the slides and draw one annotation on each; the first one follows a filtered list. The
server is killed half way. At the end every annotation that was drawn must be on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.viewer.browser import chromium, open_slide, opened
from tests.viewer.given_scores import grid, signed, write_run

EDGE, AWAY = 64, 4.0  # seconds that the server stays away
DRAW = """([x, y]) => {
  const view = window.xmil.view;
  view.region([[[[x, y], [x + 50, y], [x + 50, y + 50], [x, y]]]], null);
  view.show("notes");
  view.notes.add();
  return view.marks.annotations.at(-1).id;
}"""
FRAMES = """async () => {
  const { viewport } = window.xmil.view.panes[0].viewer, times = [];
  viewport.zoomTo(3, undefined, true);
  let last = performance.now();
  for (let k = 0; k < 90; k++) {
    const centre = viewport.getCenter();
    centre.x = 0.5 + 0.3 * Math.sin(k / 9);
    centre.y = 0.3 + 0.15 * Math.cos(k / 9);
    viewport.panTo(centre, true);
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    times.push(now - last);
    last = now;
  }
  return times.slice(5);
}"""


class Server:
    """`xmil view` in a process of its own, on one port."""

    def __init__(self, run: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self._run = f"http://127.0.0.1:{self.port}/", run
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        code = "import sys; from xmil.cli import main; main(sys.argv[1:])"
        asked = ["view", str(self._run), "--port", str(self.port), "--no-browser"]
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", code, *asked], stdout=subprocess.DEVNULL
        )
        for _ in range(300):
            try:
                urllib.request.urlopen(self.url + "api/run.json", timeout=2)  # noqa: S310
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError("the server did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@contextmanager
def serving(run: Path) -> Iterator[Server]:
    """A started server, killed at the end."""
    server = Server(run)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def main() -> None:
    """Work through the cohort, then pan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listed", type=int, default=300)
    parser.add_argument("--slides", type=int, default=300)
    parser.add_argument("--annotations", type=int, default=20_000)
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        if given.listed:
            _list(browser, Path(name) / "listed", given.listed)
        if given.slides:
            _work_through(browser, Path(name) / "run", given.slides)
        if given.annotations:
            _pan(browser, Path(name) / "many", given.annotations)


def _list(browser: Any, run: Path, count: int) -> None:
    """Milliseconds until the list is there, and until its small maps have a scale."""
    for i in range(count):
        scores = {("lrp", target): sign * signed(1000, i) for target, sign in (("a", -1), ("b", 1))}
        write_run(run, f"slide-{i:03}", scores, coords=grid(40, 25, EDGE))
    times = []
    with serving(run) as server:
        for _ in range(5):
            began = time.monotonic()
            with opened(browser, server.url) as page:
                marks = []
                for what in ("table.slides td a", ".cohort-bar"):
                    page.locator(what).first.wait_for()
                    marks.append(1000 * (time.monotonic() - began))
            times.append(marks)
    shown = "; ".join(f"list {a:.0f} ms, scale {b:.0f} ms" for a, b in times)
    print(f"{count} slides, load {os.getloadavg()[0]:.1f}: {shown}", flush=True)


def _work_through(browser: Any, run: Path, count: int) -> None:
    names = [f"{'tumour' if i % 2 else 'normal'}-{i:03}" for i in range(count)]
    for i, name in enumerate(names):
        write_run(run, name, {("lrp", "tumour"): signed(20, i)}, coords=grid(5, 4, EDGE))
    drawn: set[str] = set()
    began = time.monotonic()
    with (
        serving(run) as server,
        opened(browser, server.url, expect_errors=True) as one,
        opened(browser, server.url, expect_errors=True) as two,
    ):
        one.locator("input[type=search]").fill("tumour")
        for page in (one, two):
            page.set_default_timeout(20_000)
            page.locator("tbody tr a").first.click()
        for step in range(count):
            if step == count // 2:
                _away(server, [(two, step)], drawn)
            elif step < count // 2:
                drawn.add(_annotate(one, step, ahead=True))
                drawn.add(_annotate(two, step, ahead=step < count - 1))
            else:
                drawn.add(_annotate(two, step, ahead=step < count - 1))
        for page in (one, two):
            page.wait_for_timeout(4_000)  # what was refused is written again
    kept = {f["id"] for path in run.rglob("*.geojson") for f in json.loads(path.read_text())["features"]}
    visited = {path.parent.name for path in run.rglob("*.geojson")}
    print(f"{count} slides in two tabs: {time.monotonic() - began:.0f} s, server killed once")
    lost = len(drawn - kept)
    print(f"annotations drawn {len(drawn)}, on disk {len(kept)}, lost {lost}, slides {len(visited)}")
    if drawn - kept or len(visited) != count:
        sys.exit("annotations were lost")


def _away(server: Server, pages: list[tuple[Any, int]], drawn: set[str]) -> None:
    """Kill the server, go on drawing, and start it again."""
    server.kill()
    for page, step in pages:
        drawn.add(_annotate(page, step, ahead=False))
        page.keyboard.press("Escape")
        page.keyboard.press("]")
        page.locator(".banner").wait_for()  # the next slide waits for the server
    time.sleep(AWAY)
    server.start()
    for page, _ in pages:
        page.wait_for_function("() => window.xmil.view?.firstPaint")


def _annotate(page: Any, step: int, *, ahead: bool) -> str:
    """Draw on the slide and go to the next one, if there is one."""
    page.wait_for_function("() => window.xmil.view?.firstPaint && window.xmil.view.storage")
    here = page.evaluate("() => window.xmil.view.info.id")
    found = str(page.evaluate(DRAW, [10 + step % 100, 10]))
    if ahead:
        page.keyboard.press("Escape")  # out of the name's field
        page.keyboard.press("]")
        page.wait_for_timeout(20)
        if page.locator(".head-buttons .step").nth(1).is_enabled():
            page.wait_for_function(
                "id => window.xmil.view?.info && window.xmil.view.info.id !== id", arg=here
            )
    return found


def _pan(browser: Any, run: Path, count: int) -> None:
    """Frames per second while a slide with many annotations moves under the view."""
    columns = 200
    write_run(run, "s", {("lrp", "tumour"): signed(25_000)}, coords=grid(columns, 125, EDGE))
    rng = np.random.default_rng(0)
    corners = rng.uniform((0, 0), (columns * EDGE, 125 * EDGE), size=(count, 2))
    turns = np.linspace(0, 2 * np.pi, 13)
    shape = 40 * np.stack([np.cos(turns), np.sin(turns)], axis=1)
    kinds = ("Tumor", "Stroma", "Necrosis", "Normal")
    features = [_feature(corner + shape, kinds[i % 4], i) for i, corner in enumerate(corners)]
    folder = run / "annotations" / "s"
    folder.mkdir(parents=True)
    document = {"type": "FeatureCollection", "xmil": {"revision": 1, "origin": [0, 0]}, "features": features}
    (folder / "reader.geojson").write_text(json.dumps(document))
    with serving(run) as server, opened(browser, server.url) as page:
        open_slide(page, server.url)
        shown = page.evaluate("() => window.xmil.view.marks.annotations.length")
        times = np.array(page.evaluate(FRAMES))
        page.evaluate("() => window.xmil.view.panes[0].home(true)")
    print(f"{shown:,} annotations: {1000 / np.median(times):.0f} frames/s, slowest tenth "
          f"{1000 / np.quantile(times, 0.9):.0f} frames/s")  # fmt: skip


def _feature(ring: Any, kind: str, i: int) -> dict[str, Any]:
    coordinates = [[[round(float(x)), round(float(y))] for x, y in ring]]
    return {
        "type": "Feature",
        "id": f"note-{i}",
        "geometry": {"type": "Polygon", "coordinates": coordinates},
        "properties": {"objectType": "annotation", "name": "", "classification": {"name": kind}},
    }


if __name__ == "__main__":
    main()
