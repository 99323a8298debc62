"""`python docs/bench_page.py RUN [NAME]`: the page of a run of `xmil bench`, for the docs to embed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from xmil.bench import page_of

if __name__ == "__main__":
    page = page_of(json.loads(Path(sys.argv[1], "results.json").read_text(encoding="utf-8")), beside=False)
    name = sys.argv[2] if len(sys.argv) > 2 else "bench-quick.html"
    Path(__file__).with_name(name).write_text(page, encoding="utf-8")
