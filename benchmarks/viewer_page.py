"""The viewer's page at 1,000, 25,000 and 100,000 patches: first paint, and switching method or class.

python -m benchmarks viewer_page
python -m benchmarks.viewer_page --against FOLDER

The second compares first paints with another build of the page (a folder with index.html), opened in turn
over one server.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tests.viewer.browser import chromium, open_slide, opened, served
from tests.viewer.given_scores import SWITCHES, grid, signed, write_run
from tests.viewer.make_run import patch_colours, write_slide

from xmil.viewer.collection import Collection
from xmil.viewer.static_copy import page_files

SIZES = {1_000: (40, 25, 160), 25_000: (200, 125, 32), 100_000: (400, 250, 16)}  # columns, rows, edge
OPENINGS = 5


def main() -> None:
    """Measure this page, or compare it with another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another build of the page")
    parser.add_argument("--pairs", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        if given.against:
            _compare(browser, Path(name), given.against, given.pairs)
        else:
            _table(browser, Path(name))


def _table(browser: Any, folder: Path) -> None:
    """Print the medians in milliseconds, each also as a multiple of the smallest slide's."""
    print("| patches | first paint | repaint of a switch | next frame of a switch | load |")
    print("|---|---|---|---|---|")
    first: tuple[float, ...] = ()
    for n in SIZES:
        found = _measured(browser, folder / str(n), n)
        first = first or found
        cells = [f"{ms:.0f} ms ({ms / base:.2f})" for ms, base in zip(found, first, strict=True)]
        print(f"| {n:,} | {' | '.join(cells)} | {os.getloadavg()[0]:.1f} |", flush=True)


def _compare(browser: Any, folder: Path, other: Path, pairs: int) -> None:
    """Print first paints of 100,000 patches on both pages, and the median ratio of the pairs."""
    ours = page_files()["index.html"].parent
    _write(folder, 100_000)
    with served(Collection([folder / "run"], slides=folder / "slides")) as url:
        found = [[_opening(browser, url, root) for root in (other, ours)] for _ in range(pairs + 1)][1:]
    there, here = np.array(found).T
    print(f"other page {np.median(there):.0f} ms, this page {np.median(here):.0f} ms, this / other "
          f"{np.median(here / there):.2f} over {pairs} pairs, load {os.getloadavg()[0]:.0f}")  # fmt: skip


def _opening(browser: Any, url: str, root: Path) -> float:
    """Milliseconds until the slide is seen, with the page's own files from a folder."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(60_000)
    for pattern in (url, f"{url}assets/*"):
        page.route(pattern, partial(_from_folder, url, root))
    page.goto(url)
    link = page.locator("table.slides td a").first
    page.evaluate("hash => { location.hash = hash; }", link.get_attribute("href"))
    page.wait_for_function("() => window.xmil.view?.firstPaint")
    found = float(page.evaluate("() => window.xmil.view.firstPaint"))
    context.close()
    return found


def _from_folder(url: str, root: Path, route: Any) -> None:
    name = route.request.url.removeprefix(url).partition("#")[0] or "index.html"
    file = root / name
    route.fulfill(path=file) if file.is_file() else route.continue_()


def _write(folder: Path, n: int) -> None:
    """A slide of n patches with its image and six maps."""
    columns, rows, edge = SIZES[n]
    (folder / "slides").mkdir(parents=True)
    pairs = [(method, target) for method in ("lrp", "gxi", "attention") for target in ("benign", "tumour")]
    scores = {pair: signed(n, k) for k, pair in enumerate(pairs)}
    write_run(folder / "run", "large", scores, coords=grid(columns, rows, edge), edge=edge)
    write_slide(folder / "slides" / "large.tif", patch_colours(n).reshape(rows, columns, 3), edge=edge)


def _measured(browser: Any, folder: Path, n: int) -> tuple[float, ...]:
    """Medians over the openings: first paint, repaint, next frame."""
    _write(folder, n)
    openings, switches = [], []
    with served(Collection([folder / "run"], slides=folder / "slides")) as url:
        for _ in range(OPENINGS):
            with opened(browser, url) as page:
                page.locator("table.slides td a").wait_for()
                open_slide(page, url)
                openings.append(page.evaluate("() => window.xmil.view.firstPaint"))
                switches.append(np.median(page.evaluate(SWITCHES), axis=0))
    return float(np.median(openings)), *(float(value) for value in np.median(switches, axis=0))


if __name__ == "__main__":
    main()
