"""`python docs/bench_page.py RUN [NAME]`: the page of a run of `xmil bench`, for the docs to embed."""

from __future__ import annotations

import sys
from pathlib import Path

from xmil.bench import page_of, read_results

if __name__ == "__main__":
    page = page_of(read_results(Path(sys.argv[1])), beside=False)
    name = sys.argv[2] if len(sys.argv) > 2 else "bench-quick.html"
    Path(__file__).with_name(name).write_text(page, encoding="utf-8")
