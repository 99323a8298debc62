"""The viewer's page on a slide of 25,000 patches: first paint, and switching method or class.

python -m benchmarks viewer_page
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
from tests.viewer.browser import chromium, open_slide, opened, served
from tests.viewer.given_scores import SWITCHES, grid, signed, write_run
from tests.viewer.make_run import patch_colours, write_slide

from xmil.viewer.collection import Collection

COLUMNS, ROWS, EDGE = 200, 125, 32
OPENINGS = 5


def main() -> None:
    """Print the medians in milliseconds."""
    with tempfile.TemporaryDirectory() as name:
        run, slides = Path(name, "run"), Path(name, "slides")
        slides.mkdir()
        n = COLUMNS * ROWS
        pairs = [
            (method, target) for method in ("lrp", "gxi", "attention") for target in ("benign", "tumour")
        ]
        scores = {pair: signed(n, k) for k, pair in enumerate(pairs)}
        write_run(run, "large", scores, coords=grid(COLUMNS, ROWS, EDGE), edge=EDGE)
        write_slide(slides / "large.tif", patch_colours(n).reshape(ROWS, COLUMNS, 3), edge=EDGE)
        _measure(run, slides)


def _measure(run: Path, slides: Path) -> None:
    openings, switches = [], []
    with chromium() as browser, served(Collection([run], slides=slides)) as url:
        for _ in range(OPENINGS):
            with opened(browser, url) as page:
                page.locator("table.slides td a").wait_for()
                open_slide(page, url)
                openings.append(page.evaluate("() => window.xmil.view.firstPaint"))
                switches.append(np.median(page.evaluate(SWITCHES), axis=0))
    painted, shown = np.median(switches, axis=0)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {COLUMNS * ROWS:,} patches")
    print(f"first paint of a slide   {np.median(openings):7.0f} ms (of {OPENINGS}: {np.round(openings)})")
    print(f"switch: repaint          {painted:7.1f} ms (median of 10)")
    print(f"switch: next frame shown {shown:7.1f} ms (median of 10)")


if __name__ == "__main__":
    main()
