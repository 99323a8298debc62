"""The viewer's page at 1,000, 25,000 and 100,000 patches: first paint, and switching method or class.

python -m benchmarks viewer_page
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tests.viewer.browser import chromium, open_slide, opened, served
from tests.viewer.given_scores import SWITCHES, grid, signed, write_run
from tests.viewer.make_run import patch_colours, write_slide

from xmil.viewer.collection import Collection

SIZES = {1_000: (40, 25, 160), 25_000: (200, 125, 32), 100_000: (400, 250, 16)}  # columns, rows, edge
OPENINGS = 5


def main() -> None:
    """Print the medians in milliseconds, each also as a multiple of the smallest slide's."""
    print("| patches | first paint | repaint of a switch | next frame of a switch | load |")
    print("|---|---|---|---|---|")
    first: tuple[float, ...] = ()
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        for n in SIZES:
            found = _measured(browser, Path(name, str(n)), n)
            first = first or found
            cells = [f"{ms:.0f} ms ({ms / base:.2f})" for ms, base in zip(found, first, strict=True)]
            print(f"| {n:,} | {' | '.join(cells)} | {os.getloadavg()[0]:.1f} |", flush=True)


def _measured(browser: Any, folder: Path, n: int) -> tuple[float, ...]:
    """Medians over the openings: first paint, repaint, next frame."""
    columns, rows, edge = SIZES[n]
    (folder / "slides").mkdir(parents=True)
    pairs = [(method, target) for method in ("lrp", "gxi", "attention") for target in ("benign", "tumour")]
    scores = {pair: signed(n, k) for k, pair in enumerate(pairs)}
    write_run(folder / "run", "large", scores, coords=grid(columns, rows, edge), edge=edge)
    write_slide(folder / "slides" / "large.tif", patch_colours(n).reshape(rows, columns, 3), edge=edge)
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
